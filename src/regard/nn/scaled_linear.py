"""`ScaledLinear`, a linear map with a factor on its result."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.nn.linear import Linear


class ScaledLinear(Linear):
    """A linear map with a factor on its result: y = scale (W x + b).

    >>> import torch
    >>> layer = ScaledLinear(2, 1, scale=0.5)
    >>> torch.nn.init.ones_(layer.weight).sum().item(), layer(torch.ones(2)).tolist()
    (2.0, [1.0])

    Source: Yang et al. 2022 (arXiv 2203.03466), where widths have such factors; Falcon-H1.
    """

    def __init__(self, dim: int, out: int, *, scale: float, bias: bool = False) -> None:
        super().__init__(dim, out, bias=bias)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Return y [..., N] of x [..., M]."""
        return super().forward(x) * self.scale

    def extra_repr(self) -> str:
        """Return the sizes and the factor."""
        return f"{super().extra_repr()}, scale={self.scale:g}"


def scaled_map(linear: Linear, scale: float) -> Linear:
    """Return a linear map of the same sizes with a factor on its result, or the map itself for 1.

    >>> layer = Linear(2, 1)
    >>> scaled_map(layer, 1.0) is layer, scaled_map(layer, 0.5)
    (True, ScaledLinear(in_features=2, out_features=1, bias=True, scale=0.5))
    """
    if scale == 1:
        return linear
    bias = linear.bias is not None
    return ScaledLinear(linear.in_features, linear.out_features, scale=scale, bias=bias)
