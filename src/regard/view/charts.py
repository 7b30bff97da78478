"""Charts of regard, drawn by matplotlib: lines, scatter plots and bars; `heatmaps` has the others.

A chart is a dataclass of plain numbers and texts. Its `draw` returns the matplotlib figure with
tooltips for its marks; `svg` converts it to text for a page, and `write` to a file. All charts look
alike: the title at the left, the name of the vertical axis above it, the colours of
`regard.view.palette`, and marks that differ in shape as well as in colour.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len

from regard.cost.memory_fit import DOES_NOT_FIT
from regard.language import translate
from regard.untrusted_text import escape_controls
from regard.view import palette, plotting
from regard.view.plotting import TOKENS, Drawing, set_scale, unit_in, value_formatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLES = ("q", "k", "v", "s", "z")
MARKS = ("o", "s", "D", "^", "v")
"""Lines differ in colour and in mark; from the sixth line on they are dashed, with empty marks."""
MAX_MARKS = 24
"""The largest number of marks on a line; more marks would hide the line."""

Point = tuple[float, float]


class Chart(Protocol):
    """Anything with a title and a `draw` method."""

    @property
    def title(self) -> str:
        """Return the text above the chart."""

    @abstractmethod
    def draw(self) -> Drawing:
        """Return the figure, and the tooltips of its marks."""


def svg(chart: Chart, *, alone: bool = True) -> str:
    """Return a chart as SVG, for a file or for a page that includes `plotting.css()`."""
    return plotting.svg(chart.draw(), chart.title, alone=alone)


def write(chart: Chart, path: Path) -> int:
    """Write a chart to a .svg, .png or .pdf file."""
    plotting.check_format(path)
    return plotting.write(chart.draw(), path, chart.title)


@dataclass(frozen=True)
class Line:
    """The points of one series, in the order of x.

    Args:
        points: (x, y) of each point.
        spans: interval (low, high) of y for each point, drawn as a vertical bar; () for none.
        hints: tooltip of each point; () shows its numbers.
        crossed: the x values whose marks are crossed out.
    """

    name: str
    points: tuple[Point, ...]
    spans: tuple[Point, ...] = ()
    hints: tuple[str, ...] = ()
    crossed: frozenset[float] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A line chart.

    Args:
        y: name of the vertical axis. Axes named after "seconds", "bytes" or "share" are labelled in
            these units; on axes of tokens, 1k is 1024.
        lines: the lines; points that a logarithmic axis cannot show are left out.
        log: the axes that are logarithmic: "", "x", "y" or "xy".
        edge: x from which on the background is shaded, such as the longest trained length; None
            for no shading.
        beyond: label of the shaded part.
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
        """Return whether there is a point to draw."""
        return any(self.shown(line) for line in self.lines)

    def shown(self, line: Line) -> list[Point]:
        """Return the points of a line that the axes can show."""
        return [line.points[i] for i in self._places(line)]

    def as_dict(self) -> dict[str, object]:
        """Return the chart as plain values: its texts, and every point."""
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
        """Return the figure, with a legend; without any point it is an empty frame."""
        return Panels(self.title, (self,)).draw()

    def fill(self, axes: Axes) -> dict[str, list[str]]:
        """Draw the lines into axes, and return the tooltips of their marks."""
        hints: dict[str, list[str]] = {}
        for i, line in enumerate(self.lines):
            hints |= self._fill_line(axes, line, i)
        shown = [p for line in self.lines for p in self.shown(line)] or [(1.0, 1.0)]
        spans = [v for line in self.lines for span in line.spans for v in span]
        self._scale(axes, "x", self.x, [p[0] for p in shown], log="x" in self.log)
        self._scale(axes, "y", self.y, [*(p[1] for p in shown), *spans], log="y" in self.log)
        if self.edge is not None:
            self._shade(axes, self.edge)
        axes.set_xlabel(
            escape_controls(self.x), fontsize=13, color=palette.LIGHT["soft"], labelpad=8
        )
        return hints

    def _places(self, line: Line) -> list[int]:
        """Return the indices of the points of a line that the axes can show."""
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
            label=escape_controls(line.name),
            gid=gid,
        )
        drawn.set_solid_capstyle("round")
        for j in places if line.spans else ():
            axes.vlines(line.points[j][0], *line.spans[j], color=colour, linewidth=1.5, alpha=0.55)
        if crossed := [p for p in self.shown(line) if p[0] in line.crossed]:
            axes.plot(
                *zip(*crossed, strict=True),
                "x",
                color=palette.LIGHT["ink"],
                markersize=11,
                markeredgewidth=2,
                zorder=3,
            )
        spoken = [j for n, j in enumerate(places) if n % every == 0]
        return {gid: [self._hint(line, j) for j in spoken]} if spoken else {}

    def _hint(self, line: Line, i: int) -> str:
        if line.hints:
            return line.hints[i]
        x, y = line.points[i]
        of_x, of_y = value_formatter(unit_in(self.x)), value_formatter(unit_in(self.y))
        return f"{line.name}: {of_x(x)}, {of_y(y)}"

    def _shade(self, axes: Axes, edge: float) -> None:
        low, high = axes.get_xlim()
        start = min(max(edge, low), high)
        axes.axvspan(start, high, color=palette.LIGHT["hint"], linewidth=0, zorder=0)
        axes.axvline(start, color=palette.LIGHT["soft"], linewidth=1, linestyle=(0, (4, 4)))
        if self.beyond and start < high:
            axes.text(
                high,
                1.02,
                escape_controls(self.beyond),
                transform=axes.get_xaxis_transform(),
                ha="right",
                fontsize=13,
                color=palette.LIGHT["soft"],
            )

    @staticmethod
    def _scale(axes: Axes, name: str, words: str, values: list[float], *, log: bool) -> None:
        unit = unit_in(words)
        if unit == "share" and not log and min(values) >= 0 and max(values) <= 1:
            values = [0.0, 1.0]
        set_scale(
            axes, name, values, unit, log=log, tokens=words == "n" or bool(TOKENS.search(words))
        )


@dataclass(frozen=True)
class Panels:
    """Line charts side by side under one title, with one legend for the lines of the first."""

    title: str
    pictures: tuple[Picture, ...]

    def draw(self) -> Drawing:
        """Return the figure, and the tooltips of all marks."""
        lines = self.pictures[0].lines
        widest = max((cell_len(escape_controls(line.name)) for line in lines), default=0)
        each = 720 if len(self.pictures) == 1 else 520
        wide, apart = each * len(self.pictures), plotting.LETTER_WIDTH * widest + 54
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
    """The share of correct answers for sources of `low` to `high` tokens."""

    low: int
    high: int
    share: float
    interval: tuple[float, float]
    examples: int

    @property
    def middle(self) -> float:
        """Return the length at which the bin is drawn."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Accuracy:
    """The share of correct answers of one model, in the order of length."""

    name: str
    bins: tuple[LengthBin, ...]


