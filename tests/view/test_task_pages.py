"""Charts, alignments and the page of a task: what is drawn is what was given, and words are only
ever text.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from regard.view import alignment, chart, palette
from regard.view.chart import Point, Series
from regard.view.task import Aligned, TaskPage, Told

HOSTILE = '</svg><script>alert(1)</script>&"\u202e\x1b'
SVG = "{http://www.w3.org/2000/svg}"


def series(name: str = "lstm", shares: tuple[float, ...] = (1.0, 0.5, 0.0)) -> Series:
    points = (
        Point(8 * i + 1, 8 * i + 8, p, (max(0, p - 0.1), min(1, p + 0.1)), 50)
        for i, p in enumerate(shares)
    )
    return Series(name, tuple(points))


def test_a_share_has_its_height_and_its_length() -> None:
    root = ET.fromstring(chart.svg([series()], 16, "title"))
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    places = [place for place in places if place[1] >= chart.TOP]  # not that of the legend
    top, bottom = chart.TOP, chart.HIGH - chart.BOTTOM
    assert [y for _, y in places] == [top, (top + bottom) / 2, bottom]
    steps = np.diff([x for x, _ in places])
    assert steps[0] == pytest.approx(steps[1], abs=0.2)
    beyond = next(r for r in root.iter(f"{SVG}rect") if r.attrib.get("class") == "beyond")
    assert places[1][0] < float(beyond.attrib["x"]) < places[2][0]


def test_nothing_is_shaded_where_nothing_is_longer() -> None:
    assert 'class="beyond"' not in chart.svg([series()], 24, "title")


def test_many_series_differ() -> None:
    drawn = chart.svg([series(f"model {i}") for i in range(6)], 16, "title")
    assert drawn.count("<polyline") == 6
    assert len(set(re.findall(r'polyline class="(\w)"', drawn))) == 5
    ET.fromstring(drawn)


def test_a_cell_is_as_dark_as_its_weight() -> None:
    weights = np.array([[0.0, 1.0], [0.52, 0.48]])
    root = ET.fromstring(alignment.svg(weights, ["一", "二"], ["one", "two"]))
    cells = {r[0].text: r.attrib["class"] for r in root.iter(f"{SVG}rect") if len(r)}
    assert cells == {
        "一 ← one: 0.0000": "w0",
        "一 ← two: 1.0000": "w15",
        "二 ← one: 0.5200": "w8",
        "二 ← two: 0.4800": "w7",
    }
    shades = [sum(palette.ramp(palette.WEIGHTS["light"], i / 15)) for i in range(16)]
    assert shades == sorted(shades, reverse=True)  # every step is darker than the one before


def test_the_terminal_shows_the_same() -> None:
    weights = np.array([[0.0, 1.0], [0.5, 0.5]])
    said = [line.plain for line in alignment.lines(weights, ["一", "二"], ["one", "two"])]
    assert said[-2].endswith("│  ██│")
    assert said[-1].endswith("│▓▓▓▓│")
    assert max(len(line) for line in said) <= 100
    wide = list(alignment.lines(np.eye(50)[:3], list("abc"), [f"w{i}" for i in range(50)]))
    assert wide[-1].plain.endswith("…")
    assert sum("49" in line.plain for line in wide) >= 1


def test_bars_are_as_long_as_the_share() -> None:
    lines = [line.plain for line in chart.lines(series(), 16, 10)]
    assert [line.count("█") for line in lines] == [0, 10, 5, 0, 0]
    assert "longer than trained" in lines[3]


def test_words_are_only_ever_text() -> None:
    weights = np.full((1, 1), 1.0)
    one = Aligned((HOSTILE,), (HOSTILE,), ("x",), weights, HOSTILE)
    page = TaskPage(
        HOSTILE,
        HOSTILE,
        {HOSTILE: HOSTILE},
        [series(HOSTILE)],
        16,
        [one],
        [Told(HOSTILE, "", HOSTILE)],
    )
    drawings = (
        alignment.svg(weights, [HOSTILE], [HOSTILE]),
        chart.svg([series(HOSTILE)], 16, HOSTILE),
    )
    for text in (page.html(), *drawings):
        assert "<script" not in text
        assert "\u202e" not in text
        assert "\x1b" not in text
    for drawn in drawings:
        ET.fromstring(drawn)
    assert "(nothing)" in page.html()
    assert not one.right


def test_a_page_of_nothing() -> None:
    page = TaskPage("a", "b", {}, (), 1).html()
    assert "<section>" not in page
    assert page.startswith("<!doctype html>")
