"""The interactive page in a notebook, in a sandbox: a widget of anywidget, or a frame."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from regard.did_you_mean import suggest
from regard.errors import ArgumentError

HEIGHT = 640
"""Height of the page in a notebook, in pixels."""
VIEWS = ("atlas", "map", "compare", "text", "row", "cell", "diagnostics")
"""The views of the page."""
INSTALL = "python -m pip install 'regard[notebook]'"


class PagePlace(NamedTuple):
    """A place, as it stands on the page."""

    name: str
    heads: tuple[int, ...]
    T: int
    N: int


def frame(page: str, height: int = HEIGHT) -> str:
    """Return HTML that shows a page in a sandboxed frame.

    >>> frame("<p>a & b</p>")[:40]
    '<iframe sandbox="allow-scripts" style="w'
    """
    style = f"width:100%;height:{height}px;border:0"
    shown = html.escape(page, quote=True)
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{shown}"></iframe>'


def has_widgets() -> bool:
    """Return whether anywidget is installed.

    >>> isinstance(has_widgets(), bool)
    True
    """
    try:
        importlib.import_module("anywidget")
    except ImportError:
        return False
    return True


def widget(page: str, places: Sequence[PagePlace], height: int = HEIGHT) -> Any:
    """Return a widget that shows a page."""
    if not has_widgets():
        raise ArgumentError(
            f"a widget needs anywidget, which is not installed: {INSTALL}; without it a notebook "
            "shows the page in a frame"
        )
    shown = _widget_class()(page=page, height=height)
    shown.places = places
    return shown


@cache
def _widget_class() -> Any:
    """Define the class of the widget, which needs the imported anywidget."""
    anywidget: Any = importlib.import_module("anywidget")
    traitlets: Any = importlib.import_module("traitlets")
    script = resources.files("regard.view").joinpath("notebook_page.js").read_text("utf-8")

    class PageWidget(anywidget.AnyWidget):  # type: ignore[misc]
        """The interactive page of a recording."""

        _esm = script
        page = traitlets.Unicode("").tag(sync=True)
        address = traitlets.Unicode("").tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)
        places: Sequence[PagePlace] = ()

        def show(
            self,
            layer: int | str = 0,
            head: int = 0,
            query: int | None = None,
            key: int | None = None,
            view: str = "map",
        ) -> None:
            """Move the page to a head, query and key, as `address` checks them."""
            self.address = address(self.places, layer, head, query, key, view)

    return PageWidget


def address(
    places: Sequence[PagePlace],
    layer: int | str,
    head: int,
    query: int | None,
    key: int | None,
    view: str,
) -> str:
    """Return the fragment of the page's URL that opens a view of a head.

    >>> places = [PagePlace("layers.0", (0, 1), 6, 6)]
    >>> address(places, "layers.0", 1, 5, None, "row")
    'L0H1&v=row&i=5'
    """
    names = [place.name for place in places]
    if isinstance(layer, str) and layer in names:
        layer = names.index(layer)
    if isinstance(layer, str) or not -len(names) <= layer < len(names):
        raise ArgumentError(f"there is no layer {layer!r}; the layers are {', '.join(names)}")
    place = places[layer]
    if head not in place.heads:
        known = ", ".join(map(str, place.heads))
        raise ArgumentError(f"{place.name} has no head {head}; it has the heads {known}")
    if view not in VIEWS:
        known = ", ".join(VIEWS)
        raise ArgumentError(f"view is {view!r}; it must be one of {known}{suggest(view, VIEWS)}")
    parts = [f"L{layer % len(names)}H{head}", f"v={view}"]
    for what, short, n, count in (("query", "i", query, place.T), ("key", "j", key, place.N)):
        if n is not None and not 0 <= n < count:
            raise ArgumentError(f"{what} is {n}; on the page it is from 0 to {count - 1}")
        parts += [] if n is None else [f"{short}={n}"]
    return "&".join(parts)
