"""Ratios to ours as a chart, SVG, drawn by matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.bench.result import Measured
from regard.errors import RegardError
from regard.files.write import replacing

WIDTH, ROW, MARGIN = 8.0, 0.24, 1.4  # inches
OURS, THEIRS = "#1b7f4d", "#8a94a6"


def require() -> None:
    """Say so if there is no matplotlib.

    Raises:
        RegardError: there is none.

    >>> if importlib.util.find_spec("matplotlib"):
    ...     require()
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RegardError("--plot needs matplotlib: pip install 'regard[plot]'")


def draw(found: Sequence[Measured], path: Path, title: str) -> None:
    """Write an SVG: a bar for each peer that was timed, from 1 to its time by ours, on a
    logarithmic axis.

    The same results give the same file.

    Raises:
        RegardError: there is no matplotlib, or nothing was timed.
    """
    require()
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    bars = _bars(found)
    if not bars:
        raise RegardError("--plot has nothing to draw: nothing was timed")
    with rc_context({"svg.hashsalt": "regard", "svg.fonttype": "none"}):
        figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(bars)), layout="constrained")
        FigureCanvasSVG(figure)
        _fill(figure.subplots(), bars, title)
        with replacing(path) as place:
            figure.savefig(place, format="svg", metadata={"Date": None})


def _bars(found: Sequence[Measured]) -> list[tuple[str, float, str]]:
    """Label, ratio and its words of every row that was timed beside ours; the first of a case names
    the case.
    """
    bars = []
    for one in found:
        rows = [row for row in one.rows if row.ratio is not None and row.seconds is not None]
        for i, row in enumerate(rows):
            assert row.ratio is not None
            assert row.seconds is not None
            case = f"{one.case}, {one.dtype_name}   " if i == 0 else ""
            words = f"{row.ratio:.2f}x, {1e3 * row.seconds:.3g} ms"
            bars.append((f"{case}{row.peer}", row.ratio, words))
    return bars


def _fill(axes: Any, bars: Sequence[tuple[str, float, str]], title: str) -> None:
    """Bars begin at 1, ours: a logarithmic axis has no other place to begin."""
    labels, ratios, words = zip(*bars, strict=True)
    places = range(len(bars))
    axes.barh(places, [ratio - 1 for ratio in ratios], left=1, color=THEIRS)
    for place, (ratio, word) in enumerate(zip(ratios, words, strict=True)):
        axes.text(max(ratio, 1) * 1.05, place, word, va="center", fontsize=7)
    axes.axvline(1, color=OURS, linewidth=1.5)
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *ratios) * 0.9, max(2.0, *ratios) * 3)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time, ours is 1; further right is slower")
    axes.set_title(title, fontsize=9)
