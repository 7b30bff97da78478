"""A block diagram of attention as SVG: one head with its steps, and several heads that are
joined and projected.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from regard.units import plural
from regard.view import palette

HEAD = (
    ("q · k", "s"),
    ("/ sqrt(d)", "s"),
    ("mask", "s"),
    ("softmax", "s"),
    ("weights times v", "z"),
)
"""The steps of one head from bottom to top, with the role that colours each."""

WIDE, HIGH, STEP, BOX = 720, 500, 62, 168


def svg(heads: int = 3) -> str:
    """Draw one head on the left, and several heads with their inputs, join and output on the right.

    >>> svg().count("softmax"), svg(4).count("weights times v")
    (4, 5)
    """
    rows = HIGH - 96
    parts = [
        (
            f'<svg class="blocks" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" '
            f'width="{WIDE}" '
            f'height="{HIGH}" role="img" aria-label="Scaled dot-product attention, and several '
            'heads of it">'
        ),
        f"<style>{palette.css()}{_css()}</style>",
        f'<rect class="paper" width="{WIDE}" height="{HIGH}" rx="8"/>',
        _text(116, 28, "one head", "ink"),
        _text(470, 28, f"{plural(heads, 'head')}, each with its own projections", "ink"),
        *_column(32, rows, HEAD, BOX),
        *_inputs(32, rows + 44, BOX),
    ]
    width = (WIDE - 300) // heads - 12
    lefts = [280 + i * (width + 12) for i in range(heads)]
    for left in lefts:
        parts += _column(left, rows, HEAD, width)
        parts += _inputs(left, rows + 44, width)
    middle = (lefts[0] + lefts[-1] + width) / 2
    top = rows - len(HEAD) * STEP
    parts += [_arrow(left + width / 2, top + 26, middle, top - 6) for left in lefts]
    parts += [
        *_box(middle - 110, top - 38, 220, "concat, output projection", "z"),
        _arrow(middle, top - 38, middle, top - 56),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _column(
    left: float, bottom: float, steps: Sequence[tuple[str, str]], width: float
) -> Iterator[str]:
    """Generate the steps of a head, one above the other; v bypasses the scores on the right."""
    narrow = 2 * width / 3
    for i, (name, role) in enumerate(steps):
        y = bottom - (i + 1) * STEP + 26
        yield from _box(left, y, width if i == len(steps) - 1 else narrow, name, role)
        if i:
            yield _arrow(left + narrow / 2, y + STEP, left + narrow / 2, y + 32)
    yield _arrow(left + 5 * width / 6, bottom + 44, left + 5 * width / 6, y + 32)


def _inputs(left: float, y: float, width: float) -> Iterator[str]:
    """Generate the three projections of x below a head."""
    third = width / 3
    for i, name in enumerate("qkv"):
        yield from _box(left + i * third + 2, y, third - 4, name, name)
        if name != "v":
            yield _arrow(left + (i + 0.5) * third, y, left + (i + 0.5) * third, y - 48)
    yield _text(left + width / 2, y + 48, "three projections of x", "soft")


def _box(left: float, top: float, width: float, name: str, role: str) -> Iterator[str]:
    yield (
        f'<rect class="{role}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="32" '
        'rx="6"/>'
    )
    yield _text(left + width / 2, top + 21, name, "ink")


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<path class="arrow" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'
        f'<circle class="tip" cx="{to_x:.1f}" cy="{to_y:.1f}" r="2.5"/>'
    )


def _text(x: float, y: float, text: str, tone: str) -> str:
    return (
        f'<text class="{tone}" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="middle">{html.escape(text)}</text>'
    )


def _css() -> str:
    roles = "".join(f".blocks rect.{r}{{stroke:var(--{r})}}" for r in "qkvsz")
    return (
        ".blocks text{font:13px system-ui,'Noto Sans',sans-serif;fill:var(--ink)}.blocks "
        "text.soft{fill:var(--soft)}"
        ".blocks rect{fill:var(--hint);stroke-width:1.5}.blocks "
        "rect.paper{fill:var(--card);stroke:none}"
        f".blocks .arrow{{stroke:var(--soft);stroke-width:1.5;fill:none}}.blocks "
        f".tip{{fill:var(--soft)}}{roles}\n"
    )
