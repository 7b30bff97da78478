"""The page as text: one offline file, a policy that lets nothing else run, data that nothing obeys,
a bounded size.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import numpy as np
import pytest

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.report import report
from regard.view import palette
from regard.view.html_page import content_hash
from regard.view.page import ARRAY_SCRIPTS, SHARED, STYLES, TILE_SCRIPTS, pack, report_page
from tests.inspect.test_report import run
from tests.view.report.cases import CASES, recorded

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\u202eRTL",
    "zero\u200bwidth",
    "nul\x00",
    "\u2028",
    "${data}",
    "]]><!--",
)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return report(run())


@pytest.fixture(scope="module")
def text(data: dict[str, Any]) -> str:
    return report_page(data)


class Page(HTMLParser):
    """What an HTML parser sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def carried(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_it_asks_no_network_for_anything(text: str) -> None:
    page = Page(text)
    script = text.split("<script>")[1].split("</script>")[0]
    # names of namespaces are no addresses: nothing is fetched from them
    bare = script.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", bare)
    assert not re.search(
        r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|import\(|sendBeacon|importScripts|Worker\(",
        script,
    )
    assert all("src" not in attributes and "href" not in attributes for _, attributes in page.tags)
    assert {tag for tag, _ in page.tags} <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "div",
        "noscript",
        "script",
    }
    style = text.split("<style>")[1].split("</style>")[0]
    assert not re.search(r"@import|url\(", style)


def test_the_policy_lets_run_what_the_page_carries_and_nothing_else(text: str) -> None:
    policy = next(a["content"] for tag, a in Page(text).tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind in ("script", "style"):
        content = text.split(f"<{kind}>")[1].split(f"</{kind}>")[0]
        assert f"{kind}-src '{content_hash(content)}'" in policy


@pytest.mark.parametrize(
    "way",
    [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "eval(",
        "Function(",
        "createContextualFragment",
        "srcdoc",
    ],
)
def test_nothing_parses_markup(text: str, way: str) -> None:
    assert way not in text.split("<script>")[1]


def test_every_script_is_there_and_ends_what_it_begins() -> None:
    script = report_page(report(run(layers=1, H=1, T=2))).split("<script>")[1]
    names = [*SHARED, *ARRAY_SCRIPTS, *TILE_SCRIPTS, "frame.js"]
    folder = resources.files("regard.view.page")
    assert sorted(names) == sorted(x.name for x in folder.iterdir() if x.name.endswith(".js"))
    assert all(folder.joinpath(name).is_file() for name in STYLES)
    assert script.count('"use strict"') >= 1


def test_hostile_texts_are_data(data: dict[str, Any]) -> None:
    bad = {**data, "meta": {**data["meta"], "texts": [list(HOSTILE)], "title": HOSTILE[0]}}
    found = report_page(bad)
    assert [tag for tag, _ in Page(found).tags] == [tag for tag, _ in Page(report_page(data)).tags]
    raw = re.search(r'id="data">(.*?)</script>', found, re.DOTALL)
    assert raw is not None
    assert raw[1].isascii()
    assert not re.search(r"[<>&\x00-\x1f]", raw[1])
    shown = carried(found)["texts"][0]
    assert shown[0] == HOSTILE[0], "the letters arrive, to be shown as text"
    assert shown[2] == "‹202E›RTL"
    assert shown[4] == "nul‹00›"
    assert "<title>regard: &lt;/script&gt;" in found


def test_arrays_arrive_bit_for_bit(data: dict[str, Any], text: str) -> None:
    table = carried(text)["arrays"]
    packed = re.search(r'id="arrays">(.*?)</script>', text, re.DOTALL)
    assert packed is not None
    whole = gzip.decompress(b64decode(packed[1]))
    assert [row["name"] for row in table] == list(data["arrays"])
    types = {"f32": np.float32, "f64": np.float64, "u8": np.uint8, "i32": np.int32}
    for row in table:
        kind = np.dtype(types[row["type"]])
        block = whole[row["offset"] : row["offset"] + row["count"] * kind.itemsize]
        numbers = (block[n :: row["count"]] for n in range(row["count"]))  # a byte of each plane
        found = np.frombuffer(b"".join(numbers), kind)
        assert np.array_equal(found, data["arrays"][row["name"]].reshape(-1))
        assert row["offset"] % 8 == 0


def test_the_same_recording_gives_the_same_page(text: str) -> None:
    assert report_page(report(run())) == text


def test_the_page_opens_in_the_language_asked_for_and_carries_both(data: dict[str, Any]) -> None:
    found = report_page(data, "zh")
    assert '<html lang="zh">' in found
    content = carried(found)
    assert content["start"]["lang"] == "zh"
    assert set(content["strings"]) == {"en", "zh"}
    with pytest.raises(ArgumentError, match="lang is 'fr'; it must be one of en"):
        report_page(data, "fr")


def test_an_array_of_another_type_is_refused() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        pack({"x": np.zeros(2, np.int64)})
    assert (
        str(caught.value)
        == "the array x is int64; a page can contain float32, float64, uint8, int32, uint16"
    )


def test_numbers_that_json_lacks_become_null() -> None:
    data = report(recorded(CASES[8]))
    data["meta"]["places"][0]["audit"]["residual"] = float("nan")
    assert carried(report_page(data))["places"][0]["audit"]["residual"] is None


def test_colours_follow_the_switch() -> None:
    css = palette.css(switch=True)
    assert ":root:not([data-theme])" in css
    assert ':root[data-theme="dark"]' in css
    assert "data-theme" not in palette.css()
