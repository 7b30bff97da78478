"""Every chart of regard, drawn by matplotlib: lines, costs against quality, alignments, bars.

A chart is a record of plain numbers and words. Its `draw` gives the figure of matplotlib with the
hints of its marks, `svg` makes it text for a page, and `write` makes it a file. All of them have
one look: a title at the left, the words of the vertical axis above it, colours of
`regard.view.palette`, and marks that differ by shape as well as by colour.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float
from rich.cells import cell_len

from regard import units
from regard.foreign import inert
from regard.view import palette, plotting, terminal
from regard.view.plotting import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLES = ("q", "k", "v", "s", "z")
MARKS = ("o", "s", "D", "^", "v")
"""Lines differ by colour and by mark; from the sixth on they are dashed, with empty marks."""
MAX_MARKS = 24
"""Marks of a line, at most: more would hide it."""
LETTER_WIDTH = 7.9
"""About how many pixels a letter of a name takes."""

Point = tuple[float, float]


class Chart(Protocol):
    """What can be drawn."""

    @property
    def title(self) -> str:
        """The words above it."""

    @abstractmethod
    def draw(self) -> Drawing:
        """The figure, and what its marks say."""


def svg(chart: Chart, *, alone: bool = True) -> str:
    """A chart as SVG text: for a file of its own, or for a page, which has `plotting.css()` once.

    >>> one = Picture("work", "n", "seconds", (Line("full", ((1.0, 1.0), (2.0, 4.0))),), "xy")
    >>> svg(one).count("full: 2, 4.00 s")
    1
    """
    return plotting.svg(chart.draw(), chart.title, alone=alone)


def write(chart: Chart, path: Path) -> int:
    """Write a chart to a .svg, .png or .pdf; returns the bytes written.

    Raises:
        FileError: the ending is another one, or the file cannot be written.
    """
    plotting.check_format(path)
    return plotting.write(chart.draw(), path, chart.title)


@dataclass(frozen=True)
class Line:
    """Points of one series, in the order of x.

    Attributes:
        name: in the key.
        points: (x, y) each.
        spans: for each point the interval (low, high) of its y, drawn as a bar; () is none.
        hints: for each point what it says when it is pointed at; () is its numbers.
        hollow: the x of the marks that are drawn empty.

    >>> Line("full", ((1.0, 2.0), (2.0, 8.0))).name
    'full'
    """

    name: str
    points: tuple[Point, ...]
    spans: tuple[Point, ...] = ()
    hints: tuple[str, ...] = ()
    hollow: frozenset[float] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A chart of lines.

    Attributes:
        title, x, y: words above, below and beside. The axis of "seconds", "bytes" or "share" has
            its numbers in these units, one that speaks of tokens has 1k for 1024.
        lines: what is drawn; the points that a logarithmic axis has no place for are left out.
        log: "", "x", "y" or "xy": the axes that are logarithmic.
        edge: an x from which on the ground is shaded, such as the trained length; None is none.
        beyond: what the shaded ground is called.

    >>> Picture("work", "n", "seconds", (Line("full", ((1.0, 1.0), (2.0, 4.0))),), "xy").drawable
    True
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: str = ""
    edge: float | None = None
    beyond: str = ""

    @property
    def drawable(self) -> bool:
        """Whether there is a point to draw."""
        return any(self.shown(line) for line in self.lines)

    def shown(self, line: Line) -> list[Point]:
        """The points of a line that the axes have a place for."""
        return [line.points[i] for i in self._places(line)]

    def as_dict(self) -> dict[str, Any]:
        """The chart as plain values: its words, and every point."""
        lines = [
            {"name": line.name, "points": [list(p) for p in line.points]} for line in self.lines
        ]
        return {
            "title": self.title,
            "x": self.x,
            "y": self.y,
            "log": self.log,
            "edge": self.edge,
            "lines": lines,
        }

    def draw(self) -> Drawing:
        """The figure: lines with their key above them; without any point it is an empty frame."""
        return Panels(self.title, (self,)).draw()

    def fill(self, axes: Axes) -> dict[str, list[str]]:
        """Draw the lines into axes; returns the hints of their marks."""
        hints: dict[str, list[str]] = {}
        for i, line in enumerate(self.lines):
            hints |= self._fill_line(axes, line, i)
        shown = [p for line in self.lines for p in self.shown(line)] or [(1.0, 1.0)]
        spans = [v for line in self.lines for span in line.spans for v in span]
        self._scale(axes, "x", self.x, [p[0] for p in shown], log="x" in self.log)
        self._scale(axes, "y", self.y, [*(p[1] for p in shown), *spans], log="y" in self.log)
        if self.edge is not None:
            self._shade(axes, self.edge)
        axes.set_xlabel(inert(self.x), fontsize=13, color=palette.LIGHT["soft"], labelpad=8)
        return hints

    def _places(self, line: Line) -> list[int]:
        """Which points of a line the axes have a place for."""
        return [
            i
            for i, p in enumerate(line.points)
            if all(map(math.isfinite, p))
            and all(v > 0 for v, axis in zip(p, "xy", strict=True) if axis in self.log)
        ]

    def _fill_line(self, axes: Axes, line: Line, i: int) -> dict[str, list[str]]:
        colour, gid = palette.LIGHT[ROLES[i % len(ROLES)]], f"line {axes.get_label()} {i}"
        places = self._places(line)
        xs, ys = [line.points[j][0] for j in places], [line.points[j][1] for j in places]
        every = max(1, -(-len(places) // MAX_MARKS))
        (drawn,) = axes.plot(
            xs,
            ys,
            color=colour,
            linewidth=2.5,
            linestyle="--" if i >= len(ROLES) else "-",
            marker=MARKS[i % len(MARKS)],
            markersize=8,
            markerfacecolor=palette.LIGHT["card"] if i >= len(ROLES) else colour,
            markeredgewidth=2 if i >= len(ROLES) else 1,
            markevery=every,
            label=inert(line.name),
            gid=gid,
        )
        drawn.set_solid_capstyle("round")
        for j in places if line.spans else ():
            axes.vlines(line.points[j][0], *line.spans[j], color=colour, linewidth=1.5, alpha=0.55)
        if hollow := [p for p in self.shown(line) if p[0] in line.hollow]:
            axes.plot(
                *zip(*hollow, strict=True),
                MARKS[i % len(MARKS)],
                color=colour,
                markersize=8,
                markerfacecolor=palette.LIGHT["card"],
                markeredgewidth=2,
            )
        spoken = [j for n, j in enumerate(places) if n % every == 0]
        return {gid: [self._hint(line, j) for j in spoken]} if spoken else {}

    def _hint(self, line: Line, i: int) -> str:
        if line.hints:
            return line.hints[i]
        x, y = line.points[i]
        return f"{line.name}: {_value_text(_unit(self.x))(x)}, {_value_text(_unit(self.y))(y)}"

    def _shade(self, axes: Axes, edge: float) -> None:
        low, high = axes.get_xlim()
        start = min(max(edge, low), high)
        axes.axvspan(start, high, color=palette.LIGHT["hint"], linewidth=0, zorder=0)
        axes.axvline(start, color=palette.LIGHT["soft"], linewidth=1, linestyle=(0, (4, 4)))
        if self.beyond and start < high:
            axes.text(
                high,
                1.02,
                inert(self.beyond),
                transform=axes.get_xaxis_transform(),
                ha="right",
                fontsize=13,
                color=palette.LIGHT["soft"],
            )

    @staticmethod
    def _scale(axes: Axes, name: str, words: str, values: list[float], *, log: bool) -> None:
        unit = _unit(words)
        if unit == "share" and not log and min(values) >= 0 and max(values) <= 1:
            values = [0.0, 1.0]
        _scale(axes, name, values, unit, log=log, tokens=words == "n" or "token" in words)


@dataclass(frozen=True)
class Panels:
    """Charts of lines side by side under one title; a key above them names the lines of the first.

    >>> half = Picture("", "n", "seconds", (Line("full", ((1.0, 1.0), (2.0, 4.0))),))
    >>> len(Panels("work", (half, half)).draw().figure.axes)
    2
    """

    title: str
    pictures: tuple[Picture, ...]

    def draw(self) -> Drawing:
        """The figure, and the hints of all marks."""
        lines = self.pictures[0].lines
        widest = max((cell_len(inert(line.name)) for line in lines), default=0)
        each = 720 if len(self.pictures) == 1 else 520
        wide, apart = each * len(self.pictures), LETTER_WIDTH * widest + 54
        abreast = max(1, min(len(lines), int((wide - 40) // apart), 6))
        top = 70 + 20 * -(-len(lines) // abreast)
        figure = plotting.new_figure(wide, top + 324)
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=15)
        hints: dict[str, list[str]] = {}
        for i, picture in enumerate(self.pictures):
            axes = plotting.new_axes(figure, 76 + i * each, 24 + wide - (i + 1) * each, top, 54)
            axes.set_label(str(i))
            hints |= picture.fill(axes)
            plotting.write_at(figure, 16 + i * each, top - 14, picture.y)
        if lines:
            handles, names = figure.axes[0].get_legend_handles_labels()
            figure.legend(
                handles,
                names,
                loc="upper left",
                bbox_to_anchor=(16 / wide, 1 - 38 / (top + 324)),
                ncols=abreast,
                frameon=False,
                fontsize=13,
                labelcolor=palette.LIGHT["soft"],
                borderpad=0,
                borderaxespad=0,
                handlelength=2.4,
                columnspacing=1.6,
                labelspacing=0.35,
            )
        return Drawing(figure, hints)


@dataclass(frozen=True)
class LengthBin:
    """The share answered right among sources of `low` to `high` tokens.

    Attributes:
        low, high: the shortest and the longest source.
        share: how many of them were answered right.
        interval: in which the true share lies.
        examples: how many sources there were.

    >>> LengthBin(1, 4, 0.5, (0.4, 0.6), 100).middle
    2.5
    """

    low: int
    high: int
    share: float
    interval: tuple[float, float]
    examples: int

    @property
    def middle(self) -> float:
        """The length at which it is drawn."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Accuracy:
    """One model's shares answered right, in the order of length.

    >>> Accuracy("lstm", (LengthBin(1, 4, 0.5, (0.4, 0.6), 100),)).name
    'lstm'
    """

    name: str
    bins: tuple[LengthBin, ...]


