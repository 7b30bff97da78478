"""Rules that replace the softmax: `Sigmoid`. Another normaliser is a subclass of `ScoreRule` with
the stage "normaliser" (softmax with one added to the denominator needs none: it is a sink of 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.scores.base import Scope, ScoreBlock, ScoreRule, Stage


@dataclass(frozen=True, eq=False, repr=False)
class Sigmoid(ScoreRule):
    """Sigmoid attention: each weight depends on its own score only, and a row has no sum.

    p_ij = 1 / (1 + exp(-s_ij - bias)), by default with the bias -ln n_i, where n_i is the number of
    keys that query i sees

    By default a row of zero scores sums to about 1, however the sequence is cut into calls. The
    paper uses -ln n for the length n of the training sequences: `Sigmoid(-math.log(n))`.

    Args:
        bias: a number, a float tensor `[H]` that may require a gradient, or None: -ln n_i.

    Raises:
        ArgumentError, ArgumentTypeError: the bias is not a finite number or a float tensor `[H]`;
            in a call, H differs.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 4, 8)
    >>> regard.attention_weights(q, q, score=regard.scores.Sigmoid(0.0))[0, 0, 0].tolist()
    [0.5, 0.5, 0.5, 0.5]

    Source: Ramapuram et al. 2024 (arXiv 2409.04431), equation 3 and section 4.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normaliser",)
    scope: ClassVar[Scope] = "pair"

    bias: float | Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bias, Tensor):
            check_number("bias", self.bias, float("-inf"), float("inf"), "finite, or None: -ln n")
        elif self.bias.ndim != 1:
            raise ArgumentError(f"bias is {tuple(self.bias.shape)}; it must be [H]")
        elif not self.bias.is_floating_point():
            raise ArgumentTypeError(f"bias is {self.bias.dtype}; use .float()")

    @property
    def needs_count(self) -> bool:
        """Whether the bias is -ln n_i."""
        return self.bias is None

    def normalise(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the sigmoid of each score with the bias."""
        if self.bias is None:
            assert block.key_count is not None, "given because of `needs_count`"
            return torch.sigmoid(s - block.key_count.clamp(min=1).to(s.dtype).log())
        if isinstance(self.bias, Tensor):
            return torch.sigmoid(s + self.bias.to(s.device, s.dtype)[:, None, None])
        return torch.sigmoid(s + self.bias)

    def select_heads(self, heads: slice) -> Sigmoid:
        """Return the rule with the numbers of these heads."""
        return Sigmoid(self.bias[heads]) if isinstance(self.bias, Tensor) else self

    def _heads(self) -> int | None:
        return len(self.bias) if isinstance(self.bias, Tensor) else None

    def __str__(self) -> str:
        return "sigmoid()" if self.bias is None else super().__str__()
