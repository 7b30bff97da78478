"""Steps on heads that need no positions: an activation, and vectors of length 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError


class Swish(nn.Module):
    """x sigmoid(x), number by number.

    >>> Swish()(torch.zeros(3)).tolist()
    [0.0, 0.0, 0.0]

    Source: Ramachandran et al. 2017 (arXiv 1710.05941), equation 1 with beta 1.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """The same for every position."""
        return F.silu(x)


class UnitLength(nn.Module):
    """Divide by the length of the last dimension: x / sqrt(sum(x^2) + eps), computed in fp32 or better.

    Args:
        eps: added to the square of the length, so that 0 stays 0.

    Raises:
        ArgumentError: eps is negative.

    >>> UnitLength(eps=0.0)(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps >= 0:
            raise ArgumentError(f"UnitLength(eps={eps}): eps must be at least 0")
        self.eps = eps

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """The same for every position."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The number added."""
        return f"eps={self.eps}"
