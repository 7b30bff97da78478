"""An alignment, drawn: which words of the source each word that was said looked at. Rows are
queries, columns are keys.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float
from rich.cells import cell_len
from rich.text import Text

from regard.foreign import inert
from regard.view import palette, text
from regard.view.chart import SVG
from regard.view.text import WIDTH, style

STEPS = 16
"""Shades of a weight."""
CELL, GAP = 20, 2
EDGE = 8
LEGEND = 34
TURN = 55  # degrees of the words above the columns
TALL = 0.62  # a letter's width, of its height
FONT = 13
SMALL = 12


def svg(
    weights: Float[np.ndarray, "T S"],
    said: Sequence[str],
    source: Sequence[str],
    *,
    alone: bool = True,
) -> str:
    """An SVG of the weights [T,S]: the colour of a cell is how much its row's word looked at its
    column's word.

    Args:
        weights: each row a distribution.
        said: a word per row.
        source: a word per column.
        alone: carry the colours; a page that has `css()` already needs them not.

    >>> svg(np.eye(2), ["一", "二"], ["one", "two"]).count("<rect class")
    21
    """
    T, S = weights.shape
    left = EDGE * 2 + max(_width(word) for word in said)
    above = max(_width(word) for word in source)
    top = EDGE * 2 + round(above * np.sin(np.radians(TURN)) + FONT * np.cos(np.radians(TURN)))
    # the last column's word leans out to the right
    wide = left + S * CELL + EDGE * 2 + round(_width(source[-1]) * np.cos(np.radians(TURN)))
    wide, high = max(wide, left + 290), top + T * CELL + LEGEND + EDGE
    box = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img"'
    parts = [
        (
            f'<svg class="alignment" xmlns="{SVG}" {box} aria-label="alignment: {T} rows said, {S} '
            'columns of the source">'
        )
    ]
    if alone:
        parts.append(f"<style>{palette.css()}{css()}</style>")
        parts.append(f'<rect class="paper" width="{wide}" height="{high}" rx="8"/>')
    for j, word in enumerate(source):
        x, y = left + j * CELL + CELL * 0.62, top - EDGE * 0.8
        parts.append(
            f'<text class="k" transform="translate({x:.1f} {y:.1f}) '
            f'rotate(-{TURN})">{_safe(word)}</text>'
        )
    for i, word in enumerate(said):
        y = top + i * CELL
        parts.append(
            f'<text class="q" x="{left - EDGE}" y="{y + CELL * 0.7:.1f}" '
            f'text-anchor="end">{_safe(word)}</text>'
        )
        for j, other in enumerate(source):
            p = float(weights[i, j])
            parts.append(
                f'<rect class="w{_step(p)}" x="{left + j * CELL}" y="{y}" width="{CELL - GAP}" '
                f'height="{CELL - GAP}" '
                f'rx="3"><title>{_safe(f"{word} ← {other}: {text.weight(p)}")}</title></rect>'
            )
    parts += [*_scale(left, top + T * CELL + 12), "</svg>"]
    return "\n".join(parts)


def css() -> str:
    """The classes that the drawing uses: a shade per step, light and dark.

    >>> ".w15{" in css()
    True
    """

    def shades(theme: str) -> str:
        stops = palette.WEIGHTS[theme]
        colours = (palette.ramp(stops, i / (STEPS - 1)) for i in range(STEPS))
        return "".join(f".w{i}{{fill:rgb{rgb}}}" for i, rgb in enumerate(colours)).replace(" ", "")

    return (
        f".alignment text{{font:{FONT}px system-ui,'Noto Sans CJK SC','Noto "
        f"Sans',sans-serif;fill:var(--ink)}}"
        f".alignment text.q{{fill:var(--q)}}.alignment text.k{{fill:var(--k)}}"
        f".alignment text.soft{{fill:var(--soft);font-size:{SMALL}px}}.paper{{fill:var(--card)}}"
        f"{shades('light')}@media (prefers-color-scheme:dark){{{shades('dark')}}}\n"
    )


def lines(
    weights: Float[np.ndarray, "T S"], said: Sequence[str], source: Sequence[str], most: int = 33
) -> Iterator[Text]:
    """The alignment for a terminal: two characters a cell, the source by number, as far as there is
    room.

    >>> for line in lines(np.eye(2), ["一", "二"], ["one", "two"]): print(line.plain.rstrip())
      rows were said, columns are the source; blank below 0.02, ░ 0.02+ ▒ 0.1+ ▓ 0.3+ █ 0.6+
      0 one  1 two
                     0 1
                 一 │██  │
                 二 │  ██│
    """
    low = " ".join(
        f"{shade} {step:g}+" for shade, step in zip(text.SHADES[1:], text.STEPS, strict=True)
    )
    yield Text(
        f"  rows were said, columns are the source; blank below {text.STEPS[0]:g}, {low}", "dim"
    )
    numbered = " ".join(f"{j}\u00a0{inert(word)} " for j, word in enumerate(source))
    for part in textwrap.wrap(numbered, WIDTH - 4):
        yield Text("  " + part.replace("\u00a0", " "), style("k"))
    shown = weights[:, :most]
    ruler = "".join(
        f"{j:<2}" if j % 5 == 0 or len(source) < 10 else "  " for j in range(shown.shape[1])
    )
    yield Text(f"{' ' * 17}{ruler}".rstrip(), style("k"))
    for word, row in zip(said, shown, strict=True):
        name = text.cell(inert(word), 12).rstrip()
        pad = 15 - Text(name).cell_len
        cells = "".join(text.shade(float(p)) * 2 for p in row)
        cut = "…" if weights.shape[1] > most else "│"
        yield Text.assemble(
            " " * pad, (name, style("q")), (" │", "dim"), (cells, style("s")), (cut, "dim")
        )


def _scale(x: int, y: int) -> Iterator[str]:
    """What the shades mean, at the foot."""
    yield f'<text class="soft" x="{x}" y="{y + 14}">weight 0</text>'
    start = x + 60
    for i in range(STEPS):
        yield f'<rect class="w{i}" x="{start + 10 * i}" y="{y + 2}" width="10" height="14"/>'
    yield f'<text class="soft" x="{start + 10 * STEPS + 8}" y="{y + 14}">1</text>'


def _step(p: float) -> int:
    return round(min(max(p, 0.0), 1.0) * (STEPS - 1))


def _safe(word: str) -> str:
    return html.escape(inert(word))


def _width(word: str) -> int:
    """About how wide a word is drawn."""
    return round(cell_len(inert(word)) * FONT * TALL) + 2
