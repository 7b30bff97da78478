"""Lists of half-open ranges of key positions, one list per query, and their algebra: intersect, unite, complement.

A list is *tidy* when its ranges are disjoint, sorted and its empty ranges (start = stop = FAR) stand last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

FAR = 1 << 62
"""Past every key position: the stop of a range without an end."""


class Intervals(NamedTuple):
    """n half-open ranges of key positions per query; a range is empty where start >= stop.

    starts, stops: int64 [B or 1, H or 1, t, n].
    """

    starts: Int[Tensor, "#B #H t n"]
    stops: Int[Tensor, "#B #H t n"]


def tidy(raw: Intervals) -> Intervals:
    """The same sets of positions >= 0 as disjoint sorted ranges; columns that are empty for every query are dropped.

    With ranges sorted by start, start_i = max(start_i, stop_0, ..., stop_{i-1}) removes what earlier ranges cover.

    >>> tidy(Intervals(torch.tensor([[[[2, -3, 7]]]]), torch.tensor([[[[6, 3, 7]]]])))[:2]
    (tensor([[[[0, 3]]]]), tensor([[[[3, 6]]]]))
    """
    starts, stops = _sort(raw.starts.clamp(min=0), raw.stops)
    if starts.shape[-1] > 1:
        before = stops.cummax(-1).values[..., :-1]
        starts = torch.cat([starts[..., :1], torch.maximum(starts[..., 1:], before)], -1)
        starts, stops = _sort(starts, stops)
    used = (starts < stops).flatten(0, 2).any(0)
    n = max(
        int(used.sum()), 1
    )  # empty ranges are last in every row, so the used columns come first
    return Intervals(starts[..., :n], stops[..., :n])


def _sort(starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted by start, empty ranges last as (FAR, FAR)."""
    empty = starts >= stops
    starts, order = starts.masked_fill(empty, FAR).sort(-1)
    return starts, stops.masked_fill(empty, FAR).gather(-1, order)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The positions in both: every range of a against every range of b."""
    starts = torch.maximum(a.starts[..., :, None], b.starts[..., None, :])
    stops = torch.minimum(a.stops[..., :, None], b.stops[..., None, :])
    return tidy(Intervals(starts.flatten(-2), stops.flatten(-2)))


def unite(a: Intervals, b: Intervals) -> Intervals:
    """The positions in either."""
    shape = torch.broadcast_shapes(a.starts.shape[:-1], b.starts.shape[:-1])
    starts, stops = (
        torch.cat([x.expand(*shape, -1), y.expand(*shape, -1)], -1)
        for x, y in zip(a, b, strict=True)
    )
    return tidy(Intervals(starts, stops))


def gaps(a: Intervals) -> Intervals:
    """The positions >= 0 in none of the ranges of a tidy list."""
    zero, far = torch.zeros_like(a.starts[..., :1]), torch.full_like(a.starts[..., :1], FAR)
    return tidy(Intervals(torch.cat([zero, a.stops], -1), torch.cat([a.starts, far], -1)))


def none_for(found: Intervals, rows: Bool[Tensor, "#B t"]) -> Intervals:
    """The same without any position for some of the queries.

    >>> two = Intervals(torch.tensor([[[[0], [0]]]]), torch.tensor([[[[2], [3]]]]))
    >>> (none_for(two, torch.tensor([[True, False]])).starts == FAR).tolist()
    [[[[True], [False]]]]
    """
    at = rows[:, None, :, None]
    return Intervals(*(x.masked_fill(at, FAR) for x in found))


def stack_heads(heads: Sequence[Intervals]) -> Intervals:
    """Lists of one head each, [B or 1, 1, t, n_h], as one list [B or 1, H, t, max n_h]."""
    n = max(head.starts.shape[-1] for head in heads)
    B = max(head.starts.shape[0] for head in heads)

    def join(parts: list[Tensor]) -> Tensor:
        padded = [torch.nn.functional.pad(x, (0, n - x.shape[-1]), value=FAR) for x in parts]
        return torch.cat([x.expand(B, -1, -1, -1) for x in padded], 1)

    return Intervals(join([x.starts for x in heads]), join([x.stops for x in heads]))
