"""KERPLE: a penalty by the logarithm of the distance, with two learned numbers per head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.argument_checks import check_tensor
from regard.biases.base import Bias
from regard.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class Kerple(Bias):
    """KERPLE, logarithmic form: bias_ij = -|r1_h| ln(1 + |r2_h| |i - j|).

    Absolute values of r1 and r2 keep them in the range that the paper needs.

    Args:
        r1: how large the penalty is, a float tensor `[H]`, which may be learned.
        r2: how fast it grows near the query, likewise.

    Raises:
        ArgumentError: the tensors are not 1-D of one length.
        ArgumentTypeError: one is not a float tensor.

    >>> from regard.span import Span
    >>> bias = Kerple(torch.ones(1), torch.ones(1))
    >>> [round(x, 4) for x in bias.block(Span(3, 1), Span(0, 4)).flatten().tolist()]
    [-1.3863, -1.0986, -0.6931, -0.0]

    Source: Chi et al. 2022 (arXiv 2205.09921), section 4, equation 4.
    """

    r1: Tensor
    r2: Tensor

    def __post_init__(self) -> None:
        check_tensor("r1", self.r1)
        check_tensor("r2", self.r2)
        if self.r1.ndim != 1 or self.r1.shape != self.r2.shape:
            raise ArgumentError(
                f"r1 is {tuple(self.r1.shape)} and r2 is {tuple(self.r2.shape)}; both must be [H], "
                "one number per query head"
            )

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -|r1| ln(1 + |r2| |i - j|)."""
        r1, r2 = (x.to(q.device, dtype).abs()[:, None, None] for x in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * (q - k).abs().to(dtype))

    def _heads(self) -> int:
        return self.r1.shape[0]

    def select_heads(self, heads: slice) -> Kerple:
        """Return the bias with the numbers of these heads."""
        return replace(self, r1=self.r1[heads], r2=self.r2[heads])

    def __str__(self) -> str:
        return f"kerple({self.r1.shape[0]})"
