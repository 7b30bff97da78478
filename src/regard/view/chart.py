"""Shares right against the length of the source: a chart as SVG, and bars for a terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from regard.foreign import inert
from regard.view import palette, text
from regard.view.text import style

WIDE, HIGH = 720, 380
SVG = "http://www.w3.org/2000/svg"
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 52, 52
ROLES = ("q", "k", "v", "s", "z")
MARKS = ("circle", "square", "diamond", "triangle", "circle")
"""Series differ by colour and by mark."""

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Point:
    """The share right among sources of `low` to `high` tokens, and the interval in which the true
    share lies.

    >>> Point(1, 4, 0.5, (0.4, 0.6), 100).middle
    2.5
    """

    low: int
    high: int
    share: float
    interval: tuple[float, float]
    examples: int

    @property
    def middle(self) -> float:
        """Where it stands."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Series:
    """One model's points, in the order of length.

    >>> Series("lstm", (Point(1, 4, 0.5, (0.4, 0.6), 100),)).name
    'lstm'
    """

    name: str
    points: tuple[Point, ...]


def svg(series: Sequence[Series], trained: int, title: str, *, alone: bool = True) -> str:
    """A line per series; behind `trained`, the longest source in training, the ground is shaded.

    >>> one = Series("lstm", (Point(1, 4, 1.0, (0.9, 1.0), 100), Point(5, 8, 0.5, (0.4, 0.6), 100)))
    >>> svg([one], 4, "translate").count("<circle")
    3
    """
    longest = max(point.high for line in series for point in line.points)
    end = max(longest, trained)

    def x(length: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (length - 0.5) / end

    box = f'viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" role="img"'
    parts = [f'<svg class="chart" xmlns="{SVG}" {box} aria-label="{html.escape(inert(title))}">']
    if alone:
        parts.append(f"<style>{palette.css()}{css()}</style>")
        parts.append(f'<rect class="paper" width="{WIDE}" height="{HIGH}" rx="8"/>')
    parts += [
        *(_ground(x(trained + 0.5)) if longest > trained else ()),
        *_axes(end, trained, x, title),
    ]
    for i, line in enumerate(series):
        parts += _line(line, ROLES[i % len(ROLES)], MARKS[i % len(MARKS)], x)
    return "\n".join([*parts, *_names(series), "</svg>"])


def css() -> str:
    """The classes that the chart uses.

    >>> ".chart" in css()
    True
    """
    roles = "".join(
        f".chart .{r}{{stroke:var(--{r});fill:var(--{r})}}.chart polyline.{r}{{fill:none}}"
        for r in ROLES
    )
    return (
        ".chart text{font:13px system-ui,'Noto Sans',sans-serif;fill:var(--soft)}"
        ".chart text.ink{fill:var(--ink);font-weight:600;font-size:14px}.chart "
        ".grid{stroke:var(--line)}"
        ".chart .beyond{fill:var(--hint)}.chart .limit{stroke:var(--soft);stroke-dasharray:4 4}"
        ".chart polyline{stroke-width:2.5;stroke-linejoin:round}.chart "
        ".whisker{stroke-width:1.5;opacity:.55}"
        f".paper{{fill:var(--card)}}{roles}\n"
    )


def lines(series: Series, trained: int, width: int = 36) -> Iterator[Text]:
    """A bar per bin, with its share, its interval and how many examples it has.

    >>> for line in lines(Series("lstm", (Point(1, 4, 0.5, (0.4, 0.6), 100),)), 4, 4): print(line.plain)
         tokens  right                examples
         1 - 4   ██    50.0% ( 40 to  60)  100
    """
    yield Text(f"     tokens  {'right':<{width}}                examples", "dim")
    beyond = False
    for point in series.points:
        if point.low > trained and not beyond:
            beyond = True
            yield Text(f"  {'longer than trained':─^{width + 37}}", "dim")
        low, high = (f"{100 * share:3.0f}" for share in point.interval)
        yield Text.assemble(
            f"  {point.low:>4} - {point.high:<4}",
            (text.bar(point.share, width), style("k" if beyond else "q")),
            (f" {100 * point.share:5.1f}%", "bold"),
            (f" ({low} to {high}){point.examples:>9}", "dim"),
        )


def _ground(x: float) -> Iterator[str]:
    """What is longer than trained."""
    high = HIGH - TOP - BOTTOM
    yield (
        f'<rect class="beyond" x="{x:.1f}" y="{TOP}" width="{WIDE - RIGHT - x:.1f}" '
        f'height="{high}"/>'
    )
    yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}"/>'
    yield (
        f'<text x="{(x + WIDE - RIGHT) / 2:.1f}" y="{HIGH - 10}" text-anchor="middle">longer '
        "than trained</text>"
    )


def _axes(end: int, trained: int, x: Scale, title: str) -> Iterator[str]:
    for percent in range(0, 101, 25):
        y = _y(percent / 100)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if end / s <= 12)
    for length in range(step, end + 1, step):
        yield (
            f'<text x="{x(length):.1f}" y="{HIGH - BOTTOM + 20}" '
            f'text-anchor="middle">{length}</text>'
        )
    middle = (LEFT + x(trained + 0.5)) / 2
    yield f'<text x="{middle:.1f}" y="{HIGH - 10}" text-anchor="middle">tokens of the source</text>'
    yield f'<text class="ink" x="{LEFT}" y="20">{html.escape(inert(title))}</text>'


def _line(series: Series, role: str, mark: str, x: Scale) -> Iterator[str]:
    places = [(x(p.middle), _y(p.share), p) for p in series.points]
    for left, _, p in places:
        low, high = (_y(share) for share in p.interval)
        yield (
            f'<line class="whisker {role}" x1="{left:.1f}" x2="{left:.1f}" y1="{low:.1f}" '
            f'y2="{high:.1f}"/>'
        )
    joined = " ".join(f"{left:.1f},{y:.1f}" for left, y, _ in places)
    yield f'<polyline class="{role}" points="{joined}"/>'
    for left, y, p in places:
        text = f"{series.name}, {p.low} to {p.high} tokens: {100 * p.share:.1f} % of {p.examples}"
        yield symbol(mark, role, left, y, html.escape(inert(text)))


def _names(series: Sequence[Series]) -> Iterator[str]:
    """Which mark is which series, under the title."""
    left = float(LEFT)
    for i, line in enumerate(series):
        yield symbol(MARKS[i % len(MARKS)], ROLES[i % len(ROLES)], left + 6, 34, "")
        yield f'<text x="{left + 17:.1f}" y="38">{html.escape(inert(line.name))}</text>'
        left += 40 + 7.4 * len(line.name)


def symbol(mark: str, role: str, x: float, y: float, title: str) -> str:
    """One mark of `MARKS` at a place, with a title (escaped already) for whoever points at it.

    >>> symbol("circle", "q", 1, 2, "")
    '<circle class="q" cx="1.0" cy="2.0" r="4.5"></circle>'
    """
    said = f"<title>{title}</title>" if title else ""
    if mark == "circle":
        return f'<circle class="{role}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{said}</circle>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)),
        "triangle": ((0, -5.5), (5.5, 4), (-5.5, 4)),
    }[mark]
    joined = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="{role}" points="{joined}">{said}</polygon>'


def _y(share: float) -> float:
    return HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * share