def accuracy_chart(models: Sequence[Accuracy], trained: int, title: str) -> Picture:
    """Shares right against the length of the source, a line for each model.

    Args:
        models: what is drawn; bars through the marks are the intervals.
        trained: tokens of the longest source in training; the ground behind is shaded.
        title: above the chart.

    >>> one = Accuracy("lstm", (LengthBin(1, 4, 1.0, (0.9, 1.0), 100),))
    >>> accuracy_chart([one], 4, "translate").lines[0].hints
    ('lstm, 1 to 4 tokens: 100.0 % of 100',)
    """
    lines = tuple(
        Line(
            model.name,
            tuple((one.middle, one.share) for one in model.bins),
            tuple(one.interval for one in model.bins),
            tuple(
                f"{model.name}, {one.low} to {one.high} tokens: {100 * one.share:.1f} % of "
                f"{one.examples}"
                for one in model.bins
            ),
        )
        for model in models
    )
    longest = max((one.high for model in models for one in model.bins), default=0)
    edge = trained + 0.5 if longest > trained else None
    return Picture(
        title, "tokens of the source", "share right", lines, "", edge, "longer than trained"
    )


@dataclass(frozen=True)
class Mark:
    """A mechanism in a scatter: where it stands, and how sure that is.

    Attributes:
        name: beside the mark.
        x, y: the cost, above 0, and the quality.
        span: the range of y over seeds.
        front: whether no other mechanism beats it in both.

    >>> Mark("mqa", 1024.0, 2.5, (2.4, 2.6), front=True).name
    'mqa'
    """

    name: str
    x: float
    y: float
    span: tuple[float, float]
    front: bool


