"""Residual paths: where the norm stands is which class is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number


class Residual(nn.Module, ABC):
    """A path around a sublayer, with a norm and with dropout on what the sublayer adds.

    Args:
        norm: a module [B,T,M] -> [B,T,M].
        dropout: on the sublayer's output, in training only.

    Raises:
        ArgumentError: dropout is out of range.
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def kept(self, x: Tensor) -> Tensor:
        """What of the sublayer's output is added: all of it, but for dropout in training."""
        return self.dropout(x) if self.training else x

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """x [B,T,M] and what the sublayer makes of it."""


class PreNorm(Residual):
    """The sublayer sees a normed x, and the path itself is left alone: x + sublayer(norm(x)).

    A stack of these ends in a norm of its own.

    >>> import torch
    >>> PreNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: x.round())
    tensor([[[1., 5.]]], grad_fn=<AddBackward0>)

    Source: Xiong et al. 2020 (arXiv 2002.04745), figure 1b.
    """

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """x + sublayer(norm(x))."""
        return x + self.kept(sublayer(self.norm(x)))


class PostNorm(Residual):
    """The sum is normed, path included: norm(x + sublayer(x)).

    >>> import torch
    >>> PostNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), torch.zeros_like).round()
    tensor([[[-1., 1.]]], grad_fn=<RoundBackward0>)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """norm(x + sublayer(x))."""
        return self.norm(x + self.kept(sublayer(x)))


class NormedPath(Residual):
    """The sublayer sees a normed x, and so does the path: n + sublayer(n), n = norm(x).

    >>> import torch
    >>> NormedPath(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[-4., 4.]]], grad_fn=<RoundBackward0>)

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), whose released code has it as an option; so have checkpoints of BLOOM.
    """

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """norm(x) + sublayer(norm(x))."""
        normed = self.norm(x)
        return normed + self.kept(sublayer(normed))


class OutputNorm(Residual):
    """What the sublayer adds is normed, and nothing else: x + norm(sublayer(x)).

    >>> import torch
    >>> OutputNorm(nn.LayerNorm(2))(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[1., 5.]]], grad_fn=<RoundBackward0>)

    Source: OLMo 2, 2025 (arXiv 2501.00656), section 2.1.
    """

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """x + norm(sublayer(x))."""
        return x + self.kept(self.norm(sublayer(x)))


class Sandwich(Residual):
    """A norm on either side of the sublayer: x + after(sublayer(norm(x))).

    Args:
        norm: in front of the sublayer.
        after: behind it.
        dropout: on what is added, in training only.

    >>> import torch
    >>> path = Sandwich(nn.LayerNorm(2), nn.LayerNorm(2))
    >>> path(torch.tensor([[[2.0, 4.0]]]), lambda x: 3 * x).round()
    tensor([[[1., 5.]]], grad_fn=<RoundBackward0>)

    Source: Ding et al. 2021 (arXiv 2105.13290), section 2.4; as in Gemma 2 (arXiv 2408.00118), section 2.
    """

    def __init__(self, norm: nn.Module, after: nn.Module, dropout: float = 0.0) -> None:
        super().__init__(norm, dropout)
        self.after = after

    def forward(
        self, x: Float[Tensor, "B T M"], sublayer: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T M"]:
        """x + after(sublayer(norm(x)))."""
        return x + self.kept(self.after(sublayer(self.norm(x))))
