"""The scatter: marks stand where their numbers say, names do not lie on one another, texts are
inert.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from regard.view.compared import Chart, ComparedPage, Grid
from regard.view.scatter import BOTTOM, HIGH, LEFT, RIGHT, TOP, WIDE, Axis, Mark, svg

BYTES, SHARE, BITS, SECONDS = (
    Axis("cache", "bytes"),
    Axis("right", "share"),
    Axis("bits", "bits"),
    Axis("time", "seconds"),
)
SPACE = "{http://www.w3.org/2000/svg}"


def marks() -> list[Mark]:
    return [
        Mark("a", 1024.0, 0.25, (0.25, 0.25), front=True),
        Mark("b", 4096.0, 0.5, (0.4, 0.6), front=False),
        Mark("c", 65536.0, 1.0, (1.0, 1.0), front=True),
    ]


def circles(text: str) -> dict[str, tuple[float, float, str]]:
    return {
        (c[0].text or "").partition(":")[0]: (
            float(c.get("cx", "")),
            float(c.get("cy", "")),
            c.get("class", ""),
        )
        for c in ET.fromstring(text).iter(f"{SPACE}circle")
    }


def test_marks_stand_where_their_numbers_say() -> None:
    found = circles(svg(marks(), BYTES, SHARE, "t"))
    # costs on a logarithmic scale: b is a third of the way from a to c
    a, b, c = (found[name] for name in "abc")
    assert (b[0] - a[0]) / (c[0] - a[0]) == pytest.approx(math.log(4) / math.log(64), abs=0.01)
    # shares from 0 at the bottom to 1 at the top
    high = HIGH - BOTTOM - TOP
    assert [HIGH - BOTTOM - y for _, y, _ in (a, b, c)] == pytest.approx(
        [high / 4, high / 2, high], abs=0.1
    )
    assert [kind for *_, kind in (a, b, c)] == ["front", "rest", "front"]
    assert all(LEFT < x < WIDE - RIGHT for x, *_ in found.values())


def test_the_front_is_joined_in_the_order_of_cost() -> None:
    text = svg(list(reversed(marks())), BYTES, SHARE, "t")
    (line,) = ET.fromstring(text).iter(f"{SPACE}polyline")
    found = circles(text)
    points = [tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()]
    assert points == [found["a"][:2], found["c"][:2]]
    assert "polyline points" not in svg(marks()[:2], BYTES, SHARE, "t")


def test_the_span_of_seeds() -> None:
    spans = [
        e
        for e in ET.fromstring(svg(marks(), BYTES, SHARE, "t")).iter(f"{SPACE}line")
        if "span" in (e.get("class") or "")
    ]
    (span,) = spans
    high = HIGH - BOTTOM - TOP
    assert float(span.get("y1", "")) - float(span.get("y2", "")) == pytest.approx(
        0.2 * high, abs=0.2
    )


def test_names_do_not_lie_on_one_another() -> None:
    many = [Mark(f"name{i}", 1000.0 + i, 0.5, (0.5, 0.5), front=False) for i in range(5)]
    text = svg(many, BYTES, SHARE, "t")
    names = [e for e in ET.fromstring(text).iter(f"{SPACE}text") if e.get("class") == "name"]
    heights = sorted(float(e.get("y", "")) for e in names)
    assert min(b - a for a, b in pairwise(heights)) >= 12.9


@pytest.mark.parametrize(
    ("axis", "low", "high", "ticks", "words"),
    [
        (BYTES, 900.0, 70000.0, [1024, 2048, 4096, 8192, 16384, 32768, 65536], "1 KiB"),
        (SECONDS, 0.0009, 0.021, [0.001, 0.002, 0.005, 0.01, 0.02], "1 ms"),
        (BITS, 2.0, 3.0, [2.0, 2.2, 2.4, 2.6, 2.8, 3.0], "2"),
        (SHARE, 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "0 %"),
    ],
)
def test_ticks_are_round(
    axis: Axis, low: float, high: float, ticks: list[float], words: str
) -> None:
    assert axis.ticks(low, high) == pytest.approx(ticks)
    assert axis.words(ticks[0]) == words


def test_words() -> None:
    assert [BYTES.words(x) for x in (8.0, 1536.0, 3.0 * 2**20, 2.0**30)] == [
        "8 B",
        "1.5 KiB",
        "3 MiB",
        "1 GiB",
    ]
    assert [SECONDS.words(x) for x in (2.0, 1.5e-3, 2e-6, 5e-9)] == [
        "2 s",
        "1.5 ms",
        "2 µs",
        "5 ns",
    ]


def test_one_mark_and_equal_marks_can_be_drawn() -> None:
    for y in (BITS, SHARE):
        text = svg([Mark("a", 8.0, 0.5, (0.5, 0.5), front=True)] * 2, SECONDS, y, "t")
        for x, at, _ in circles(text).values():
            assert math.isfinite(x)
            assert TOP < at < HIGH - BOTTOM
    assert svg([], BYTES, SHARE, "t") == ""


def test_texts_are_inert() -> None:
    evil = "<script>alert(1)</script>\u202e"
    one = Mark(evil, 8.0, 0.5, (0.4, 0.6), front=True)
    chart = Chart([one], BYTES, SHARE, evil, evil)
    page = ComparedPage(
        evil, evil, {evil: evil}, evil, [chart], [Grid(evil, evil, [evil], [[evil]])], [evil]
    ).html()
    assert "<script" not in page
    assert "\u202e" not in page
    assert "<script" not in svg([one], BYTES, SHARE, evil)


def test_the_same_marks_give_the_same_file() -> None:
    assert svg(marks(), BYTES, SHARE, "t") == svg(marks(), BYTES, SHARE, "t")
    assert "<style>" in svg(marks(), BYTES, SHARE, "t")
    assert "<style>" not in svg(marks(), BYTES, SHARE, "t", alone=False)