@dataclass(frozen=True)
class Axis:
    """The words of an axis, and its unit.

    unit: "bytes" or "seconds", which are logarithmic, "bits" or "share", which are linear.

    >>> Axis("cache", "bytes").logarithmic
    True
    """

    title: str
    unit: str

    @property
    def logarithmic(self) -> bool:
        """Costs are; quality is not."""
        return self.unit in ("bytes", "seconds")


@dataclass(frozen=True)
class Scatter:
    """Costs against quality: a named mark for each mechanism, and the line of those on the front.

    Attributes:
        marks: the mechanisms; at least one.
        x, y: the axes; less cost stands on the left.
        title: above it.
        caption: the sentence that a page writes below it.

    >>> one = Mark("mqa", 1024.0, 2.5, (2.5, 2.5), front=True)
    >>> chart = Scatter((one,), Axis("cache", "bytes"), Axis("loss", "bits"), "text")
    >>> list(chart.draw().hints.values())
    [['mqa: 1.00 KiB, 2.5, on the front']]
    """

    marks: Sequence[Mark]
    x: Axis
    y: Axis
    title: str
    caption: str = ""

    def draw(self) -> Drawing:
        """The figure: full marks are on the front, which a dashed line joins."""
        figure = plotting.new_figure(560, 400)
        axes = plotting.new_axes(figure, 80, 96, 66, 54)
        axes.grid(axis="both", color=palette.LIGHT["line"], linewidth=1)
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=15)
        plotting.write_at(figure, 16, 48, self.y.title)
        axes.set_xlabel(inert(self.x.title), fontsize=13, color=palette.LIGHT["soft"], labelpad=8)
        ys = [v for mark in self.marks for v in (mark.y, *mark.span)]
        values = [0.0, 1.0] if self.y.unit == "share" else ys
        _scale(axes, "y", values, self.y.unit, log=self.y.logarithmic, room=0.08)
        xs = [mark.x for mark in self.marks]
        _scale(axes, "x", xs, self.x.unit, log=self.x.logarithmic, room=0.08, most=6)
        best = sorted((mark.x, mark.y) for mark in self.marks if mark.front)
        if len(best) > 1:
            axes.plot(
                *zip(*best, strict=True),
                color=palette.LIGHT["q"],
                linewidth=2,
                linestyle=(0, (5, 4)),
                alpha=0.7,
                gid="front",
                zorder=2,
            )
        hints = {}
        for i, mark in enumerate(self.marks):
            colour = palette.LIGHT["q" if mark.front else "soft"]
            if mark.span[0] < mark.span[1]:
                axes.vlines(mark.x, *mark.span, color=colour, linewidth=1.5, alpha=0.6)
            axes.plot(
                [mark.x],
                [mark.y],
                "o",
                color=colour,
                markersize=9,
                markerfacecolor=colour if mark.front else palette.LIGHT["card"],
                gid=f"mark {i}",
                zorder=3,
            )
            x, y = _value_text(self.x.unit)(mark.x), _value_text(self.y.unit)(mark.y)
            hints[f"mark {i}"] = [
                f"{mark.name}: {x}, {y}" + (", on the front" if mark.front else "")
            ]
        self._name(axes)
        return Drawing(figure, hints)

    def _name(self, axes: Axes) -> None:
        """Names on the right of the marks, each below a name that it would lie on."""
        line, placed = 15.0, list[tuple[float, float, float]]()
        places = [axes.transData.transform((mark.x, mark.y)) for mark in self.marks]
        for i in sorted(range(len(places)), key=lambda i: -places[i][1]):
            name = inert(self.marks[i].name)
            left, middle, wide = places[i][0] + 10, places[i][1], LETTER_WIDTH * cell_len(name)
            for other, other_wide, placed_y in placed:
                apart = left > other + other_wide or other > left + wide
                if not apart and abs(placed_y - middle) < line:
                    middle = placed_y - line
            placed.append((left, wide, middle))
            axes.annotate(
                name,
                (self.marks[i].x, self.marks[i].y),
                (10, middle - places[i][1]),
                textcoords="offset points",
                va="center",
                fontsize=13,
                color=palette.LIGHT["ink"],
                annotation_clip=False,
                zorder=4,
            )


