"""The figure of an explanation: the pattern of its head, the weights of its query, and a caption
from which the figure can be reproduced.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.untrusted_text import escape_controls
from regard.view import palette, plotting
from regard.view.plotting import Drawing
from regard.view.terminal import cell, weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, PATTERN, ROW = 900, 400, 150
NAMED = 40
"""The largest number of tokens whose names are written beside the axes."""


def recipe(data: Mapping[str, Any]) -> str:
    """Describe what the figure shows and how weights were pooled, so that it can be reproduced."""
    n, T, S = data["pool"], data["sizes"]["T"], data["sizes"]["S"]
    reduction = "every weight" if n == 1 else f"each cell the largest weight of {n} x {n}"
    return escape_controls(
        f"{data['model']}, {data['place']}, head {data['head']}, query {data['query']} "
        f"{data['query_piece']}, key {data['key']} {data['pieces'][data['key']]}; rows are queries "
        f"({T}), columns are keys ({S}); {reduction}; colour logarithmic from "
        f"{plotting.power_of_two(plotting.lowest_weight(S))} to 1, hatched where masked; "
        f"scale {data['scale']:.6g}; kernel {data['kernel']}, {data['dtype']}; check "
        f"{data['check']:.1e}"
    )


def draw(data: Mapping[str, object], path: Path) -> int:
    """Draw an explanation to a .svg, .png or .pdf file."""
    plotting.check_format(path)
    title = f"{data['place']}, head {data['head']}, query {data['query']} {data['query_piece']}"
    return plotting.write(drawing(data), path, title)


def drawing(data: Mapping[str, Any]) -> Drawing:
    """Return the figure of an explanation, with tooltips for its cells and bars."""
    words = textwrap.wrap(recipe(data), 130)
    names = [_label(piece) for piece in data["pieces"]]
    named = 74 if len(names) <= NAMED else 26
    whole = bool(data["patterns"])
    top = 64 + (PATTERN + named + 54) * whole
    figure = plotting.new_figure(WIDE, top + ROW + named + 40 + 16 * len(words))
    hints = _row(figure, data, names, top)
    if whole:
        hints |= _pattern(figure, data, names)
    high = 72 * figure.get_size_inches()[1]
    for i, line in enumerate(words):
        plotting.write_at(figure, 16, high - 16 * (len(words) - i) + 4, line, size=11)
    return Drawing(figure, hints)


def _pattern(figure: Figure, data: Mapping[str, Any], names: list[str]) -> dict[str, list[str]]:
    """Draw the pattern of the head; masked cells are hatched."""
    cells = np.array(data["patterns"][data["head"]], float)  # None becomes NaN
    rows, columns = cells.shape
    high = 72 * figure.get_size_inches()[1]
    n, where = data["pool"], cell(data["place"], 60).rstrip()
    plotting.write_at(figure, 16, 26, f"{where}, head {data['head']}", role="ink", size=15)
    plotting.write_at(figure, 16, 50, "query" if n == 1 else f"query / {n}")
    axes = plotting.new_axes(figure, 130, 80, 64, high - 64 - PATTERN)
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
    axes.set_xlabel("key" if n == 1 else f"key / {n}", fontsize=13, color=palette.LIGHT["soft"])
    queries = [_label(piece) for piece in data["row_pieces"]]
    if n == 1 and rows <= NAMED:
        axes.set_yticks(np.arange(rows) + 0.5, queries[:rows], fontsize=10)
    if n == 1 and columns <= NAMED:
        axes.set_xticks(np.arange(columns) + 0.5, names[:columns], fontsize=10, rotation=90)
    _scale(figure, high, plotting.lowest_weight(data["sizes"]["S"]))
    places = [(i, j, float(cells[i, j])) for i, j in np.ndindex(rows, columns)]
    return {
        "pattern": [
            f"query {i * n}, key {j * n}: {'masked' if math.isnan(p) else weight(p)}"
            for i, j, p in places
        ]
    }


def _scale(figure: Figure, high: float, lowest: float) -> None:
    """Draw the logarithmic colour scale beside the pattern."""
    bar = figure.add_axes(
        ((WIDE - 62) / WIDE, 1 - (64 + PATTERN) / high, 14 / WIDE, PATTERN / high)
    )
    shades = np.linspace(0, 1, plotting.NUM_SHADES)[:, None]
    bar.pcolormesh(shades, cmap=plotting.weight_colours(), vmin=0, vmax=1)
    bar.set_axis_off()
    for share, word in ((0.0, plotting.power_of_two(lowest)), (1.0, "1")):
        plotting.write_at(figure, WIDE - 40, 64 + PATTERN * (1 - share) + 5 * share, word, size=12)
    plotting.write_at(figure, WIDE - 76, 56, "weight", size=12)


def _row(
    figure: Figure, data: Mapping[str, Any], names: list[str], top: float
) -> dict[str, list[str]]:
    """Draw the weights of the query; the bar of its key is highlighted."""
    weights = [math.nan if p is None else float(p) for p in data["weights"]]
    high = 72 * figure.get_size_inches()[1]
    title = f"query {data['query']} {_label(data['query_piece'])}"
    plotting.write_at(figure, 16, top - 34, title, role="ink", size=14)
    plotting.write_at(figure, 16, top - 14, "weight" if data["kind"] != "linear" else "a_ij")
    axes: Axes = plotting.new_axes(figure, 130, 80, top, high - top - ROW)
    bars = axes.bar(np.arange(len(weights)) + 0.5, weights, width=0.7, color=palette.LIGHT["s"])
    hints = {}
    for j, (bar, p) in enumerate(zip(bars, weights, strict=True)):
        bar.set_gid(f"key {j}")
        hints[f"key {j}"] = ["masked" if math.isnan(p) else f"key {j} {names[j]}: {weight(p)}"]
    bars[data["key"]].set_facecolor(palette.LIGHT["k"])
    axes.set_xlim(0, len(weights))
    if len(weights) <= NAMED:
        axes.set_xticks(np.arange(len(weights)) + 0.5, names, fontsize=10, rotation=90)
    return hints


def _label(piece: str) -> str:
    """Return the text of a token, cut to a width that fits beside an axis."""
    return cell(piece, 10).rstrip()
