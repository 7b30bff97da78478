"""Costs against quality as an SVG: a mark for each mechanism, and the line of those that no other
beats.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.foreign import inert
from regard.view import palette

WIDE, HIGH = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 92, 40, 52
SVG = "http://www.w3.org/2000/svg"
LINE = 13.0
"""Pixels between two names, one above the other."""


@dataclass(frozen=True)
class Mark:
    """A mechanism: where it stands, the span of y over seeds, and whether it is on the front.

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
    """A title, a scale, and the words of its numbers.

    unit: "bytes" (powers of two, KiB), "seconds" (1, 2, 5 on a logarithmic scale), "bits" or
        "share" (linear).

    >>> Axis("cache", "bytes").words(2048.0)
    '2 KiB'
    """

    title: str
    unit: str

    @property
    def logarithmic(self) -> bool:
        """Costs are; quality is not."""
        return self.unit in ("bytes", "seconds")

    def words(self, value: float) -> str:
        """A number of the scale as text."""
        if self.unit == "share":
            return f"{100 * value:g} %"
        if self.unit == "bits":
            return f"{value:.4g}"
        steps = (
            ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
            if self.unit == "bytes"
            else ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
        )
        size, name = next(((s, n) for s, n in steps if value >= 0.999 * s), steps[-1])
        return f"{value / size:.3g} {name}"

    def ticks(self, low: float, high: float) -> list[float]:
        """Round numbers from low to high.

        >>> Axis("", "share").ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        if self.unit == "bytes":
            first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
            every = max(1, -(-(last - first) // 6))
            return [2.0**n for n in range(first, last + 1, every)]
        if self.unit == "seconds":
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            many = [m * 10.0**n for n in powers for m in (1, 2, 5)]
            return [x for x in many if low <= x * (1 + 1e-9) and x <= high * (1 + 1e-9)]
        rough = (high - low) / 5 or 1.0
        ten = 10.0 ** math.floor(math.log10(rough))
        step = next(m * ten for m in (1, 2, 5, 10) if m * ten >= rough * (1 - 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def svg(marks: Sequence[Mark], x: Axis, y: Axis, title: str, *, alone: bool = True) -> str:
    """The chart; empty without marks.

    Args:
        marks: the mechanisms; x must be positive.
        x, y: the axes; less cost stands on the left.
        title: above it.
        alone: whether it carries its style: a page has that once.

    >>> one = Mark("mqa", 1024.0, 2.5, (2.5, 2.5), front=True)
    >>> svg([one], Axis("cache", "bytes"), Axis("loss", "bits"), "text").count("<circle")
    1
    """
    if not marks:
        return ""
    at_x = _scale(x, [m.x for m in marks], LEFT, WIDE - RIGHT)
    at_y = _scale(y, [v for m in marks for v in (m.y, *m.span)], HIGH - BOTTOM, TOP)
    box = f'viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" role="img"'
    parts = [f'<svg class="scatter" xmlns="{SVG}" {box} aria-label="{_safe(title)}">']
    if alone:
        parts.append(f"<style>{palette.css()}{css()}</style>")
        parts.append(f'<rect class="paper" width="{WIDE}" height="{HIGH}" rx="8"/>')
    parts += [*_grid(x, y, at_x, at_y, title), *_front(marks, at_x, at_y)]
    for mark in marks:
        parts += _mark(mark, x, y, at_x, at_y)
    return "\n".join([*parts, *_names(marks, at_x, at_y), "</svg>"])


def css() -> str:
    """The classes that the chart uses.

    >>> ".scatter" in css()
    True
    """
    return (
        ".scatter text{font:12px system-ui,'Noto Sans',sans-serif;fill:var(--soft)}"
        ".scatter text.ink{fill:var(--ink);font-weight:600;font-size:14px}.scatter "
        "text.name{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:3px}"
        ".scatter .grid{stroke:var(--line)}.scatter .front{stroke:var(--q);fill:var(--q)}"
        ".scatter .rest{stroke:var(--soft);fill:var(--card)}.scatter "
        "polyline{stroke:var(--q);stroke-width:2;"
        "stroke-dasharray:5 4;fill:none;opacity:.7}.scatter "
        ".span{stroke-width:1.5;opacity:.6}.paper{fill:var(--card)}\n"
    )


class _Scale:
    """Values to pixels."""

    def __init__(self, axis: Axis, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end
        self._by = math.log if axis.logarithmic else float

    def __call__(self, value: float) -> float:
        low, high, at = (self._by(v) for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    """With some room around the values; shares end at 0 and 1."""
    low, high = min(values), max(values)
    if axis.logarithmic:
        room = max((high / low) ** 0.08, 1.3)
        return _Scale(axis, low / room, high * room, start, end)
    if axis.unit == "share":
        return _Scale(axis, 0.0, 1.0, start, end)
    room = 0.08 * (high - low) or max(abs(high) * 0.05, 0.05)
    return _Scale(axis, low - room, high + room, start, end)


def _grid(x: Axis, y: Axis, at_x: _Scale, at_y: _Scale, title: str) -> Iterator[str]:
    right, bottom = WIDE - RIGHT, HIGH - BOTTOM
    for value in y.ticks(at_y.low, at_y.high):
        at = at_y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y.words(value)}</text>'
    for value in x.ticks(at_x.low, at_x.high):
        at = at_x(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{x.words(value)}</text>'
    middle, high = (LEFT + right) / 2, (TOP + bottom) / 2
    yield f'<text x="{middle:.1f}" y="{HIGH - 12}" text-anchor="middle">{_safe(x.title)}</text>'
    turn = f'transform="rotate(-90 14 {high:.1f})"'
    yield f'<text x="14" y="{high:.1f}" text-anchor="middle" {turn}>{_safe(y.title)}</text>'
    yield f'<text class="ink" x="{LEFT}" y="22">{_safe(title)}</text>'


def _front(marks: Sequence[Mark], at_x: _Scale, at_y: _Scale) -> Iterator[str]:
    best = sorted((m.x, m.y) for m in marks if m.front)
    if len(best) > 1:
        joined = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in best)
        yield f'<polyline points="{joined}"/>'


def _mark(mark: Mark, x: Axis, y: Axis, at_x: _Scale, at_y: _Scale) -> Iterator[str]:
    kind, left = "front" if mark.front else "rest", at_x(mark.x)
    low, high = mark.span
    if low < high:
        yield (
            f'<line class="span {kind}" x1="{left:.1f}" x2="{left:.1f}" y1="{at_y(low):.1f}" '
            f'y2="{at_y(high):.1f}"/>'
        )
    said = f"{mark.name}: {x.words(mark.x)}, {y.words(mark.y)}" + (
        ", on the front" if mark.front else ""
    )
    yield (
        f'<circle class="{kind}" cx="{left:.1f}" cy="{at_y(mark.y):.1f}" '
        f'r="5"><title>{_safe(said)}</title></circle>'
    )


def _names(marks: Sequence[Mark], at_x: _Scale, at_y: _Scale) -> Iterator[str]:
    """On the right of each mark, and below one that would lie under it."""
    placed: list[tuple[float, float, float]] = []
    for mark in sorted(marks, key=lambda m: at_y(m.y)):
        left, top = at_x(mark.x) + 9, at_y(mark.y) + 4
        wide = 7.0 * len(mark.name)
        for other, other_wide, y in placed:
            apart = left > other + other_wide or other > left + wide
            if not apart and abs(y - top) < LINE:
                top = y + LINE
        placed.append((left, wide, top))
        yield f'<text class="name" x="{left:.1f}" y="{top:.1f}">{_safe(mark.name)}</text>'


def _safe(text: str) -> str:
    return html.escape(inert(text))
