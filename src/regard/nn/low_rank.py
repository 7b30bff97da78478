"""Queries through a latent."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.linear import Linear
from regard.nn.norms import RMSNorm
from regard.nn.project import Heads
from regard.span import Positions


class LowRank(nn.Module):
    """Heads from a latent: up(norm(W x)).

    Args:
        dim: the model dim M.
        rank: the size of the latent.
        up: `Heads` from the latent.
        bias: whether the map down has one.
        eps: of the norm.

    >>> import torch
    >>> LowRank(8, 4, Heads(4, 2, 3))(torch.zeros(1, 5, 8), None).shape
    torch.Size([1, 2, 5, 3])

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 and 38.
    """

    def __init__(
        self, dim: int, rank: int, up: Heads, *, bias: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.down, self.norm, self.up = Linear(dim, rank, bias=bias), RMSNorm(rank, eps=eps), up

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """x [B,L,M] -> heads [B,n,L,d]."""
        return self.up(self.norm(self.down(x)), positions)
