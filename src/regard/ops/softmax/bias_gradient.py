"""The gradient of a bias, summed up block by block, so that no T x S gradient of the scores ever
exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias, DenseBias, Sum
from regard.ops.softmax.call import Call

ALL = slice(None)


class Learner(NamedTuple):
    """One bias of a sum, and where its tensors stand among those of the sum."""

    term: Bias
    first: int
    stop: int


class BiasGradient:
    """The gradients of a bias's tensors, in the precision of the scores.

    wanted: which tensors want one, in the order of `bias.tensors()`.
    """

    def __init__(self, bias: Bias | None, wanted: tuple[bool, ...], dtype: torch.dtype) -> None:
        tensors = () if bias is None else bias.tensors()
        self.wanted = wanted
        self.dtypes = [x.dtype for x in tensors]
        self.sums = {
            i: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for i, x in enumerate(tensors)
            if wanted[i]
        }
        self.learners: list[Learner] = []
        first = 0
        for term in bias_terms(bias):
            stop = first + len(term.tensors())
            if any(wanted[first:stop]):
                self.learners.append(Learner(term, first, stop))
            first = stop

    def add(self, call: Call, d_s: Tensor, rows: slice, columns: slice) -> None:
        """Add what the gradient of a block of scores [.., t, s] says."""
        d_s = d_s.view(call.B, call.H, -1, d_s.shape[-1])
        for learner in self.learners:
            if isinstance(
                learner.term, DenseBias
            ):  # autograd would fill the whole tensor for each block
                total = self.sums[learner.first]
                total = total[None, None] if total.ndim == 2 else total
                here = total[:, :, rows if total.shape[2] > 1 else ALL, columns]
                here += d_s.sum_to_size(here.shape)
            else:
                self._differentiate(learner, call, d_s, rows, columns)

    def _differentiate(
        self, learner: Learner, call: Call, d_s: Tensor, rows: slice, columns: slice
    ) -> None:
        wanted = self.wanted[learner.first : learner.stop]
        with torch.enable_grad():
            tensors = [
                x.detach().to(d_s.dtype).requires_grad_(w)
                for x, w in zip(learner.term.tensors(), wanted, strict=True)
            ]
            where = (call.q_positions, call.k_positions, rows, columns)
            block = learner.term.with_tensors(tensors).block(
                *where, dtype=d_s.dtype, device=d_s.device
            )
        if not block.requires_grad:
            return
        own = {i: x for i, x in enumerate(tensors, learner.first) if x.requires_grad}
        found = torch.autograd.grad(
            block, [*own.values()], d_s.sum_to_size(block.shape), allow_unused=True
        )
        for i, g in zip(own, found, strict=True):
            if g is not None:
                self.sums[i] += g

    def total(self) -> list[Tensor | None]:
        """The gradients, in the dtypes of the tensors; None where none is wanted."""
        return [
            self.sums[i].to(dtype) if i in self.sums else None
            for i, dtype in enumerate(self.dtypes)
        ]


def bias_terms(bias: Bias | None) -> tuple[Bias, ...]:
    """The biases that are summed.

    >>> from regard.biases import ALiBi
    >>> bias_terms(ALiBi(2) + ALiBi(2, symmetric=True))
    (alibi(2), alibi(2, symmetric))
    """
    if bias is None:
        return ()
    return bias.terms if isinstance(bias, Sum) else (bias,)
