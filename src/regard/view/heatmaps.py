"""Heatmaps of attention weights: of words, of one head, and of an explanation; and figures of
mechanisms: shared keys and values, cache bytes, and masks.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float
from rich.cells import cell_len

from regard import units
from regard.language import translate, translate_count
from regard.text_table import wrap
from regard.untrusted_text import escape_controls
from regard.view import palette, plotting, terminal
from regard.view.plotting import Drawing
from regard.view.terminal import cell, weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AlignmentMap:
    """A heatmap `[T, S]` of the attention of an answer's words over the source's words."""

    weights: Float[np.ndarray, "T S"]
    predicted: Sequence[str]
    source: Sequence[str]
    title: str = field(
        default_factory=lambda: translate("alignment: rows are the answer, columns are the source")
    )

    def draw(self) -> Drawing:
        """Return the figure, in which the darkness of a cell is linear in its weight."""
        rows, columns = self.weights.shape
        predicted, source = (
            [escape_controls(word) for word in words] for words in (self.predicted, self.source)
        )
        side, turn = 22, math.radians(55)
        longest = [
            max(map(cell_len, words), default=0) * plotting.LETTER_WIDTH
            for words in (predicted, source)
        ]
        left, top = 18 + longest[0], 22 + longest[1] * math.sin(turn)
        # the last column label extends to the right
        right = 14 + (
            cell_len(source[-1]) * plotting.LETTER_WIDTH * math.cos(turn) if source else 0
        )
        wide = max(left + columns * side + right, left + 300)
        high = top + rows * side + 48
        figure = plotting.new_figure(wide, high)
        axes = plotting.new_axes(figure, left, wide - left - columns * side, top, 48)
        axes.grid(visible=False)
        cells = axes.pcolormesh(
            np.clip(self.weights, 0, 1),
            cmap=plotting.weight_colours(),
            norm=plotting.linear_scale(),
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
        axes.set_yticks(np.arange(rows) + 0.5, predicted, color=palette.LIGHT["q"], fontsize=13)
        axes.tick_params(pad=5)
        self._scale(figure, left)
        hints = [
            f"{word} ← {other}: {terminal.weight(float(weight))}"
            for word, row in zip(predicted, self.weights, strict=True)
            for other, weight in zip(source, row, strict=True)
        ]
        assert cells.get_array() is not None
        return Drawing(figure, {"cells": hints})

    @staticmethod
    def _scale(figure: Figure, left: float) -> None:
        """Draw the linear colour scale below the chart."""
        wide, high = (72 * x for x in figure.get_size_inches())
        plotting.write_at(figure, left, high - 14, translate("weight {p}", p=0), size=12)
        bar = figure.add_axes(((left + 72) / wide, 12 / high, 160 / wide, 14 / high))
        shades = np.linspace(0, 1, plotting.NUM_SHADES)[None]
        bar.pcolormesh(shades, cmap=plotting.weight_colours(), vmin=0, vmax=1)
        bar.set_axis_off()
        plotting.write_at(figure, left + 240, high - 14, "1", size=12)


@dataclass(frozen=True)
class HeadWeights:
    """A heatmap `[T][S]` of a head's weights with their numbers; () numbers the axes."""

    weights: Sequence[Sequence[float]]
    title: str
    queries: Sequence[str] = ()
    keys: Sequence[str] = ()

    def draw(self) -> Drawing:
        """Return the figure; up to 16 rows and columns, each cell has its number in linear colours,
        and with more of them colours are logarithmic.
        """
        cells = np.array(self.weights, float)
        rows, columns = cells.shape
        names = [[escape_controls(word) for word in words] for words in (self.queries, self.keys)]
        longest, widest = (
            plotting.LETTER_WIDTH * max(map(cell_len, words), default=0) for words in names
        )
        side = max(8, min(44, 640 // max(rows, columns)), widest + 8 if columns <= 16 else 0)
        left = max(60, 24 + longest)
        wide = max(
            left + 36 + columns * side,
            310,
            40 + plotting.LETTER_WIDTH * cell_len(escape_controls(self.title)),
        )
        high = min(side, 44)
        figure = plotting.new_figure(wide, 112 + rows * high)
        axes = plotting.new_axes(figure, left, wide - left - columns * side, 56, 56)
        axes.grid(visible=False)
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=14)
        few = max(rows, columns) <= 16
        lowest = plotting.power_of_two(plotting.lowest_weight(columns))
        note = translate("query; colours linear from 0 to 1")
        if not few:
            note = translate("query; colours logarithmic from {lowest} to 1", lowest=lowest)
        plotting.write_at(figure, 16, 46, note, size=12)
        colours = plotting.weight_colours()
        scale = plotting.linear_scale() if few else plotting.weight_scale(columns)
        axes.pcolormesh(cells, cmap=colours, norm=scale, gid="cells")
        axes.invert_yaxis()
        axes.set_xlabel(translate("key"), fontsize=13, color=palette.LIGHT["soft"], labelpad=6)
        for axis, count, words in (
            (axes.xaxis, columns, names[1]),
            (axes.yaxis, rows, names[0]),
        ):
            step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000, 10**9) if count <= 20 * s)
            shown = range(0, count, step)
            axis.set_ticks(
                np.arange(0, count, step) + 0.5, [words[i] if words else str(i) for i in shown]
            )
        for i, j in np.ndindex(rows, columns) if few else ():
            axes.text(
                j + 0.5,
                i + 0.5,
                # a small weight is no 0.00, and its digits differ by processor
                f"{w:.2f}" if (w := cells[i, j]) >= 0.005 or w == 0 else "<0.01",
                ha="center",
                va="center",
                fontsize=12,
                color=palette.LIGHT["card" if scale(cells[i, j]) > 0.4 else "ink"],
            )
        rows_named = names[0] or [f"{translate('query')} {i}" for i in range(rows)]
        columns_named = names[1] or [f"{translate('key')} {j}" for j in range(columns)]
        hints = [
            f"{rows_named[i]}, {columns_named[j]}: {terminal.weight(float(cells[i, j]))}"
            for i, j in np.ndindex(rows, columns)
        ]
        return Drawing(figure, {"cells": hints})