def accuracy_chart(models: Sequence[Accuracy], trained: int, title: str) -> Picture:
    """Return a chart of right answers against source length, a line for each model."""
    lines = tuple(
        Line(
            model.name,
            tuple((one.middle, one.share) for one in model.bins),
            tuple(one.interval for one in model.bins),
            tuple(
                translate(
                    "{name}, length {low} to {high}: {share} % of {examples}",
                    name=model.name,
                    low=one.low,
                    high=one.high,
                    share=f"{100 * one.share:.1f}",
                    examples=one.examples,
                )
                for one in model.bins
            ),
        )
        for model in models
    )
    longest = max((one.high for model in models for one in model.bins), default=0)
    edge = trained + 0.5 if longest > trained else None
    return Picture(
        title,
        translate("tokens of the source"),
        translate("share correct"),
        lines,
        "",
        edge,
        translate("longer than in training"),
    )


@dataclass(frozen=True)
class ScatterPoint:
    """A mechanism in a scatter plot: its cost, its quality, and the spread of the quality.

    Args:
        span: range of y over random seeds.
        on_pareto_front: whether no other mechanism is better in both.
    """

    name: str
    x: float
    y: float
    span: tuple[float, float]
    on_pareto_front: bool


@dataclass(frozen=True)
class Axis:
    """The name of an axis, with "bytes" or "seconds" (logarithmic), "bits" or "share" (linear)."""

    title: str
    unit: str

    @property
    def logarithmic(self) -> bool:
        """Return whether the axis is logarithmic, as axes of costs are."""
        return self.unit in ("bytes", "seconds")


