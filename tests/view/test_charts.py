"""Charts: a figure of matplotlib has the numbers, the words and the scales that the record has."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.render import RatioBar, RatioBars
from regard.view import palette, plotting
from regard.view.charts import (
    Accuracy,
    Axis,
    Chart,
    LengthBin,
    Line,
    Panels,
    Picture,
    Scatter,
    ScatterPoint,
    accuracy_chart,
    context_charts,
    svg,
)
from regard.view.heatmaps import AlignmentMap, EffectMap, HeadWeights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BYTES, SHARE = Axis("cache", "bytes"), Axis("right", "share")
BITS, SECONDS = Axis("bits", "bits"), Axis("time", "seconds")


def axes_of(chart: Chart, panel: int = 0) -> Axes:
    """The axes of a drawn chart, as a reader of the figure meets them."""
    figure = chart.draw().figure
    figure.canvas.draw()
    return figure.axes[panel]


def points_of(axes: Axes, gid: str) -> list[tuple[float, float]]:
    """The points of the line that has this gid."""
    (line,) = (line for line in axes.lines if line.get_gid() == gid)
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def labels_of(axes: Axes, name: str) -> list[str]:
    """The words beside an axis, those of the numbers within its limits."""
    low, high = sorted(axes.get_xlim() if name == "x" else axes.get_ylim())
    axis = axes.xaxis if name == "x" else axes.yaxis
    ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for at, label in ticks if low <= at <= high]


def words_of(chart: Chart) -> list[str]:
    """Every text of a chart."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg(chart))


def picture(
    *values: tuple[float, float], log: str = "", edge: float | None = None, y: str = "loss"
) -> Picture:
    return Picture("work", "n", y, (Line("full", values),), log, edge, "beyond")


def marks() -> list[ScatterPoint]:
    return [
        ScatterPoint("a", 1024.0, 0.25, (0.25, 0.25), on_pareto_front=True),
        ScatterPoint("b", 4096.0, 0.5, (0.4, 0.6), on_pareto_front=False),
        ScatterPoint("c", 65536.0, 1.0, (1.0, 1.0), on_pareto_front=True),
    ]


def test_a_line_has_the_points_that_it_was_given() -> None:
    values = ((0.0, 1.0), (5.0, 0.5), (10.0, 0.75))
    axes = axes_of(picture(*values))
    assert points_of(axes, "line 0 0") == list(values)
    assert points_of(axes, "line 0 0") != [(x, y + 1e-6) for x, y in values], "negative control"
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert axes.get_xlabel() == "n"


@pytest.mark.parametrize(
    ("log", "scales"), [("x", "log linear"), ("y", "linear log"), ("xy", "log log")]
)
def test_logarithmic_axes_are_where_they_were_asked_for(log: str, scales: str) -> None:
    axes = axes_of(picture((1, 1), (10, 10), (100, 100), log=log))
    assert f"{axes.get_xscale()} {axes.get_yscale()}" == scales


def test_few_points_are_all_marked_and_many_are_not_hidden() -> None:
    for count, marked in ((1, 1), (24, 24), (25, 13), (500, 24)):
        drawing = picture(*((x, x) for x in range(count))).draw()
        (line,) = (x for x in drawing.figure.axes[0].lines if x.get_gid() == "line 0 0")
        assert len(line.get_xydata()) == count
        assert len(drawing.hints["line 0 0"]) == marked


