"""What an audit looks at: some rows of a step, as recorded, in fp64, and in plain math of the
recorded dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.inspect.kept import Step
from regard.inspect.place import Ingredients, Place

PLAINS = 4
"""In so many orders the same sums are added in plain math: one alone may be right by luck."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Some rows of a step. first: the number of their first row in the place; own: which of the
    step's they are.

    made: what the scores are made of, fp64. values: [B,h,s,E] or None.
    """

    place: Place
    step: Step
    first: int
    own: slice
    made: Ingredients
    values: Tensor | None

    @property
    def rows(self) -> int:
        """How many."""
        return int(self.own.stop - self.own.start)

    @property
    def lse(self) -> Tensor:
        """As recorded [B,h,t]."""
        return self.step.lse[:, :, self.own]

    @property
    def out(self) -> Tensor | None:
        """As recorded [B,h,t,E]; None if it was not kept, or cannot be told from the weights,
        because of dropout.
        """
        if self.step.out is None or self.values is None or self.step.dropout:
            return None
        return self.step.out[:, :, self.own]

    @cached_property
    def true_lse(self) -> Tensor:
        """ln sum_j exp(s_ij), fp64; where an edit replaced the scores, of what it put there."""
        if self.step.scores is not None:
            return lse_of(self.step.scores[:, :, self.own].double())
        return lse_of(self.made.scores(self.step.scale, self.step.softcap))

    @cached_property
    def true_out(self) -> Tensor | None:
        """sum_j p_ij v_j, fp64; NaN where a visible value is not finite: nothing is asked of such a
        row.
        """
        if self.step.edited:
            return _mixed(self, torch.float64)
        return self.output(self.made.scores(self.step.scale, self.step.softcap), self.step.sink)

    def output(self, s: Tensor, sink: Tensor | None) -> Tensor | None:
        """The output of scores, with or without a sink; 0 for a row that sees nothing."""
        if self.values is None:
            return None
        v = self.values.double()
        odd = ~v.isfinite().all(-1)  # [B,h,s]
        seen = (~s.isneginf() & odd[:, :, None]).any(-1)
        whole = lse_of(s)
        if sink is not None:
            whole = torch.logaddexp(whole, sink.double()[:, None])
        p = torch.exp(s - whole.masked_fill(whole.isneginf(), math.inf)[..., None])
        out = p.masked_fill(s.isneginf(), 0) @ v.masked_fill(odd[..., None], 0)
        return out.masked_fill(seen[..., None], math.nan)

    def row(self, wrong: Tensor) -> int:
        """The first row of the place where a bool [B,h,t] is True."""
        return self.first + int(wrong.any(0).any(0).nonzero()[0])

    @cached_property
    def _plain(self) -> list[tuple[Tensor, Tensor | None]]:
        return [_plain(self, order) for order in range(PLAINS)]

    @cached_property
    def rounding(self) -> float:
        """Two roundings, in the precision of a score, at the size of the terms that scores add up,
        or of the lse.
        """
        pool, kind = self.place.pools[self.step.pool], self.lse.dtype
        k = self.place.keys(self.step)[:, [pool.at(h, self.place.H) for h in self.place.heads]]
        q = self.step.q[:, :, self.own]
        size = abs(self.step.scale) * (q.to(kind).abs() @ k.to(kind).abs().mT)
        size = size if self.made.bias is None else size + self.made.bias.abs()
        size = size if self.step.scores is None else self.step.scores[:, :, self.own].to(kind).abs()
        seen = size.masked_fill(~self.made.visible | ~size.isfinite(), 0)
        lse = self.true_lse.abs()
        largest = _largest(seen) + _largest(lse.masked_fill(~lse.isfinite(), 0))
        return 2 * torch.finfo(kind).eps * largest

    @cached_property
    def rounding_of_output(self) -> float:
        """What these roundings of scores do to an output: as much of the mean |v|."""
        if self.values is None:
            return 0.0
        v = self.values.double().abs()
        return self.rounding * _largest(v.masked_fill(~v.isfinite(), 0))

    @property
    def plain_lse(self) -> list[Tensor]:
        """In plain math, in several orders."""
        return [lse for lse, _ in self._plain]

    @property
    def plain_out(self) -> list[Tensor]:
        """In plain math, in several orders."""
        return [out for _, out in self._plain if out is not None]


def gather(place: Place, number: int, own: slice) -> Evidence:
    """The evidence of some rows of a step."""
    step, heads = place.steps[number], place.heads
    made = place.ingredients(step, own, slice(0, len(step.columns)), heads)
    made = made._replace(visible=made.visible.expand(made.dot.shape))
    v = place.values(step)
    if v is not None:
        pool = place.pools[step.pool]
        v = v[:, [pool.at(head, place.H) for head in heads]]
    return Evidence(place, step, place.start(number) + own.start, own, made, v)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def lse_of(s: Tensor) -> Tensor:
    """ln sum_j exp(s_ij) [..., t]; -inf for a row that sees nothing."""
    return torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)


def _mixed(e: Evidence, dtype: torch.dtype) -> Tensor | None:
    """sum_j p_ij v_j with the weights that an edit left, in a dtype; NaN where a value that has
    weight is not finite.
    """
    if e.values is None:
        return None
    p = e.place.part(e.step, e.own, slice(0, len(e.step.columns)), e.place.heads).weights.to(dtype)
    odd = ~e.values.isfinite()
    out = p @ e.values.to(dtype).masked_fill(odd, 0)
    return out.masked_fill((p @ odd.any(-1, keepdim=True).to(dtype)) > 0, math.nan)


def _plain(e: Evidence, order: int) -> tuple[Tensor, Tensor | None]:
    """(lse, out) by matmul and exp in the dtype of q, over keys and dimensions in another order
    each time.
    """
    step, place = e.step, e.place
    if step.edited:
        lse = e.true_lse.to(step.lse.dtype)
        return lse, None if e.out is None else _mixed(e, e.out.dtype)
    pool = place.pools[step.pool]
    q, k = step.q[:, :, e.own], place.keys(step)[:, [pool.at(h, place.H) for h in place.heads]]
    draw = torch.Generator().manual_seed(order)
    keys, dims = (
        torch.randperm(n, generator=draw) if order else torch.arange(n)
        for n in (k.shape[2], k.shape[3])
    )
    s = (q[..., dims] * step.scale) @ k[:, :, keys][..., dims].mT
    if step.softcap is not None:
        s = step.softcap * torch.tanh(s / step.softcap)
    if e.made.bias is not None:
        s = s + e.made.bias[..., keys].to(s.dtype)
    s = s.masked_fill(~e.made.visible[..., keys], -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    top = top.masked_fill(top.isneginf(), 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    blind = total == 0
    lse = (top + total.masked_fill(blind, 1).log()).masked_fill(blind, -math.inf)[..., 0]
    if e.out is None or e.values is None:
        return lse, None
    v = e.values[:, :, keys]
    v = v.masked_fill(~v.isfinite(), 0)
    if step.sink is not None:
        sink = step.sink.to(s.dtype)[:, None, None]
        higher = torch.maximum(top.masked_fill(blind, -math.inf), sink)
        p = torch.exp(s - higher)
        total = p.sum(-1, keepdim=True) + torch.exp(sink - higher)
    return lse, p / total.masked_fill(total == 0, 1) @ v
