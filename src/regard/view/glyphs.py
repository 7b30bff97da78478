"""Numbers as characters: what a terminal page draws with. Everything reads without colour."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size

from regard.foreign import inert

UP = " ▁▂▃▄▅▆▇█"
DOWN = " ▔▀█"
ACROSS = " ▏▎▍▌▋▊▉█"
SHADES = " ░▒▓█"
STEPS = (0.02, 0.1, 0.3, 0.6)
"""Weights from which on each darker shade is drawn."""
MASKED = "╱"


def shade(weight: float | None) -> str:
    """A glyph as dark as the weight; a hatch where the mask says no (None).

    >>> [shade(p) for p in (None, 0.0, 0.05, 0.2, 0.5, 1.0)]
    ['╱', ' ', '░', '▒', '▓', '█']
    """
    return MASKED if weight is None else SHADES[sum(weight >= step for step in STEPS)]


def bar(share: float, width: int) -> str:
    """A bar of `share` of the width, in eighths of a character, padded to the width.

    >>> bar(0.5, 4), bar(1 / 32, 4)
    ('██  ', '▏   ')
    """
    eighths = 0 if math.isnan(share) else round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (ACROSS[rest] if rest else "")).ljust(width)


def columns(values: Sequence[float], top: float) -> tuple[str, str]:
    """Two rows of one character a value: positive ones stand on the middle line, negative ones hang from it.

    >>> columns([1.0, -1.0, 0.5], top=1.0)
    ('█ ▄', ' █ ')
    """
    shares = [v / top if top else 0.0 for v in values]
    up = "".join(UP[math.ceil(min(max(x, 0.0), 1.0) * 8 - 1e-9)] for x in shares)
    down = "".join(DOWN[math.ceil(min(max(-x, 0.0), 1.0) * 3 - 1e-9)] for x in shares)
    return up, down


def fold(values: Sequence[float], most: int) -> tuple[int, list[float]]:
    """At most `most` values: each the one of largest size among n neighbours -> (n, values).

    >>> fold([1.0, -3.0, 2.0, 0.0], 2)
    (2, [-3.0, 2.0])
    """
    n = max(1, -(-len(values) // most))
    groups = (np.asarray(values[i : i + n]) for i in range(0, len(values), n))
    return n, [float(group[np.abs(group).argmax()]) for group in groups]


def number(x: float | None, width: int = 0) -> str:
    """A number in 4 significant digits, short; None is minus infinity: what a masked score is.

    >>> number(3.14159), number(None), number(-0.00001234), number(12345.678)
    ('3.142', '-∞', '-1.23e-05', '12346')
    """
    if x is None or x == -math.inf:
        return "-∞".rjust(width)
    size = abs(x)
    if size >= 1e6 or (0 < size < 1e-3):
        return f"{x:.2e}".rjust(width)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{x:.{digits}f}".rjust(width)


def weight(p: float, width: int = 0) -> str:
    """A weight in 0..1, to 4 decimals; a smaller one that is not 0 shows as such.

    >>> weight(0.25), weight(0.00001), weight(0.0)
    ('0.2500', '<.0001', '0.0000')
    """
    return ("<.0001" if 0 < p < 5e-5 else f"{p:.4f}").rjust(width)


def cell(text: str, width: int) -> str:
    """Text cut or padded to a width in terminal cells; what is cut ends in an ellipsis.

    >>> cell("abcdef", 4), cell("a", 3)
    ('abc…', 'a  ')
    """
    text = inert(text)
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + "…"


def subscripts(equation: str) -> str:
    """An equation with its `_i`, `_j`, `_ij` as subscripts, where Unicode has them.

    >>> subscripts("s_ij = q_i k_j")
    's\u1d62\u2c7c = q\u1d62 k\u2c7c'
    """
    return re.sub(r"_(ij|i|j)\b", lambda m: m[1].replace("i", "ᵢ").replace("j", "ⱼ"), equation)
