"""Measure which input tokens influence which outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Influence(NamedTuple):
    """How much each output changes when each token is replaced."""

    amount: Tensor
    threshold: float

    @property
    def visible(self) -> Tensor:
        """Whether token j reaches output i, bool [T, S]. NaN counts as a change."""
        return ~(self.amount <= self.threshold)

    def strongest(self, where: Tensor) -> tuple[int, int, float]:
        """Return the first output with an influence inside `where`, its strongest token, and the
        amount.
        """
        amounts = torch.where(where & self.visible, self.amount, 0.0)
        i = int((amounts > 0).any(1).to(torch.int64).argmax())
        j = int(amounts[i].argmax())
        return i, j, float(amounts[i, j])


def influence(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    changed: Callable[[Tensor, int], Tensor],
    tokens: Sequence[int] | None = None,
) -> Influence:
    """Measure the influence of each token: run on x, and on x with each token replaced.

    A change counts if it exceeds sqrt(eps) of the dtype times the largest output. This is larger
    than rounding and smaller than any weight that a softmax over moderate scores gives.
    """
    base = run(x)
    columns = []
    for j in range(x.shape[1]) if tokens is None else tokens:
        other = run(changed(x, j))
        difference = (other - base).abs().double()
        # NaN in both outputs does not show that the token has an influence
        difference = torch.where(other.isnan() & base.isnan(), 0.0, difference)
        columns.append(difference.transpose(0, 1).flatten(1).amax(1))
    finite = base[base.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return Influence(torch.stack(columns, 1), scale * torch.finfo(base.dtype).eps ** 0.5)
