"""The page that `regard view` serves: it contains no data, and asks the server for every number.

It shares the core, the colours and the sentences of the report page (`regard.view.report`), and has
its own map of tiles, inspectors, text and atlas.
"""

from __future__ import annotations

import re
from importlib import resources
from string import Template

from regard import language
from regard.language import LANGUAGES, check_language
from regard.view import palette
from regard.view.html_page import content_hash
from regard.view.report import as_json
from regard.view.report import catalogue as report_catalogue

SHARED = ("core.js", "paint.js")
"""Scripts of the report page."""
SCRIPTS = ("source.js", "tilemap.js", "inspectors.js", "tokens.js", "heads.js", "live_start.js")
SHARED_STYLES = ("report.css", "panels.css")
GROUPS = ("and", "atlas", "core", "map", "scale", "stat", "why")
"""The groups of sentences of the report page that this page uses."""


def catalogue(lang: str) -> dict[str, str]:
    """Return the sentences of this page in a language, by key."""
    own = language.catalogue("regard.view.tile_page", lang)
    shared = {k: x for k, x in report_catalogue(lang).items() if k.partition(".")[0] in GROUPS}
    return {**shared, **own}


def tile_page(lang: str = "en") -> str:
    """Return the HTML of the page."""
    check_language(lang)
    parts = [_asset("report", x) for x in SHARED] + [_asset("tile_page", x) for x in SCRIPTS]
    script = "\n".join(['(() => {\n"use strict";', *parts, "})();"])
    style = palette.css(switch=True) + "".join(_asset("report", x) for x in SHARED_STYLES)
    style += _asset("tile_page", "live.css")
    # one place of one head stands in for the facts until the server has answered
    stand_in = {"heads": [0], "T": 1, "N": 1, "label": "0", "q_text": 0, "k_text": 0, "source": 0}
    content = {
        "strings": {name: catalogue(name) for name in LANGUAGES},
        "palette": {"weights": palette.WEIGHTS, "signed": palette.SIGNED},
        "metrics": {"none": {"of": [[0]]}},
        "places": [stand_in],
        "sources": [{}],
        "texts": [[""]],
        "start": {"view": "map", "stat": "max", "lang": lang},
    }
    return Template(_asset("tile_page", "page.html")).substitute(
        lang=lang, style=style, script=script, data=as_json(content), policy=_policy(script, style)
    )


def content_policy(page: str) -> str:
    """Return the content security policy that stands in a page, for the header of the answer."""
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None, "the page states its policy"
    return f"{policy[1]}; frame-ancestors 'none'"


def _policy(script: str, style: str) -> str:
    """Return the policy: this script, this style, and answers of this server only."""
    return (
        f"default-src 'none'; script-src '{content_hash(script)}'; "
        f"style-src '{content_hash(style)}'; img-src blob: data:; connect-src 'self'; "
        "worker-src blob:; base-uri 'none'; form-action 'none'"
    )


def _asset(folder: str, name: str) -> str:
    return resources.files(f"regard.view.{folder}").joinpath(name).read_text("utf-8")
