"""Feed-forward parts: what a block does to each position on its own."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.linear import Linear


class FeedForward(nn.Module):
    """The plain feed-forward layer: wide, a nonlinearity, and back.

    y = W_2 f(W_1 x + b_1) + b_2

    Args:
        dim: the model dim M.
        hidden: the width between, 4 M in the first Transformer.
        activation: f, a module; None is ReLU, as in the first Transformer. BERT and GPT-2 have
            `nn.GELU()`.
        bias: whether the two linear maps have one.

    >>> import torch
    >>> layer = FeedForward(8, 32, nn.GELU())
    >>> layer(torch.zeros(1, 2, 8)).shape, layer.up.out_features
    (torch.Size([1, 2, 8]), 32)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 2.
    """

    def __init__(
        self, dim: int, hidden: int, activation: nn.Module | None = None, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias)
        self.activation = activation if activation is not None else nn.ReLU()
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class GatedFeedForward(nn.Module):
    """A feed-forward layer whose width is gated: any activation makes the gate.

    y = W_down (f(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the width between; 8/3 M keeps the parameters of a plain layer of width 4 M.
        activation: f, a module: `nn.GELU("tanh")` gives the GeGLU of Gemma, `nn.SiLU()` is
            `SwiGLU`.
        bias: whether the three linear maps have one.

    >>> import torch
    >>> GatedFeedForward(8, 16, nn.GELU("tanh"))(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), section 2, equations 5 and 6.
    """

    def __init__(self, dim: int, hidden: int, activation: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.activation = activation
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        out: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


class SwiGLU(GatedFeedForward):
    """A gated feed-forward layer with SiLU.

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
        super().__init__(dim, hidden, nn.SiLU(), bias=bias)
