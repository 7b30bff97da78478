"""Figures as text and files: fit for a page, the same every time, and only ever text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.render import RatioBar, RatioBars
from regard.errors import FileError
from regard.view import charts, heatmaps, palette, plotting
from regard.view.charts import (
    Axis,
    Chart,
    Line,
    Picture,
    Scatter,
    ScatterPoint,
)
from regard.view.heatmaps import AlignmentMap

HOSTILE = '</svg><script>alert(1)</script>&"\u202e\x1b $x_{ $a$'
LINES = (Line("a", ((1.0, 1.0), (2.0, 2.0))), Line("b", ((1.0, 2.0), (2.0, 1.0))))
PICTURE = Picture("work", "n", "seconds", LINES, "xy", 1.5)


def every(words: str) -> list[Chart]:
    """A chart of each kind, with these words wherever it has words."""
    return [
        Picture(words, words, words, (Line(words, ((1.0, 1.0), (2.0, 2.0))),), "", 1.5, words),
        Scatter(
            [ScatterPoint(words, 8.0, 0.5, (0.4, 0.6), on_pareto_front=True)],
            Axis(words, "bytes"),
            Axis(words, "share"),
            words,
        ),
        AlignmentMap(np.eye(2), [words, words], [words, words], words),
        RatioBars([RatioBar(words, 2.0, words)], words),
        heatmaps.HeadWeights([[1.0]], words),
        heatmaps.EffectMap(
            np.array([[0.5, -2.0]]), [words], [words, "x"], words, words, words, [[words, "y"]]
        ),
    ]


def test_words_are_only_ever_text() -> None:
    for chart in every(HOSTILE):
        text = charts.svg(chart)
        assert "<script" not in text
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert text.count("</svg>") == 1
        ET.fromstring(text)
        said = "".join(ET.fromstring(text).itertext())
        assert "$x_{ $a$" in said, "no text is mathematics"


def test_a_page_may_carry_it() -> None:
    """A content policy refuses style attributes; no address but SVG's own stands in it."""
    for chart in every("word"):
        text = charts.svg(chart, alone=False)
        assert text.startswith("<svg")
        assert not re.search(r"\sstyle=|<style|xlink|http(?!://www.w3.org/2000/svg)s?:", text)
        assert "clip-path" not in text
    assert "<style" in charts.svg(PICTURE), "a file of its own has its style"


def test_two_charts_of_a_page_share_no_identifier() -> None:
    def ids(title: str) -> set[str]:
        return set(re.findall(r' id="([^"]+)"', charts.svg(Picture(title, "n", "y", LINES))))

    assert ids("one")
    assert ids("one") & ids("two") == set()
    assert ids("one") == ids("one")


def test_every_colour_follows_a_dark_page() -> None:
    style = plotting.css()
    for chart in every("word"):
        for colour in set(re.findall(r'(?:fill|stroke)="(#\w+)"', charts.svg(chart))):
            assert f'[fill="{colour}"]' in style, (type(chart), colour)
    assert '[fill="#123456"]' not in style, "negative control"
    assert palette.DARK["q"] in style


def test_shapes_take_their_colours_from_each_use() -> None:
    """A shape within `defs` is out of reach of the style that a dark page has for its ancestors."""
    root = ET.fromstring(charts.svg(PICTURE))
    shapes = [x for defs in root.iter("{http://www.w3.org/2000/svg}defs") for x in defs.iter()]
    assert not [x.attrib for x in shapes if {"fill", "stroke"} & x.attrib.keys()]
    uses = list(root.iter("{http://www.w3.org/2000/svg}use"))
    assert uses
    assert all({"fill", "stroke"} <= use.attrib.keys() for use in uses)


def test_text_stays_text_in_the_fonts_of_its_reader() -> None:
    text = charts.svg(AlignmentMap(np.eye(1), ["三百"], ["three hundred"]))
    assert ">三百</text>" in text
    assert "Noto Sans CJK SC" in text
    assert "DejaVu" not in text


@pytest.mark.full
@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_the_same_chart_is_the_same_file(ending: str, tmp_path: Path) -> None:
    for chart in every("三"):
        paths = [tmp_path / f"{name}{ending}" for name in "ab"]
        sizes = [charts.write(chart, path) for path in paths]
        first, second = (path.read_bytes() for path in paths)
        assert first == second
        assert sizes == [len(first), len(second)]
    other = tmp_path / f"c{ending}"
    charts.write(PICTURE, other)
    assert other.read_bytes() != first, "negative control"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [ending] * 3, "and no other file"


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"a\.gif is no picture; its name must end in \.svg, \.png"):
        charts.write(PICTURE, tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_mark_without_its_hint_is_an_error() -> None:
    """A hint for each mark, in their order: a wrong count is a fault of the chart."""
    drawing = PICTURE.draw()
    short = plotting.Drawing(drawing.figure, {"line 0 0": ["only one of two"]})
    with pytest.raises(ValueError, match="shorter"):
        plotting.svg(short, "t")


def test_a_letter_that_no_font_has_warns_nobody(tmp_path: Path) -> None:
    """Thai and a private letter: no font of matplotlib's has them, and warnings are errors here."""
    chart = Picture("\u0e01\ue123", "n", "y", LINES)
    assert "\u0e01" in charts.svg(chart)
    assert charts.write(chart, tmp_path / "a.png") > 1000


def test_threads_that_draw_get_what_they_asked_for() -> None:
    def drawn(title: str) -> str:
        return charts.svg(Picture(title, "n", "y", LINES))

    titles = [f"chart {i % 3}" for i in range(9)]
    alone = {title: drawn(title) for title in titles}
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, titles)) == [alone[title] for title in titles]
