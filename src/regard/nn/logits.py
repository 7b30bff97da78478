"""The last step of a language model: from hidden states to logits."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import check_number
from regard.nn.linear import Linear


class CappedLogits(Linear):
    """A linear head whose logits stay below a cap in size.

    logits = c tanh((W x) / c)

    Args:
        dim: the model dim M.
        vocabulary: how many logits V.
        cap: c, above 0.

    Raises:
        ArgumentError: cap is not above 0.

    >>> head = CappedLogits(2, 1, cap=30.0)
    >>> torch.nn.init.constant_(head.weight, 1e6)[0, 0].item(), head(torch.ones(2)).tolist()
    (1000000.0, [30.0])

    Source: Gemma Team 2024 (arXiv 2408.00118), section 2.
    """

    def __init__(self, dim: int, vocabulary: int, *, cap: float) -> None:
        check_number("cap", cap, 0, float("inf"), "above 0")
        super().__init__(dim, vocabulary, bias=False)
        self.cap = cap

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L V"]:
        """Logits [..., V] of hidden states [..., M]."""
        return self.cap * torch.tanh(super().forward(x) / self.cap)

    def extra_repr(self) -> str:
        """The sizes and the cap."""
        return f"{super().extra_repr()}, cap={self.cap:g}"


class ScaledLogits(Linear):
    """A linear head that scales what it is given, as a head does that shares its weight with an embedding of size 1.

    logits = W (scale x)

    Args:
        dim: the model dim M.
        vocabulary: how many logits V.
        scale: finite; M^-0.5 in T5.

    Raises:
        ArgumentError: scale is not finite.

    >>> head = ScaledLogits(4, 1, scale=0.5)
    >>> torch.nn.init.ones_(head.weight).sum().item(), head(torch.ones(4)).tolist()
    (4.0, [2.0])

    Source: Raffel et al. 2020 (arXiv 1910.10683), the released code.
    """

    def __init__(self, dim: int, vocabulary: int, *, scale: float) -> None:
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        super().__init__(dim, vocabulary, bias=False)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L V"]:
        """Logits [..., V] of hidden states [..., M]."""
        return super().forward(x * self.scale)

    def extra_repr(self) -> str:
        """The sizes and the scale."""
        return f"{super().extra_repr()}, scale={self.scale:g}"