@dataclass(frozen=True)
class Scatter:
    """A scatter plot of quality against cost, with names and the Pareto front."""

    marks: Sequence[ScatterPoint]
    x: Axis
    y: Axis
    title: str
    caption: str = ""

    def draw(self) -> Drawing:
        """Return the figure; a dashed line connects the filled marks, the Pareto front."""
        figure = plotting.new_figure(560, 400)
        axes = plotting.new_axes(figure, 80, 96, 66, 54)
        axes.grid(axis="both", color=palette.LIGHT["line"], linewidth=1)
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=15)
        plotting.write_at(figure, 16, 48, self.y.title)
        axes.set_xlabel(
            escape_controls(self.x.title), fontsize=13, color=palette.LIGHT["soft"], labelpad=8
        )
        ys = [v for mark in self.marks for v in (mark.y, *mark.span)]
        values = [0.0, 1.0] if self.y.unit == "share" else ys
        set_scale(axes, "y", values, self.y.unit, log=self.y.logarithmic, room=0.08)
        xs = [mark.x for mark in self.marks]
        set_scale(axes, "x", xs, self.x.unit, log=self.x.logarithmic, room=0.08, most=6)
        best = sorted((mark.x, mark.y) for mark in self.marks if mark.on_pareto_front)
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
            colour = palette.LIGHT["q" if mark.on_pareto_front else "soft"]
            if mark.span[0] < mark.span[1]:
                axes.vlines(mark.x, *mark.span, color=colour, linewidth=1.5, alpha=0.6)
            axes.plot(
                [mark.x],
                [mark.y],
                "o",
                color=colour,
                markersize=9,
                markerfacecolor=colour if mark.on_pareto_front else palette.LIGHT["card"],
                gid=f"mark {i}",
                zorder=3,
            )
            x, y = value_formatter(self.x.unit)(mark.x), value_formatter(self.y.unit)(mark.y)
            hints[f"mark {i}"] = [
                f"{mark.name}: {x}, {y}"
                + (translate(", on the Pareto front") if mark.on_pareto_front else "")
            ]
        self._name(axes)
        return Drawing(figure, hints)

    def _name(self, axes: Axes) -> None:
        """Write the names to the right of the marks, each below a name that it would overlap."""
        line, placed = 15.0, list[tuple[float, float, float]]()
        places = [axes.transData.transform((mark.x, mark.y)) for mark in self.marks]
        for i in sorted(range(len(places)), key=lambda i: -places[i][1]):
            name = escape_controls(self.marks[i].name)
            left, middle, wide = (
                places[i][0] + 10,
                places[i][1],
                plotting.LETTER_WIDTH * cell_len(name),
            )
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


def context_charts(rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Panels:
    """Return charts of cache size and cost of a decoded token over the context.

    The cost is in seconds if all rows have them, else FLOPs; what does not fit is crossed out.
    """
    timed = all("decode_seconds" in row for model_rows in rows.values() for row in model_rows)
    token = ("decode_seconds", translate("one token, seconds at best"))
    wanted = (
        ("kv_bytes", translate("cache, bytes")),
        token if timed else ("decode_flops", translate("one token, FLOPs")),
    )
    misfits = {
        model: frozenset(
            float(row["context"]) for row in model_rows if row.get("fit") == DOES_NOT_FIT
        )
        for model, model_rows in rows.items()
    }
    if any(misfits.values()):
        title += translate("; crossed out: weights and cache do not fit")
    return Panels(
        title,
        tuple(
            Picture(
                "",
                translate("context, tokens"),
                words,
                tuple(
                    Line(
                        model,
                        tuple((float(row["context"]), float(row[name])) for row in model_rows),
                        crossed=misfits[model],
                    )
                    for model, model_rows in rows.items()
                ),
                "xy",
            )
            for name, words in wanted
        ),
    )
