"""Lines over a plane with plain or logarithmic axes, as one SVG without a script."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.foreign import inert
from regard.view import chart, palette
from regard.view.chart import MARKS, ROLES, symbol

WIDE, HIGH = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 76, 54
KEYS = 4
"""Names of lines that stand beside each other."""

MARKED = 24
"""Marks of a line, at most."""

Point = tuple[float, float]
Place = Callable[[float], float]


@dataclass(frozen=True)
class Line:
    """Points of one series, in the order of x.

    >>> Line("full", ((1.0, 2.0), (2.0, 8.0))).name
    'full'
    """

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Picture:
    """Lines with their axes.

    Attributes:
        title, x, y: words above, below and beside.
        lines: what is drawn; the points that a logarithmic axis has no place for are left out.
        log: "", "x", "y" or "xy": the axes that are logarithmic.
        edge: an x from which on the ground is shaded, such as the trained length; None is none.

    >>> Picture("work", "n", "seconds", (Line("full", ((1.0, 1.0), (2.0, 4.0))),), "xy").drawable
    True
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: str = ""
    edge: float | None = None

    @property
    def drawable(self) -> bool:
        """Whether there is a point to draw."""
        return any(self.shown(line) for line in self.lines)

    def shown(self, line: Line) -> list[Point]:
        """The points of a line that the axes have a place for."""
        return [
            p
            for p in line.points
            if all(map(math.isfinite, p))
            and all(v > 0 for v, axis in zip(p, "xy", strict=True) if axis in self.log)
        ]

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
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


def svg(picture: Picture, *, alone: bool = True) -> str:
    """A line per series, told apart by colour and by mark.

    Args:
        picture: what is drawn; without any point it is an empty frame.
        alone: whether it brings its colours along, for a file of its own.

    >>> one = Picture("work", "n", "seconds", (Line("full", ((1.0, 1.0), (2.0, 4.0))),), "xy")
    >>> svg(one).count("<circle")
    3
    """
    points = [p for line in picture.lines for p in picture.shown(line)] or [(1.0, 1.0)]
    across = _scale([p[0] for p in points], "x" in picture.log, LEFT, WIDE - RIGHT)
    up = _scale([p[1] for p in points], "y" in picture.log, HIGH - BOTTOM, _top(picture))
    box = f'viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" role="img"'
    parts = [f'<svg class="chart" xmlns="{chart.SVG}" {box} aria-label="{_safe(picture.title)}">']
    if alone:
        parts.append(f"<style>{palette.css()}{chart.css()}</style>")
        parts.append(f'<rect class="paper" width="{WIDE}" height="{HIGH}" rx="8"/>')
    parts += [*_edge(picture, across), *_ticks(across, up), *_words(picture)]
    for i, line in enumerate(picture.lines):
        places = [(across.place(x), up.place(y), x, y) for x, y in picture.shown(line)]
        parts += _line(
            line.name, places, ROLES[i % len(ROLES)], MARKS[i % len(MARKS)], dashed=i >= len(ROLES)
        )
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    place: Place
    ticks: Sequence[float]


def _scale(values: Sequence[float], log: bool, start: float, end: float) -> _Scale:  # noqa: FBT001
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
        low, high = (low, high) if high - low > 0.1 else (low - 0.05, high + 0.05)
        decades = [10.0**e for e in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
        ticks = decades[:: max(1, len(decades) // 6)]
        if len(ticks) < 3:
            ticks = [10 ** (low + (high - low) * i / 4) for i in range(5)]

        def place(value: float) -> float:
            return start + (end - start) * (math.log10(value) - low) / (high - low)

        return _Scale(place, ticks)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * (1 - 1e-9))
    count = math.floor((high - low) / step) + 2
    ticks = [math.ceil(low / step) * step + i * step for i in range(count)]
    ticks = [tick for tick in ticks if tick <= high + 1e-9 * step]

    def along(value: float) -> float:
        return start + (end - start) * (value - low) / (high - low)

    return _Scale(along, ticks)


def _ticks(across: _Scale, up: _Scale) -> Iterator[str]:
    for tick in up.ticks:
        y = up.place(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    for tick in across.ticks:
        x = across.place(tick)
        yield (
            f'<text x="{x:.1f}" y="{HIGH - BOTTOM + 20}" '
            f'text-anchor="middle">{_number(tick)}</text>'
        )


def _top(picture: Picture) -> int:
    """Where the plane begins: below the names of all lines, of which two rows have room in any
    case.
    """
    return TOP + 14 * max(0, -(-len(picture.lines) // KEYS) - 2)


def _edge(picture: Picture, across: _Scale) -> Iterator[str]:
    if picture.edge is None:
        return
    x = min(max(across.place(picture.edge), LEFT), WIDE - RIGHT)
    top = _top(picture)
    high = HIGH - top - BOTTOM
    yield (
        f'<rect class="beyond" x="{x:.1f}" y="{top}" width="{WIDE - RIGHT - x:.1f}" '
        f'height="{high}"/>'
    )
    yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{HIGH - BOTTOM}"/>'


def _words(picture: Picture) -> Iterator[str]:
    yield f'<text class="ink" x="16" y="22">{_safe(picture.title)}</text>'
    middle = (LEFT + WIDE - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{HIGH - 12}" text-anchor="middle">{_safe(picture.x)}</text>'
    yield f'<text x="{LEFT}" y="{_top(picture) - 8}" text-anchor="start">{_safe(picture.y)}</text>'
    for i, line in enumerate(picture.lines):
        row, column = divmod(i, KEYS)
        x, y = 22 + 174 * column, 38 + 14 * row
        yield symbol(MARKS[i % len(MARKS)], ROLES[i % len(ROLES)], x, y, "")
        yield f'<text x="{x + 10}" y="{y + 4}">{_safe(line.name)}</text>'


def _line(
    name: str,
    places: Sequence[tuple[float, float, float, float]],
    role: str,
    mark: str,
    *,
    dashed: bool,
) -> Iterator[str]:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    yield f'<polyline class="{role}" points="{joined}"{dash}/>'
    # marks tell lines apart; on many points they would hide them
    for x, y, *at in places[:: -(-len(places) // MARKED)] if places else ():
        yield symbol(mark, role, x, y, _safe(f"{name}: {_number(at[0])}, {_number(at[1])}"))


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.2g}".replace("e+0", "e")


def _safe(text: str) -> str:
    return html.escape(inert(text))