def test_what_an_axis_has_no_place_for_is_left_out() -> None:
    one = picture((0, 1), (1, 0), (2, 3), (3, float("nan")), (4, float("inf")), log="xy")
    assert one.shown(one.lines[0]) == [(2, 3)]
    assert points_of(axes_of(one), "line 0 0") == [(2, 3)]
    nothing = picture((0, 1), log="x")
    assert not nothing.drawable
    assert nothing.draw().hints == {}
    assert svg(nothing).startswith("<svg")


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
@pytest.mark.parametrize("values", [((1, 1),), ((1, 2), (1, 2)), ((1e-9, 1e9), (1e9, 1e-9))])
def test_any_points_make_a_drawing(log: str, values: tuple[tuple[float, float], ...]) -> None:
    axes = axes_of(picture(*values, log=log, edge=3.0))
    for name, limits in (("x", axes.get_xlim()), ("y", axes.get_ylim())):
        assert all(limits[0] <= value["xy".index(name)] <= limits[1] for value in values)
        assert 1 <= len(labels_of(axes, name)) <= 12


def test_numbers_beside_an_axis_have_its_unit() -> None:
    contexts = [2.0**n for n in range(10, 15)]
    drawn = Picture(
        "t", "tokens", "cache, bytes", (Line("m", tuple((n, 64 * n) for n in contexts)),), "xy"
    )
    axes = axes_of(drawn)
    assert labels_of(axes, "x") == ["1k", "2k", "4k", "8k", "16k"]
    assert labels_of(axes, "y") == ["64 KiB", "128 KiB", "256 KiB", "512 KiB", "1 MiB"]
    timed = axes_of(picture((1, 0.0009), (2, 0.021), log="y", y="seconds"))
    assert labels_of(timed, "y") == ["1 ms", "2 ms", "5 ms", "10 ms", "20 ms"]
    shares = axes_of(picture((1, 0.3), (2, 0.6), y="share"))
    assert labels_of(shares, "y") == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert labels_of(axes_of(picture((1, 0.3), (2, 0.6))), "y") != labels_of(shares, "y")
    assert labels_of(axes_of(picture((0, 1), (1, 2), (2, 3))), "x") == ["0", "1", "2"], "whole"
    work = axes_of(picture((1, 1e9), (1000, 4e12), log="xy", y="one token, FLOPs"))
    assert labels_of(work, "y") == ["1 G", "10 G", "100 G", "1 T"]


def test_the_ground_behind_the_edge_is_shaded() -> None:
    def shaded(edge: float | None) -> list[tuple[float, float]]:
        axes = axes_of(picture((1, 1), (9, 2), edge=edge))
        boxes = [
            patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches
        ]
        return [(round(box.x0, 6), round(box.x1 - axes.get_xlim()[1], 6)) for box in boxes]

    assert shaded(4.0) == [(4.0, 0.0)]
    assert shaded(None) == []
    assert "beyond" in words_of(picture((1, 1), (9, 2), edge=4.0))
    assert "beyond" not in words_of(picture((1, 1), (9, 2)))


