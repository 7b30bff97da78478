"""The interactive page of a recording: one component with two feeds.

`report_page` returns one HTML file whose numbers are arrays in the file; it makes no network
requests. `tile_page` returns the page that `regard view` serves: it contains no data, and asks the
server for tiles and for every number. Both have the same frame, colours, tooltips, heat map with
rulers and gestures, scatter of heads and lists of weights; a feed adds its own views.

All visible text is in catalogues, one for each language, `strings/<language>.json`: {key:
sentence}. A sentence may have placeholders, `{name}`, which the page fills in. Every language has
the same keys with the same placeholders.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard import language
from regard.errors import ArgumentTypeError
from regard.language import LANGUAGES, check_language
from regard.untrusted_text import escape_controls
from regard.view import palette
from regard.view.html_page import content_hash

SHARED = ("core.js", "panels.js", "paint.js", "ui.js", "heat.js", "scatter.js", "atlas.js")
"""The parts of the script that both feeds have, in order; the frame follows the views."""
ARRAY_SCRIPTS = (
    "math.js",
    "pixels.js",
    "array_heat.js",
    "export.js",
    "whatif.js",
    "map.js",
    "compare.js",
    "text.js",
    "row.js",
    "sentence.js",
    "cell.js",
    "diagnostics.js",
    "array_feed.js",
)
"""The parts that draw from the arrays of a report."""
TILE_SCRIPTS = (
    "tile_source.js",
    "tile_map.js",
    "tile_inspectors.js",
    "tile_text.js",
    "tile_feed.js",
)
"""The parts that draw from the tiles of a server."""
STYLES = ("page.css", "panels.css")
ARRAY_SOURCES = "img-src data:"
TILE_SOURCES = "img-src blob: data:; connect-src 'self'; worker-src blob:"
"""What a page may load beside its own script and style: tiles come from its own server only."""
ICON = '<link rel="icon" href="data:,">\n'
"""An empty icon, so that the browser does not ask the server for one."""
TILE_GROUPS = (
    *("and", "atlas", "core", "live", "map", "metric", "panel", "scale", "scatter", "stat", "why"),
)
"""The groups of sentences that the page of tiles uses."""
TYPES = {"float32": "f32", "float64": "f64", "uint8": "u8", "int32": "i32", "uint16": "bf16"}
"""numpy dtype to its name on the page. A uint16 holds a bfloat16: the upper half of a float32."""


def catalogue(lang: str) -> dict[str, str]:
    """Return the sentences of a language, by key."""
    return dict(language.catalogue("regard.view.page", lang))


def report_page(data: Mapping[str, Any], lang: str = "en") -> str:
    """Return the HTML of the data that `regard.inspect.report` made.

    Tokens are untrusted: they are escaped JSON, inserted as text only, and the content security
    policy allows the page's own script only, by its hash.
    """
    check_language(lang)
    meta, arrays = to_page_value(data["meta"]), pack(data["arrays"])
    content = {
        **meta,
        "arrays": arrays.table,
        "strings": _sentences(lambda group: group != "live"),
        "start": {**meta.get("start", {}), "lang": lang},
    }
    element = f'<script type="application/octet-stream" id="arrays">{arrays.text}</script>\n'
    title, scripts = f"regard: {meta['title']}", (*SHARED, *ARRAY_SCRIPTS)
    plain = _without_script(data["meta"].get("explanation"), lang)
    return _html(content, title, scripts, STYLES, ARRAY_SOURCES, element, plain)


def _without_script(explanation: Mapping[str, Any] | None, lang: str) -> str:
    """Return what a browser without JavaScript shows: the screen of the explanation, if any."""
    text = "This page needs JavaScript, which is turned off in this browser."
    if explanation is None:
        return text
    from regard.view.explanation_summary import summary

    screen = "\n".join(line.plain for line in summary(explanation, lang))
    return f"{text}\n<pre>{html.escape(escape_controls(screen, keep=chr(10)))}</pre>"


def tile_page(lang: str | None = None) -> str:
    """Return the HTML of the page that a server of tiles answers with; without a language it opens
    in that of the browser.
    """
    check_language(lang or "en")
    # one place of one head stands in for the facts until the server has answered
    stand_in = {"heads": [0], "T": 1, "N": 1, "label": "0", "q_text": 0, "k_text": 0, "source": 0}
    content = {
        "strings": _sentences(TILE_GROUPS.__contains__),
        "metrics": {"none": {"of": [[0]]}},
        "places": [stand_in],
        "sources": [{}],
        "texts": [[""]],
        "start": {"view": "map", "stat": "max", "lang": lang or "browser"},
    }
    styles = (*STYLES, "tiles.css")
    plain = _without_script(None, lang or "en")
    return _html(content, "regard", (*SHARED, *TILE_SCRIPTS), styles, TILE_SOURCES, "", plain)


def content_policy(page: str) -> str:
    """Return the content security policy that stands in a page, for the header of the answer."""
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None, "the page states its policy"
    return f"{policy[1]}; frame-ancestors 'none'"


def _sentences(wanted: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """Return the sentences of the wanted groups, in every language."""
    return {
        name: {key: x for key, x in catalogue(name).items() if wanted(key.partition(".")[0])}
        for name in LANGUAGES
    }


def _html(
    content: dict[str, Any],
    title: str,
    scripts: Sequence[str],
    styles: Sequence[str],
    sources: str,
    arrays: str,
    plain: str,
) -> str:
    """Return a page with its data, script and style, and its text for a browser without script."""
    colours = {"weights": palette.WEIGHTS, "signed": palette.SIGNED}
    parts = map(_asset, (*scripts, "frame.js"))
    script = "\n".join(['(() => {\n"use strict";', *parts, "})();"])
    style = palette.css(switch=True) + "".join(map(_asset, styles))
    return Template(_asset("page.html")).substitute(
        lang=content["start"]["lang"].replace("browser", "en"),
        title=html.escape(escape_controls(title)),
        style=style,
        script=script,
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        sources=sources,
        icon="" if arrays else ICON,
        data=as_json({**content, "palette": colours}),
        arrays=arrays,
        plain=plain,
    )


def _asset(name: str) -> str:
    return resources.files("regard.view.page").joinpath(name).read_text("utf-8")


class PackedArrays(NamedTuple):
    """Arrays as base64 of their gzipped bytes, and a table of their offsets."""

    table: list[dict[str, object]]
    text: str


def pack(arrays: Mapping[str, NDArray[np.generic]]) -> PackedArrays:
    """Pack all arrays into one block, each at a multiple of 8 bytes.

    The first bytes of all numbers come first, then the second ones, and so on: gzip then leaves
    85 % of fp32 numbers instead of 93 %.
    """
    table, blocks, offset = [], [], 0
    for name, x in arrays.items():
        if x.dtype.name not in TYPES:
            raise ArgumentTypeError(
                f"the array {name} is {x.dtype.name}; a page can contain {', '.join(TYPES)}"
            )
        numbers = np.ascontiguousarray(x, x.dtype.newbyteorder("<")).reshape(-1, 1)
        block = numbers.view(np.uint8).T.tobytes()
        block += bytes(-len(block) % 8)
        table.append({"name": name, "type": TYPES[x.dtype.name], "offset": offset, "count": x.size})
        blocks.append(block)
        offset += len(block)
    packed = gzip.compress(b"".join(blocks), 6, mtime=0)
    return PackedArrays(table, base64.b64encode(packed).decode())


def as_json(content: object) -> str:
    """Return JSON that HTML parsers cannot misread: ASCII, with <, > and & escaped."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def to_page_value(value: object) -> Any:
    """Return plain data with hidden characters as numbers, and non-finite numbers as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, Mapping):
        return {escape_controls(str(name)): to_page_value(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_page_value(x) for x in value]
    return value