@dataclass(frozen=True)
class EffectMap:
    """A heatmap `[R, C]` of numbers of both signs, such as effects; NaN leaves a cell empty."""

    values: Float[np.ndarray, "R C"]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str
    across: str = "column"
    quantity: str = "effect"
    cells: Sequence[Sequence[str]] = ()

    def draw(self) -> Drawing:
        """Return the figure: orange cells are negative, blue ones positive, pale ones near 0."""
        count, wide_count = self.values.shape
        names, columns = (
            [escape_controls(word) for word in words] for words in (self.rows, self.columns)
        )
        text_wide = max((cell_len(word) for row in self.cells for word in row), default=0)
        left = 20 + max(map(cell_len, names), default=0) * plotting.LETTER_WIDTH
        room = (plotting.PAGE - 20 - left) / max(wide_count, 1)
        wide_cell = max(16, min(26, room), min(90, plotting.LETTER_WIDTH * text_wide + 8))
        long_columns = max(map(cell_len, columns), default=0) > wide_cell / plotting.LETTER_WIDTH
        side = 26
        below = 46 + (max(map(cell_len, columns)) * 6.6 if long_columns else 0)
        finite = self.values[np.isfinite(self.values)]
        largest = float(np.abs(finite).max()) if finite.size else 0.0
        low = f"{-largest:.3g}"
        scale = translate(
            "{quantity}, from {low} to {high} (blue)",
            quantity=self.quantity,
            low="0" if (finite >= 0).all() else translate("{low} (orange)", low=low),
            high=f"{largest:.3g}",
        )
        lines = [x for text in (self.title, scale) for x in textwrap.wrap(text, 80) or [text]]
        heading = max(cell_len(escape_controls(x)) for x in lines)
        wide = max(left + wide_count * wide_cell + 20, 40 + plotting.LETTER_WIDTH * heading)
        top = 22 + 20 * len(lines)
        figure = plotting.new_figure(wide, top + count * side + below)
        axes = plotting.new_axes(figure, left, wide - left - wide_count * wide_cell, top, below)
        axes.grid(visible=False)
        for n, line in enumerate(lines):
            role, size = ("soft", 12) if n else ("ink", 14)
            plotting.write_at(figure, 16, 24 + 20 * n, line, role=role, size=size)
        self._draw_cells(axes, largest or 1.0)
        axes.set_xlabel(
            escape_controls(self.across), fontsize=13, color=palette.LIGHT["soft"], labelpad=4
        )
        axes.set_yticks(np.arange(count) + 0.5, names, fontsize=12)
        axes.set_xticks(
            np.arange(wide_count) + 0.5, columns, rotation=90 if long_columns else 0, fontsize=12
        )
        shown = [(i, j) for i, j in np.ndindex(*self.values.shape)]
        hints = [
            f"{names[i]}, {self.across} {columns[j]}: {self._described(i, j)}" for i, j in shown
        ]
        return Drawing(figure, {"cells": hints})

    def _described(self, i: int, j: int) -> str:
        value = self.values[i, j]
        number = translate("nothing") if math.isnan(value) else f"{value:.4g}"
        return f"{self.cells[i][j]} {number}" if self.cells else number

    def _draw_cells(self, axes: Axes, largest: float) -> None:
        """Draw the cells, and their texts."""
        colours = plotting.signed_colours()
        axes.pcolormesh(
            np.where(np.isnan(self.values), 0, self.values),
            cmap=colours,
            vmin=-largest,
            vmax=largest,
            edgecolors=palette.LIGHT["card"],
            linewidth=1,
            gid="cells",
        )
        axes.invert_yaxis()
        if self.cells:
            for i, j in np.ndindex(*self.values.shape):
                dark = abs(self.values[i, j]) > 0.7 * largest
                axes.text(
                    j + 0.5,
                    i + 0.5,
                    escape_controls(self.cells[i][j]),
                    ha="center",
                    va="center",
                    fontsize=12,
                    color=palette.LIGHT["card" if dark else "ink"],
                )