@dataclass(frozen=True)
class AlignmentMap:
    """Which words of the source each word that was said looked at: rows said, columns the source.

    Attributes:
        weights: [T,S], each row a distribution.
        said: a word per row.
        source: a word per column.
        title: read out to who cannot see it.

    >>> chart = AlignmentMap(np.eye(2), ["一", "二"], ["one", "two"])
    >>> chart.draw().hints["cells"][0]
    '一 ← one: 1.0000'
    """

    weights: Float[np.ndarray, "T S"]
    said: Sequence[str]
    source: Sequence[str]
    title: str = "alignment: rows were said, columns are the source"

    def draw(self) -> Drawing:
        """The figure: the darker a cell, the more its row's word looked at its column's."""
        rows, columns = self.weights.shape
        said, source = ([inert(word) for word in words] for words in (self.said, self.source))
        side, turn = 22, math.radians(55)
        longest = [max(map(cell_len, words), default=0) * LETTER_WIDTH for words in (said, source)]
        left, top = 18 + longest[0], 22 + longest[1] * math.sin(turn)
        # the last word above the columns leans out to the right
        right = 14 + (cell_len(source[-1]) * LETTER_WIDTH * math.cos(turn) if source else 0)
        wide = max(left + columns * side + right, left + 300)
        high = top + rows * side + 48
        figure = plotting.new_figure(wide, high)
        axes = plotting.new_axes(figure, left, wide - left - columns * side, top, 48)
        axes.grid(visible=False)
        cells = axes.pcolormesh(
            np.clip(self.weights, 0, 1),
            cmap=plotting.weight_colours(),
            vmin=0,
            vmax=1,
            edgecolors=palette.LIGHT["card"],
            linewidth=2,
            gid="cells",
        )
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.set_xticks(
            np.arange(columns) + 0.5,
            source,
            rotation=55,
            ha="left",
            rotation_mode="anchor",
            color=palette.LIGHT["k"],
            fontsize=13,
        )
        axes.set_yticks(np.arange(rows) + 0.5, said, color=palette.LIGHT["q"], fontsize=13)
        axes.tick_params(pad=5)
        self._scale(figure, left)
        hints = [
            f"{word} ← {other}: {terminal.weight(float(weight))}"
            for word, row in zip(said, self.weights, strict=True)
            for other, weight in zip(source, row, strict=True)
        ]
        assert cells.get_array() is not None
        return Drawing(figure, {"cells": hints})

    @staticmethod
    def _scale(figure: Figure, left: float) -> None:
        """What the shades mean, at the foot."""
        wide, high = (72 * x for x in figure.get_size_inches())
        plotting.write_at(figure, left, high - 14, "weight 0", size=12)
        bar = figure.add_axes(((left + 62) / wide, 12 / high, 160 / wide, 14 / high))
        shades = np.linspace(0, 1, plotting.NUM_SHADES)[None]
        bar.pcolormesh(shades, cmap=plotting.weight_colours(), vmin=0, vmax=1)
        bar.set_axis_off()
        plotting.write_at(figure, left + 230, high - 14, "1", size=12)


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one head with their numbers, rows queries and columns keys.

    Attributes:
        weights: [T][S], each from 0 to 1.
        title: what they are.

    >>> len(HeadWeights([[1.0, 0.0], [0.5, 0.5]], "head 0").draw().hints["cells"])
    4
    """

    weights: Sequence[Sequence[float]]
    title: str

    def draw(self) -> Drawing:
        """The figure; up to 16 rows each cell has its number."""
        cells = np.array(self.weights, float)
        rows, columns = cells.shape
        side = max(8, min(44, 640 // max(rows, columns)))
        wide = max(96 + columns * side, 40 + LETTER_WIDTH * cell_len(inert(self.title)))
        figure = plotting.new_figure(wide, 112 + rows * side)
        axes = plotting.new_axes(figure, 60, wide - 60 - columns * side, 56, 56)
        axes.grid(visible=False)
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=14)
        plotting.write_at(figure, 16, 46, "query")
        colours = plotting.weight_colours()
        axes.pcolormesh(cells, cmap=colours, vmin=0, vmax=1, gid="cells")
        axes.invert_yaxis()
        axes.set_xlabel("key", fontsize=13, color=palette.LIGHT["soft"], labelpad=6)
        for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
            step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000, 10**9) if count <= 20 * s)
            axis.set_ticks(np.arange(0, count, step) + 0.5, map(str, range(0, count, step)))
        for i, j in np.ndindex(rows, columns) if max(rows, columns) <= 16 else ():
            axes.text(
                j + 0.5,
                i + 0.5,
                f"{cells[i, j]:.2f}",
                ha="center",
                va="center",
                fontsize=11,
                color=palette.LIGHT["card" if cells[i, j] > 0.45 else "ink"],
            )
        hints = [
            f"query {i}, key {j}: {terminal.weight(float(cells[i, j]))}"
            for i, j in np.ndindex(rows, columns)
        ]
        return Drawing(figure, {"cells": hints})


@dataclass(frozen=True)
class RatioBar:
    """A peer's time divided by ours.

    Attributes:
        label: whose time; the first bar of a group names the group, too.
        ratio: above 1 is slower than ours.
        words: behind the bar.

    >>> RatioBar("decode: torch SDPA", 1.5, "1.50x, 3.00 ms").ratio
    1.5
    """

    label: str
    ratio: float
    words: str


@dataclass(frozen=True)
class RatioBars:
    """Times of peers divided by ours: a bar from 1 to each, on a logarithmic axis.

    >>> RatioBars([RatioBar("torch SDPA", 1.5, "1.50x")], "bench").draw().hints
    {}
    """

    bars: Sequence[RatioBar]
    title: str

    def draw(self) -> Drawing:
        """The figure, a row for each bar."""
        ratios = [bar.ratio for bar in self.bars]
        labels = [inert(bar.label) for bar in self.bars]
        left = 24 + LETTER_WIDTH * max(map(cell_len, labels))
        figure = plotting.new_figure(left + 560, 110 + 22 * len(ratios))
        axes = plotting.new_axes(figure, left, 130, 44, 60)
        axes.grid(axis="x", color=palette.LIGHT["line"], linewidth=1)
        axes.grid(visible=False, axis="y")
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=14)
        places = range(len(ratios))
        # a logarithmic axis has no other place to begin than 1, which is ours
        axes.barh(places, [x - 1 for x in ratios], left=1, color=palette.LIGHT["soft"], height=0.66)
        for place, bar in enumerate(self.bars):
            axes.annotate(
                inert(bar.words),
                (max(bar.ratio, 1), place),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=12,
                color=palette.LIGHT["ink"],
                annotation_clip=False,
            )
        axes.axvline(1, color=palette.LIGHT["q"], linewidth=2)
        axes.set_yticks(places, labels, color=palette.LIGHT["ink"], fontsize=12)
        axes.set_ylim(len(ratios) - 0.4, -0.6)
        _scale(axes, "x", [0.8, 1.25, *ratios], "ratio", log=True)
        axes.set_xlabel(
            "time divided by ours; further right is slower",
            fontsize=13,
            color=palette.LIGHT["soft"],
            labelpad=8,
        )
        return Drawing(figure)


def context_charts(rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Panels:
    """What caches hold, and what one decoded token takes, over the contexts of each model.

    The token is in seconds where all rows have them, else in FLOPs. Empty marks are contexts at
    which weights and cache do not fit the machine.

    Args:
        rows: model -> its rows of `regard.cost.sweep.sweep`.
        title: above the charts.

    >>> row = {"context": 1024, "kv_bytes": 4096, "decode_flops": 1e6}
    >>> [one.y for one in context_charts({"m": [row]}, "batch 1").pictures]
    ['cache, bytes', 'one token, FLOPs']
    """
    timed = all("decode_seconds" in row for model_rows in rows.values() for row in model_rows)
    token = ("decode_seconds", "one token, seconds at best")
    wanted = (
        ("kv_bytes", "cache, bytes"),
        token if timed else ("decode_flops", "one token, FLOPs"),
    )
    misfits = {
        model: frozenset(float(row["context"]) for row in model_rows if row.get("fits") is False)
        for model, model_rows in rows.items()
    }
    if any(misfits.values()):
        title += "; empty marks: weights and cache do not fit"
    return Panels(
        title,
        tuple(
            Picture(
                "",
                "context, tokens",
                words,
                tuple(
                    Line(
                        model,
                        tuple((float(row["context"]), float(row[name])) for row in model_rows),
                        hollow=misfits[model],
                    )
                    for model, model_rows in rows.items()
                ),
                "xy",
            )
            for name, words in wanted
        ),
    )


def _unit(words: str) -> str:
    """The unit that the words of an axis name, of those whose numbers are written in a way of
    their own.

    >>> [_unit(words) for words in ("cache, bytes", "share right", "milliseconds", "nats per byte")]
    ['bytes', 'share', '', '']
    """
    match = re.search(r"^share|\b(seconds|bytes|FLOPs)\b", words)
    return match[0] if match else ""


def _value_text(unit: str) -> Callable[[float], str]:
    """How a value of a unit is written where a mark says it."""
    known: dict[str, Callable[[float], str]] = {
        "bytes": units.size,
        "seconds": units.seconds,
        "FLOPs": lambda x: units.count(x, "FLOP"),
        "share": lambda x: f"{100 * x:.4g} %",
    }
    return known.get(unit, _number)


def _number(x: float) -> str:
    """A number of no unit, short.

    >>> _number(0.25), _number(4096), _number(12345678.0)
    ('0.25', '4096', '1.2e7')
    """
    if abs(x) < 1e5:
        return f"{x:.4g}" if x != int(x) else f"{x:.0f}"
    return f"{x:.2g}".replace("e+0", "e").replace("e+", "e")


def _tick_text(unit: str, *, tokens: bool) -> Callable[[float], str]:
    """How a round value of a unit is written beside an axis."""

    def words(x: float) -> str:
        if unit == "share":
            return f"{100 * x:g} %"
        if unit == "ratio":
            return f"{x:g}x"
        if unit == "FLOPs" and x > 0:
            step = min(int(math.log10(x) + 1e-9) // 3, 6)
            return f"{x / 1000**step:g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[step]}".rstrip()
        if unit == "bytes" and x >= 1:
            step = min(int(math.log2(x) + 1e-9) // 10, 5)
            return f"{x / 1024**step:g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[step]}"
        if unit == "seconds" and x > 0:
            scale, name = next(
                ((s, n) for s, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if x >= 0.999 * s),
                (1e-9, "ns"),
            )
            return f"{x / scale:.4g} {name}"
        if tokens and x == int(x):
            return units.tokens(int(x))
        return _number(x)

    return words


def _scale(
    axes: Axes,
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    log: bool,
    room: float = 0.04,
    tokens: bool = False,
    most: int = 9,
) -> None:
    """Give an axis its limits, with some room around the values, and round numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        wide = max((math.log(high) - math.log(low)) * room, 0.12)
        low, high = low * math.exp(-wide), high * math.exp(wide)
    else:
        wide = (high - low) * room or max(abs(high) * 0.05, 0.05)
        low, high = low - wide, high + wide
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis = axes.xaxis if name == "x" else axes.yaxis
    words = _tick_text(unit, tokens=tokens)
    axis.set_major_locator(FixedLocator(_ticks(low, high, values, unit, log=log, most=most)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_locator(NullLocator())


def _ticks(
    low: float, high: float, values: Sequence[float], unit: str, *, log: bool, most: int
) -> list[float]:
    """Round values within the limits, at most `most` of powers: matplotlib proposes them."""
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator

    whole = all(v == int(v) for v in values)
    plain = MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole and unit != "share")
    locators: list[Locator] = []
    if log and (unit == "bytes" or all(v > 0 and math.log2(v) % 1 == 0 for v in values)):
        locators = [LogLocator(2, numticks=most)]
    elif log:
        locators = [LogLocator(10, subs, numticks=most) for subs in ((1.0,), (1.0, 2.0, 5.0))]
    candidates = [
        [float(t) for t in locator.tick_values(low, high) if low <= t <= high]
        for locator in (*locators, plain)
    ]
    # powers before plain steps, unless they are too few to read values between them
    few = min(3, len({*values}))
    return max(
        (t for t in candidates[:-1] if few <= len(t) <= most), key=len, default=candidates[-1]
    )
