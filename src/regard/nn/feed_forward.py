"""Feed-forward parts: what a block does to each position on its own."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """A gated feed-forward layer.

    y = W_down (silu(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the width between; 8/3 M keeps the parameters of a plain layer of width 4 M.
        bias: whether the three linear maps have one.

    >>> import torch
    >>> SwiGLU(8, 16)(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
