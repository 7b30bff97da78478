"""The gradient of an attention bias, summed over blocks, never `[B, H, T, S]` in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias, DenseBias, Sum
from regard.ops.softmax.call import Call

EVERY_ROW = slice(None)


class TrainableTerm(NamedTuple):
    """A bias with a tensor that requires a gradient, as one term of a sum, and its tensors."""

    term: Bias
    first: int
    stop: int


class BiasGradient:
    """Accumulates the gradients of the tensors of a bias over blocks of the scores."""

    def __init__(
        self, bias: Bias | None, requires_grad: tuple[bool, ...], dtype: torch.dtype
    ) -> None:
        tensors = () if bias is None else bias.tensors()
        self.requires_grad = requires_grad
        self.dtypes = [x.dtype for x in tensors]
        self.sums = {
            i: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for i, x in enumerate(tensors)
            if requires_grad[i]
        }
        self.trainable: list[TrainableTerm] = []
        first = 0
        for term in bias_terms(bias):
            stop = first + len(term.tensors())
            if any(requires_grad[first:stop]):
                self.trainable.append(TrainableTerm(term, first, stop))
            first = stop

    def add(self, call: Call, d_s: Tensor, rows: slice, columns: slice) -> None:
        """Add the contribution of one block of the scores."""
        d_s = d_s.view(call.B, call.H, -1, d_s.shape[-1])
        for trainable in self.trainable:
            if isinstance(trainable.term, DenseBias):
                # added in place: autograd would return a gradient of the full size for each block
                total = self.sums[trainable.first]
                total = total[None, None] if total.ndim == 2 else total
                block_sum = total[:, :, rows if total.shape[2] > 1 else EVERY_ROW, columns]
                block_sum += d_s.sum_to_size(block_sum.shape)
            else:
                self._differentiate(trainable, call, d_s, rows, columns)

    def _differentiate(
        self, trainable: TrainableTerm, call: Call, d_s: Tensor, rows: slice, columns: slice
    ) -> None:
        """Add the block's contribution of one trainable bias, by autograd, to the sums."""
        requires_grad = self.requires_grad[trainable.first : trainable.stop]
        with torch.enable_grad():
            tensors = [
                x.detach().to(d_s.dtype).requires_grad_(required)
                for x, required in zip(trainable.term.tensors(), requires_grad, strict=True)
            ]
            block_arguments = (call.q_positions, call.k_positions, rows, columns)
            block = trainable.term.with_tensors(tensors).block(
                *block_arguments, dtype=d_s.dtype, device=d_s.device
            )
        if not block.requires_grad:
            return
        inputs = {i: x for i, x in enumerate(tensors, trainable.first) if x.requires_grad}
        gradients = torch.autograd.grad(
            block, [*inputs.values()], d_s.sum_to_size(block.shape), allow_unused=True
        )
        for i, g in zip(inputs, gradients, strict=True):
            if g is not None:
                self.sums[i] += g

    def total(self) -> list[Tensor | None]:
        """Return the summed gradients in the dtypes of the tensors; None where not required."""
        return [
            self.sums[i].to(dtype) if i in self.sums else None
            for i, dtype in enumerate(self.dtypes)
        ]


def bias_terms(bias: Bias | None) -> tuple[Bias, ...]:
    """Return the biases whose sum is `bias`: terms, the bias itself, or nothing for None."""
    if bias is None:
        return ()
    return bias.terms if isinstance(bias, Sum) else (bias,)