EXPLANATION_WIDTH, PATTERN_HEIGHT, ROW_HEIGHT = 900, 400, 150
MAX_NAMED_TOKENS = 40
"""The largest number of tokens whose names are written beside the axes."""


def recipe(data: Mapping[str, Any]) -> str:
    """Describe what the figure shows and how weights were pooled, so that it can be reproduced."""
    n, S = data["pool"], data["sizes"]["S"]
    reduction = translate("every weight")
    if n > 1:
        reduction = translate("each cell the largest weight of {n} x {n}", n=n)
    return escape_controls(
        translate(
            "{model}, {place}, head {head}, query {query} {query_piece}, key {key} {key_piece}; "
            "rows are queries ({T}), columns are keys ({S}); {reduction}; colour logarithmic from "
            "{lowest} to 1, hatched where masked; scale {scale}; kernel {kernel}, {dtype}; check "
            "{check}",
            model=data["model"],
            place=data["place"],
            head=data["head"],
            query=data["query"],
            query_piece=data["query_piece"],
            key=data["key"],
            key_piece=data["pieces"][data["key"]],
            T=data["sizes"]["T"],
            S=S,
            reduction=reduction,
            lowest=plotting.power_of_two(plotting.lowest_weight(S)),
            scale=f"{data['scale']:.6g}",
            kernel=data["kernel"],
            dtype=data["dtype"],
            check=f"{data['check']:.1e}",
        )
    )


def draw_explanation(data: Mapping[str, object], path: Path) -> int:
    """Draw an explanation to a .svg, .png or .pdf file."""
    plotting.check_format(path)
    title = translate(
        "{place}, head {head}, query {query} {piece}",
        place=data["place"],
        head=data["head"],
        query=data["query"],
        piece=data["query_piece"],
    )
    return plotting.write(explanation_drawing(data), path, title)


