"""The page over a recording: one file that carries its data, style and script, and asks nothing of
any network.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from regard.foreign import inert
from regard.view import palette
from regard.view.html import content_hash
from regard.view.report.data import as_json, pack, shown
from regard.view.report.lang import LANGUAGES, catalogue, check_language

SCRIPTS = (
    "core.js",
    "math.js",
    "paint.js",
    "pixels.js",
    "heat.js",
    "export.js",
    "panels.js",
    "bar.js",
    "whatif.js",
    "atlas.js",
    "scatter.js",
    "map.js",
    "compare.js",
    "text.js",
    "row.js",
    "cell.js",
    "diagnostics.js",
    "start.js",
)
"""In this order they make the one script of the page."""
STYLES = ("report.css", "panels.css")


def page(data: Mapping[str, Any], lang: str = "en") -> str:
    """The HTML of `regard.inspect.report`'s data.

    Tokens are untrusted: they travel as JSON whose markup characters are escaped, reach the page as
    text only, and a content policy lets no other script run than the page's own, known by its hash.

    Args:
        data: {"meta": plain data, "arrays": {name: numpy array}}.
        lang: the language in which the page opens; it carries them all.

    Raises:
        ArgumentError: the language is not one of those that the page speaks.
    """
    check_language(lang)
    meta, arrays = shown(data["meta"]), pack(data["arrays"])
    script = "\n".join(['(() => {\n"use strict";', *map(_asset, SCRIPTS), "})();"])
    style = palette.css(switch=True) + "".join(map(_asset, STYLES))
    content = {
        **meta,
        "arrays": arrays.table,
        "strings": {name: catalogue(name) for name in LANGUAGES},
        "palette": {"weights": palette.WEIGHTS, "signed": palette.SIGNED},
        "start": {**meta.get("start", {}), "lang": lang},
    }
    return Template(_asset("page.html")).substitute(
        lang=lang,
        title=html.escape(inert(f"regard: {meta['title']}")),
        style=style,
        script=script,
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        data=as_json(content),
        arrays=arrays.text,
    )


def _asset(name: str) -> str:
    return resources.files("regard.view.report").joinpath(name).read_text("utf-8")
