"""The gradient of an attention bias, summed block by block, so that no `[T, S]` gradient of the
scores is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias, DenseBias, Sum
from regard.ops.softmax.call import Call

EVERY_ROW = slice(None)


class TrainableTerm(NamedTuple):
    """One bias of a sum of biases, and the range of its tensors among the tensors of the sum."""

    term: Bias
    first: int
    stop: int


class BiasGradient:
    """Accumulates the gradients of the tensors of a bias, in the dtype of the scores.

    Args:
        bias: the bias of a call, or None.
        wanted: for each of `bias.tensors()`, whether it requires a gradient.
        dtype: the dtype in which the gradients are summed.
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
        self.learners: list[TrainableTerm] = []
        first = 0
        for term in bias_terms(bias):
            stop = first + len(term.tensors())
            if any(wanted[first:stop]):
                self.learners.append(TrainableTerm(term, first, stop))
            first = stop

    def add(self, call: Call, d_s: Tensor, rows: slice, columns: slice) -> None:
        """Add the contribution of a block, given the gradient `d_s` of its scores `[..., t, s]`."""
        d_s = d_s.view(call.B, call.H, -1, d_s.shape[-1])
        for learner in self.learners:
            if isinstance(learner.term, DenseBias):
                # added in place: autograd would return a gradient of the full size for each block
                total = self.sums[learner.first]
                total = total[None, None] if total.ndim == 2 else total
                here = total[:, :, rows if total.shape[2] > 1 else EVERY_ROW, columns]
                here += d_s.sum_to_size(here.shape)
            else:
                self._differentiate(learner, call, d_s, rows, columns)

    def _differentiate(
        self, learner: TrainableTerm, call: Call, d_s: Tensor, rows: slice, columns: slice
    ) -> None:
        """Compute the block's contribution of one trainable bias with autograd and add it to the
        sums.
        """
        wanted = self.wanted[learner.first : learner.stop]
        with torch.enable_grad():
            tensors = [
                x.detach().to(d_s.dtype).requires_grad_(w)
                for x, w in zip(learner.term.tensors(), wanted, strict=True)
            ]
            block_of = (call.q_positions, call.k_positions, rows, columns)
            block = learner.term.with_tensors(tensors).block(
                *block_of, dtype=d_s.dtype, device=d_s.device
            )
        if not block.requires_grad:
            return
        trained = {i: x for i, x in enumerate(tensors, learner.first) if x.requires_grad}
        gradients = torch.autograd.grad(
            block, [*trained.values()], d_s.sum_to_size(block.shape), allow_unused=True
        )
        for i, g in zip(trained, gradients, strict=True):
            if g is not None:
                self.sums[i] += g

    def total(self) -> list[Tensor | None]:
        """Return the summed gradients in the dtypes of the tensors, and None where no gradient is
        required.
        """
        return [
            self.sums[i].to(dtype) if i in self.sums else None
            for i, dtype in enumerate(self.dtypes)
        ]


def bias_terms(bias: Bias | None) -> tuple[Bias, ...]:
    """Return the biases whose sum is `bias`: the terms of a sum, the bias itself, or nothing for
    None.

    >>> from regard.biases import ALiBi
    >>> bias_terms(ALiBi(2) + ALiBi(2, symmetric=True))
    (alibi(2), alibi(2, symmetric))
    """
    if bias is None:
        return ()
    return bias.terms if isinstance(bias, Sum) else (bias,)