def explanation_drawing(data: Mapping[str, Any]) -> Drawing:
    """Return the figure of an explanation, with tooltips for its cells and bars."""
    words = wrap(recipe(data), 130).splitlines()
    names = [_label(piece) for piece in data["pieces"]]
    named = 74 if len(names) <= MAX_NAMED_TOKENS else 26
    whole = bool(data["patterns"])
    top = 64 + (PATTERN_HEIGHT + named + 54) * whole
    figure = plotting.new_figure(EXPLANATION_WIDTH, top + ROW_HEIGHT + named + 40 + 16 * len(words))
    hints = _draw_row(figure, data, names, top)
    if whole:
        hints |= _draw_pattern(figure, data, names)
    high = 72 * figure.get_size_inches()[1]
    for i, line in enumerate(words):
        plotting.write_at(figure, 16, high - 16 * (len(words) - i) + 4, line, size=11)
    return Drawing(figure, hints)


def _draw_pattern(
    figure: Figure, data: Mapping[str, Any], names: list[str]
) -> dict[str, list[str]]:
    """Draw the pattern of the head; masked cells are hatched."""
    cells = np.array(data["patterns"][data["head"]], float)  # None becomes NaN
    rows, columns = cells.shape
    high = 72 * figure.get_size_inches()[1]
    n, where = data["pool"], cell(data["place"], 60).rstrip()
    title = translate("{place}, head {head}", place=where, head=data["head"])
    query, key = (x if n == 1 else f"{x} / {n}" for x in (translate("query"), translate("key")))
    plotting.write_at(figure, 16, 26, title, role="ink", size=15)
    plotting.write_at(figure, 16, 50, query)
    axes = plotting.new_axes(figure, 130, 80, 64, high - 64 - PATTERN_HEIGHT)
    axes.grid(visible=False)
    axes.set_facecolor(palette.LIGHT["hint"])
    axes.patch.set_hatch("///")
    axes.patch.set_edgecolor(palette.LIGHT["line"])
    axes.pcolormesh(
        np.ma.masked_invalid(cells),
        cmap=plotting.weight_colours(),
        norm=plotting.weight_scale(data["sizes"]["S"]),
        gid="pattern",
    )
    axes.invert_yaxis()
    axes.set_xlabel(key, fontsize=13, color=palette.LIGHT["soft"])
    queries = [_label(piece) for piece in data["row_pieces"]]
    if n == 1 and rows <= MAX_NAMED_TOKENS:
        axes.set_yticks(np.arange(rows) + 0.5, queries[:rows], fontsize=10)
    if n == 1 and columns <= MAX_NAMED_TOKENS:
        axes.set_xticks(np.arange(columns) + 0.5, names[:columns], fontsize=10, rotation=90)
    _draw_scale(figure, high, plotting.lowest_weight(data["sizes"]["S"]))
    places = [(i, j, float(cells[i, j])) for i, j in np.ndindex(rows, columns)]
    return {
        "pattern": [
            translate("query {i}, key {j}: {weight}", i=i * n, j=j * n, weight=_weight_or_masked(p))
            for i, j, p in places
        ]
    }


def _draw_scale(figure: Figure, high: float, lowest: float) -> None:
    """Draw the logarithmic colour scale beside the pattern."""
    bar = figure.add_axes(
        (
            (EXPLANATION_WIDTH - 62) / EXPLANATION_WIDTH,
            1 - (64 + PATTERN_HEIGHT) / high,
            14 / EXPLANATION_WIDTH,
            PATTERN_HEIGHT / high,
        )
    )
    shades = np.linspace(0, 1, plotting.NUM_SHADES)[:, None]
    bar.pcolormesh(shades, cmap=plotting.weight_colours(), vmin=0, vmax=1)
    bar.set_axis_off()
    for share, word in ((0.0, plotting.power_of_two(lowest)), (1.0, "1")):
        plotting.write_at(
            figure,
            EXPLANATION_WIDTH - 40,
            64 + PATTERN_HEIGHT * (1 - share) + 5 * share,
            word,
            size=12,
        )
    plotting.write_at(figure, EXPLANATION_WIDTH - 76, 56, translate("weight"), size=12)


