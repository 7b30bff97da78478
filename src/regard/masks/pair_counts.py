"""How many pairs of a text a mask leaves visible, without looking at every pair.

A rule with period P gives the same answer after both positions move by P (1 for distances, the size
for blocks), so that P rows give the sum.
"""

from __future__ import annotations

import math

import torch

from regard.masks.base import And, Mask, Not, Or
from regard.masks.patterns import Causal, Chunk, Dilated, Full, Strided, Window
from regard.span import Span


def period(mask: Mask) -> int | None:
    """Return the number of positions by which a query and a key may move together."""
    if isinstance(mask, Full | Causal | Window | Dilated):
        return 1
    if isinstance(mask, Strided):
        return 1 if mask.fixed is None else mask.stride
    if isinstance(mask, Chunk):
        return mask.size
    if not isinstance(mask, And | Or | Not):
        return None
    periods = [period(member) for member in mask.members()]
    known = [P for P in periods if P is not None]
    return math.lcm(*known) if len(known) == len(periods) else None


def count_pairs(mask: Mask, n: int) -> int:
    """Count the visible pairs of the first n positions, in the head that has the most."""
    P = period(mask)
    has_ranges = mask.intervals(Span(0, 1)) is not None  # counted from the bounds of each row
    if P is None or has_ranges or n <= 2 * P:
        return int(mask.visible(Span(0, n), Span(0, n)).sum(-1).max())
    start = -(-n // P) * P
    distances = torch.arange(
        n - 1, -n, -1, device="cpu"
    )  # of the keys start - n + 1, ..., start + n - 1
    first, end = distances.clamp(min=0), (n + distances).clamp(max=n)
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for r in range(P):
        keys = Span(start + r - n + 1, 2 * n - 1)
        sees = mask.block(Span(start + r, 1), keys).reshape(-1, keys.length)
        queries = (end - r + P - 1) // P - (first - r + P - 1) // P
        total = total + (sees * queries).sum(-1)
    return int(total.max())
