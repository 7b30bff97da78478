"""Lines over plain and logarithmic axes: where points stand, what is left out, what reaches the
page.
"""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from regard.view.curves import BOTTOM, HIGH, LEFT, RIGHT, TOP, WIDE, Line, Picture, svg
from regard.view.findings import Section, page


def points(text: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline class="\w" points="([^"]*)"', text)
    return [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]  # type: ignore[misc]


def picture(*values: tuple[float, float], log: str = "", edge: float | None = None) -> Picture:
    return Picture("work", "n", "seconds", (Line("full", values),), log, edge)


def test_corners_and_the_middle() -> None:
    (line,) = points(svg(picture((0, 0), (5, 5), (10, 10))))
    assert line == [
        (LEFT, HIGH - BOTTOM),
        ((LEFT + WIDE - RIGHT) / 2, (TOP + HIGH - BOTTOM) / 2),
        (WIDE - RIGHT, TOP),
    ]
    (line,) = points(svg(picture((1, 1), (10, 10), (100, 100), log="xy")))
    assert line[1] == pytest.approx(
        ((LEFT + WIDE - RIGHT) / 2, (TOP + HIGH - BOTTOM) / 2), abs=0.06
    )


def test_a_power_is_a_straight_line() -> None:
    (line,) = points(svg(picture(*((n, 3 * n**1.5) for n in (1, 2, 4, 8, 16)), log="xy")))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(line)]
    assert max(slopes) - min(slopes) < 2e-3


def test_few_points_are_all_marked_and_many_are_not_hidden() -> None:
    for count, marks in ((1, 1), (24, 24), (25, 13), (500, 24)):
        text = svg(picture(*((x, x) for x in range(count))))
        assert len(points(text)[0]) == count
        assert text.count("<circle") == marks + 1, "and one in the key"


def test_what_an_axis_has_no_place_for_is_left_out() -> None:
    one = picture((0, 1), (1, 0), (2, 3), (3, float("nan")), (4, float("inf")), log="xy")
    assert one.shown(one.lines[0]) == [(2, 3)]
    assert len(points(svg(one))[0]) == 1
    nothing = picture((0, 1), log="x")
    assert not nothing.drawable
    assert svg(nothing).count("<circle") == 1, "the key alone"


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
@pytest.mark.parametrize("values", [((1, 1),), ((1, 2), (1, 2)), ((1e-9, 1e9), (1e9, 1e-9))])
def test_any_points_make_a_drawing(log: str, values: tuple[tuple[float, float], ...]) -> None:
    text = svg(picture(*values, log=log, edge=3.0))
    ET.fromstring(text)
    for line in points(text):
        assert all(LEFT <= x <= WIDE - RIGHT and TOP <= y <= HIGH - BOTTOM for x, y in line)
    assert 2 <= text.count('class="grid"') <= 12


def test_words_are_escaped_and_the_page_runs_nothing() -> None:
    bad = "<script>alert(1)</script>\x1b[31m"
    drawn = Picture(bad, bad, bad, (Line(bad, ((1, 1), (2, 2))),))
    sections = [Section(bad, bad, False, {bad: bad}, (bad,), ((bad,),), (drawn,))]
    text = page(bad, bad, {bad: bad}, bad, sections)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "default-src 'none'" in text
    assert "class='badge bad'" in text
    tones = [page("", "", {}, "", [Section("x", "word", good)]) for good in (True, None)]
    assert ["class='badge good'" in tones[0], "class='badge soft'" in tones[1]] == [True, True]


def test_the_same_picture_is_the_same_file() -> None:
    one = picture((1, 2), (3, 4), edge=2)
    assert svg(one) == svg(one)
    assert picture((1, 2)).as_dict()["lines"] == [{"name": "full", "points": [[1, 2]]}]