def _draw_row(
    figure: Figure, data: Mapping[str, Any], names: list[str], top: float
) -> dict[str, list[str]]:
    """Draw the weights of the query; the bar of its key is highlighted."""
    weights = [math.nan if p is None else float(p) for p in data["weights"]]
    high = 72 * figure.get_size_inches()[1]
    title = f"{translate('query')} {data['query']} {_label(data['query_piece'])}"
    plotting.write_at(figure, 16, top - 34, title, role="ink", size=14)
    quantity = translate("weight") if data["kind"] != "linear" else "a_ij"
    plotting.write_at(figure, 16, top - 14, quantity)
    axes: Axes = plotting.new_axes(figure, 130, 80, top, high - top - ROW_HEIGHT)
    bars = axes.bar(np.arange(len(weights)) + 0.5, weights, width=0.7, color=palette.LIGHT["s"])
    hints = {}
    for j, (bar, p) in enumerate(zip(bars, weights, strict=True)):
        bar.set_gid(f"key {j}")
        named = f"{translate('key')} {j} {names[j]}: {weight(p)}"
        hints[f"key {j}"] = [translate("masked") if math.isnan(p) else named]
    bars[data["key"]].set_facecolor(palette.LIGHT["k"])
    axes.set_xlim(0, len(weights))
    if len(weights) <= MAX_NAMED_TOKENS:
        axes.set_xticks(np.arange(len(weights)) + 0.5, names, fontsize=10, rotation=90)
    return hints


def _weight_or_masked(p: float) -> str:
    """Return the number of a weight, or the word for a masked pair, which is NaN."""
    return translate("masked") if math.isnan(p) else weight(p)


def _label(piece: str) -> str:
    """Return the text of a token, cut to a width that fits beside an axis."""
    return cell(piece, 10).rstrip()


PANEL, HIGH = 330, 232
"""Width and height of the panel of one mechanism; two stand side by side."""


@dataclass(frozen=True)
class CachedHeads:
    """What one mechanism caches for a token in one layer: `groups` is 0 with a latent."""

    name: str
    heads: int
    groups: int
    values: int
    latent: str = ""


