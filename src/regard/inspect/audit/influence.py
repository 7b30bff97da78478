"""Which token reaches which output: by changing one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Influence(NamedTuple):
    """Amounts [T,S]: how much output i changes with token j; and the smallest amount that counts as
    a change.
    """

    amount: Tensor
    least: float

    @property
    def seen(self) -> Tensor:
        """bool [T,S]: token j reaches output i."""
        return ~(self.amount <= self.least)  # NaN is an influence

    def worst(self, where: Tensor) -> tuple[int, int, float]:
        """The first output with an influence in `where`, its strongest token, and the amount."""
        amounts = torch.where(where & self.seen, self.amount, 0.0)
        i = int((amounts > 0).any(1).to(torch.int64).argmax())
        j = int(amounts[i].argmax())
        return i, j, float(amounts[i, j])


def influence(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    changed: Callable[[Tensor, int], Tensor],
    tokens: Sequence[int] | None = None,
) -> Influence:
    """Run on x, and on x with each token changed, or each of `tokens`.

    A change is what exceeds sqrt(eps) of the dtype, in units of the output: between rounding and
    any weight that a softmax over mild scores gives.

    >>> x = torch.randn(1, 3, 2)
    >>> influence(lambda x: x.cumsum(1), x, lambda x, j: x.index_fill(1, torch.tensor([j]), 5.0)).seen
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """
    base = run(x)
    columns = []
    for j in range(x.shape[1]) if tokens is None else tokens:
        other = run(changed(x, j))
        difference = (other - base).abs().double()
        difference = torch.where(other.isnan() & base.isnan(), 0.0, difference)  # it says nothing
        columns.append(difference.transpose(0, 1).flatten(1).amax(1))
    finite = base[base.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return Influence(torch.stack(columns, 1), scale * torch.finfo(base.dtype).eps ** 0.5)