def test_many_lines_differ_and_are_all_named() -> None:
    lines = tuple(Line(f"model {i}", ((1.0, i), (2.0, i + 1.0))) for i in range(7))
    figure = Picture("t", "x", "y", lines).draw().figure
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == [line.name for line in lines]
    looks = {
        (line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines
    }
    assert len(looks) == 7


def test_a_mark_says_its_numbers_in_their_units() -> None:
    one = Picture("t", "n", "seconds", (Line("full", ((1024.0, 0.0042),)),))
    assert one.draw().hints == {"line 0 0": ["full: 1024, 4.20 ms"]}
    assert svg(one).count("<title>full: 1024, 4.20 ms</title>") == 1


def test_a_context_at_which_a_model_does_not_fit_is_crossed_out() -> None:
    rows = [
        {"context": 2**n, "kv_bytes": 2**n * 64, "decode_seconds": 1e-3 * n, "fit": fit}
        for n, fit in zip(range(10, 14), ["fits"] * 2 + ["does not fit"] * 2, strict=True)
    ]
    chart = context_charts({"m": rows}, "batch 1, l4")
    assert isinstance(chart, Panels)
    figure = chart.draw().figure
    for axes, wanted in zip(figure.axes, ("kv_bytes", "decode_seconds"), strict=True):
        whole, crossed = axes.lines
        assert list(whole.get_ydata()) == [row[wanted] for row in rows]
        assert list(crossed.get_xdata()) == [4096, 8192]
        assert crossed.get_marker() == "x"
    assert "batch 1, l4; crossed out: weights and cache do not fit" in words_of(chart)
    fitting = context_charts({"m": rows[:2]}, "batch 1, l4")
    assert len(fitting.draw().figure.axes[0].lines) == 1
    assert "batch 1, l4" in words_of(fitting)


def accuracy(name: str = "lstm", shares: tuple[float, ...] = (1.0, 0.5, 0.0)) -> Accuracy:
    bins = (
        LengthBin(8 * i + 1, 8 * i + 8, p, (max(0, p - 0.1), min(1, p + 0.1)), 50)
        for i, p in enumerate(shares)
    )
    return Accuracy(name, tuple(bins))


def test_a_share_stands_at_the_middle_of_its_lengths_with_its_interval() -> None:
    axes = axes_of(accuracy_chart([accuracy()], 16, "title"))
    assert points_of(axes, "line 0 0") == [(4.5, 1.0), (12.5, 0.5), (20.5, 0.0)]
    spans = [tuple(map(tuple, one.get_segments()[0])) for one in axes.collections]  # type: ignore[attr-defined]
    assert spans[1] == ((12.5, 0.4), (12.5, 0.6))
    assert labels_of(axes, "y")[-1] == "100 %"
    (beyond,) = axes.patches
    assert beyond.get_extents().transformed(axes.transData.inverted()).x0 == pytest.approx(16.5)


def test_marks_of_a_scatter_stand_where_their_numbers_say() -> None:
    chart = Scatter(marks(), BYTES, SHARE, "t")
    axes = axes_of(chart)
    assert [points_of(axes, f"mark {i}") for i in range(3)] == [[(m.x, m.y)] for m in marks()]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    a, b, c = (axes.transData.transform((m.x, m.y)) for m in marks())
    # costs on a logarithmic scale: b is a third of the way from a to c
    assert (b[0] - a[0]) / (c[0] - a[0]) == pytest.approx(math.log(4) / math.log(64))
    faces = [
        line.get_markerfacecolor() for line in axes.lines if str(line.get_gid()).startswith("mark")
    ]
    assert faces == [palette.LIGHT["q"], palette.LIGHT["card"], palette.LIGHT["q"]]
    assert chart.draw().hints["mark 0"] == ["a: 1.00 KiB, 25 %, on the Pareto front"]
    assert chart.draw().hints["mark 1"] == ["b: 4.00 KiB, 50 %"]
    assert labels_of(axes, "x") == ["1 KiB", "4 KiB", "16 KiB", "64 KiB"]


def test_the_front_is_joined_in_the_order_of_cost() -> None:
    axes = axes_of(Scatter(list(reversed(marks())), BYTES, SHARE, "t"))
    assert points_of(axes, "front") == [(1024.0, 0.25), (65536.0, 1.0)]
    alone = axes_of(Scatter(marks()[:2], BYTES, SHARE, "t"))
    assert [line for line in alone.lines if line.get_gid() == "front"] == []


def test_the_span_of_seeds_is_drawn_where_there_is_one() -> None:
    (span,) = axes_of(Scatter(marks(), BYTES, SHARE, "t")).collections
    assert [tuple(p) for p in span.get_segments()[0]] == [(4096.0, 0.4), (4096.0, 0.6)]  # type: ignore[attr-defined]


def test_names_do_not_lie_on_one_another() -> None:
    many = [
        ScatterPoint(f"name{i}", 1000.0 + i, 0.5, (0.5, 0.5), on_pareto_front=False)
        for i in range(5)
    ]
    axes = axes_of(Scatter(many, BYTES, SHARE, "t"))
    heights = sorted(text.get_window_extent().y0 for text in axes.texts)
    assert [text.get_text() for text in axes.texts] == [mark.name for mark in many]
    assert min(b - a for a, b in pairwise(heights)) >= 12.9


def test_one_mark_and_equal_marks_can_be_drawn() -> None:
    for y in (BITS, SHARE):
        same = [ScatterPoint("a", 8.0, 0.5, (0.5, 0.5), on_pareto_front=True)] * 2
        axes = axes_of(Scatter(same, SECONDS, y, "t"))
        low, high = axes.get_ylim()
        assert low < 0.5 < high


def test_the_uniform_weight_has_a_colour_near_the_middle() -> None:
    """On a linear scale 1/8 and 0 would have nearly the same colour."""
    for n in (8, 64, 1000):
        assert 0.2 < float(plotting.weight_scale(n)(1 / n)) < 0.6
    scale = plotting.weight_scale(8)
    assert [float(scale(x)) for x in (0.0, 2**-7, 1.0)] == [0, 0, 1]
    assert float(scale(2**-3.5)) == pytest.approx(0.5)
    assert plotting.power_of_two(plotting.lowest_weight(8)) == "2⁻⁷"


def test_a_cell_of_an_alignment_is_as_dark_as_its_weight() -> None:
    weights = np.array([[0.0, 1.0], [0.7, 0.3]])
    drawing = AlignmentMap(weights, ["一", "二"], ["one", "two"]).draw()
    (cells,) = (x for x in drawing.figure.axes[0].collections if x.get_gid() == "cells")
    assert np.array_equal(np.asarray(cells.get_array()).reshape(2, 2), weights)
    assert drawing.hints["cells"][1:3] == ["一 ← two: 1.0000", "二 ← one: 0.7000"]
    colours = cells.to_rgba(np.asarray(cells.get_array()).ravel())
    lightness = dict(zip(weights.ravel().tolist(), np.asarray(colours)[:, :3].sum(1), strict=True))
    assert lightness[0.0] > lightness[0.3] > lightness[0.7] > lightness[1.0]
    assert [float(cells.norm(x)) for x in (0.0, 0.5, 1.0)] == [0, 0.5, 1]
    axes = drawing.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["一", "二"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["one", "two"]
    assert axes.yaxis_inverted(), "the first word stands on top"


def test_the_weights_of_a_head_are_written_into_their_cells() -> None:
    few = HeadWeights([[1.0, 0.0], [0.25, 0.75]], "head 3").draw()
    written = [text.get_text() for text in few.figure.axes[0].texts]
    assert written == ["1.00", "0.00", "0.25", "0.75"]
    hints = [hint.split(", ") for hint in few.hints["cells"]]
    assert hints[2:] == [["query 1", "key 0: 0.2500"], ["query 1", "key 1: 0.7500"]]
    many = HeadWeights(np.eye(40).tolist(), "head 3").draw().figure.axes[0]
    assert list(many.texts) == []


def test_no_effect_has_the_middle_of_the_colours() -> None:
    """The scale is as long on either side of 0, whichever side has the larger effect."""
    effects = np.array([[1.0, 0.0, -4.0]])
    (cells,) = EffectMap(effects, ["0"], ["0", "1", "2"], "t").draw().figure.axes[0].collections
    middle = plotting.signed_colours()(0.5)
    assert cells.get_clim() == (-4, 4)
    assert np.allclose(cells.to_rgba(effects)[0, 1], middle, atol=0.02)


def test_bars_begin_at_one_and_end_at_their_ratio() -> None:
    chart = RatioBars(
        [RatioBar("ours", 1.0, "1 ms"), RatioBar("x", 4.0, "4 ms"), RatioBar("y", 0.5, "")], "t"
    )
    axes = axes_of(chart)
    ends = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert ends == [(1.0, 1.0), (1.0, 4.0), (1.0, 0.5)]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "x", "y"]
    low, high = axes.get_ylim()
    assert low > high, "the first bar stands on top"