@dataclass(frozen=True)
class HeadsFigure:
    """Several mechanisms, two side by side: query heads above, cached keys and values below."""

    mechanisms: Sequence[CachedHeads]
    bytes_per_value: int = 2
    title: str = field(
        default_factory=lambda: translate("what a cache holds for each token of one layer")
    )

    @property
    def captions(self) -> list[str]:
        """The line below each panel: the bytes that a token takes in the cache."""
        sizes = (units.size(x.values * self.bytes_per_value) for x in self.mechanisms)
        return [translate("{size} a token", size=size) for size in sizes]

    def draw(self) -> Drawing:
        """Return the figure, with a tooltip for each panel."""
        count = len(self.mechanisms)
        wide, high = PANEL * min(count, 2) + 24, 54 + HIGH * -(-count // 2)
        figure = plotting.new_figure(wide, high)
        plotting.write_at(figure, 16, 30, self.title, role="ink", size=15)
        for i, (one, caption) in enumerate(zip(self.mechanisms, self.captions, strict=True)):
            left, top = 12 + i % 2 * PANEL, 46 + i // 2 * HIGH
            axes = plotting.new_axes(figure, left, wide - left - PANEL, top, high - top - HIGH + 24)
            axes.set_axis_off()
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            _panel(axes, one, caption)
        return Drawing(figure)


def _panel(axes: Axes, one: CachedHeads, caption: str) -> None:
    """Draw one mechanism: every query head, lines, and what is cached."""
    columns = [0.12 + (h + 0.5) / one.heads * 0.83 for h in range(one.heads)]
    places = [0.12 + (g + 0.5) / one.groups * 0.83 for g in range(one.groups)] or [0.535]
    soft, narrow = palette.LIGHT["soft"], 0.6 / one.heads
    axes.text(0.05, 0.95, one.name, color=palette.LIGHT["ink"], fontsize=14, va="center")
    label = translate_count(one.heads, "query head")
    axes.text(0.95, 0.95, label, color=soft, fontsize=13, va="center", ha="right")
    style: Any = "-" if one.groups else (0, (4, 3))
    for h, x in enumerate(columns):
        end = places[h * len(places) // one.heads]
        axes.plot((x, end), (0.74, 0.52), color=soft, linewidth=1, linestyle=style, zorder=0)
    _boxes(axes, "q", columns, 0.80, narrow)
    if one.groups:
        _boxes(axes, "k", places, 0.46, narrow)
        _boxes(axes, "v", places, 0.32, narrow)
        cached = translate_count(one.groups, "key/value head")
    else:
        _boxes(axes, "s", places, 0.42, 0.5)
        axes.text(
            0.535, 0.42, translate("latent"), color="#ffffff", fontsize=13, ha="center", va="center"
        )
        cached = one.latent
    for y, line in ((0.18, translate("cached: {what}", what=cached)), (0.07, caption)):
        axes.text(0.05, y, line, color=soft, fontsize=13, va="center")


def _boxes(axes: Axes, role: str, places: Sequence[float], y: float, wide: float) -> None:
    """Draw a row of boxes, with the letter of their role before it."""
    from matplotlib.patches import Rectangle

    colour = palette.LIGHT[role]
    if role in "qkv":
        axes.text(0.05, y, role, color=colour, fontsize=14, va="center")
    for x in places:
        corner = (x - wide / 2, y - 0.05)
        axes.add_patch(Rectangle(corner, wide, 0.10, color=colour, linewidth=0))


@dataclass(frozen=True)
class MaskFigure:
    """The keys that each query sees, `[T, S]`: rows are queries, columns are keys."""

    visible: Bool[np.ndarray, "T S"]
    title: str
    q_start: int = 0
    k_start: int = 0
    note: str = ""

    def draw(self) -> Drawing:
        """Return the figure; visible pairs are dark."""
        rows, columns = self.visible.shape
        side = max(2.0, min(22.0, 640 / max(rows, columns)))
        wide, high = max(340.0, columns * side + 90), rows * side + 110
        figure = plotting.new_figure(wide, high)
        plotting.write_at(figure, 16, 28, self.title, role="ink", size=15)
        axes = plotting.new_axes(figure, 66, wide - 66 - columns * side, 62, 48)
        self.fill(axes, lines=side > 6)
        axes.set_ylabel(translate("query"), color=palette.LIGHT["soft"], fontsize=13)
        axes.set_xlabel(translate("key"), color=palette.LIGHT["soft"], fontsize=13)
        return Drawing(figure)

    def fill(self, axes: Axes, *, lines: bool = True) -> None:
        """Draw the pairs into axes, the first query at the top."""
        rows, columns = self.visible.shape
        axes.grid(visible=False)
        axes.pcolormesh(
            np.arange(columns + 1) + self.k_start - 0.5,
            np.arange(rows + 1) + self.q_start - 0.5,
            self.visible.astype(float) * 0.8,
            cmap=plotting.weight_colours(),
            vmin=0,
            vmax=1,
            edgecolors=palette.LIGHT["line"] if lines else "none",
            linewidth=1,
        )
        axes.invert_yaxis()
        axes.xaxis.tick_top()


@dataclass(frozen=True)
class MaskPanels:
    """Several masks, two or three side by side, each with its number of visible pairs."""

    masks: Sequence[MaskFigure]
    title: str

    @property
    def captions(self) -> list[str]:
        """The line below each panel: its note, or how many pairs are visible."""
        return [
            x.note
            or translate(
                "{n} of {all} pairs", n=f"{int(x.visible.sum()):,}", all=f"{x.visible.size:,}"
            )
            for x in self.masks
        ]

    def draw(self) -> Drawing:
        """Return the figure; rows are queries, columns are keys."""
        side, gap, count = 186, 36, len(self.masks)
        across = 3 if count % 3 == 0 else min(count, 2)
        wide, high = across * (side + gap) + 20, -(-count // across) * (side + 64) + 52
        figure = plotting.new_figure(wide, high)
        plotting.write_at(figure, 16, 28, self.title, role="ink", size=15)
        for i, (one, caption) in enumerate(zip(self.masks, self.captions, strict=True)):
            left, top = 20 + i % across * (side + gap), 78 + i // across * (side + 64)
            plotting.write_at(figure, left, top - 12, one.title)
            axes = plotting.new_axes(figure, left, wide - left - side, top, high - top - side)
            one.fill(axes)
            axes.set_xticks([])
            axes.set_yticks([])
            plotting.write_at(figure, left, top + side + 18, caption, size=12)
        return Drawing(figure)
