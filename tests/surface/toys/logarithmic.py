"""A bias in one file: a penalty that grows with the logarithm of the distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.biases import Bias


@dataclass(frozen=True, eq=False, repr=False)
class Logarithmic(Bias):
    """bias_ij = -slope ln(1 + |i - j|)."""

    slope: float

    def values(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """The penalties."""
        return -self.slope * (q - k).abs().to(dtype).log1p()
