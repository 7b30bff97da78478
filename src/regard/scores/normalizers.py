"""Rules that replace the softmax, subclasses of `ScoreRule` with the stage "normalizer"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_tracing_onnx
from regard.scores.base import Scope, ScoreBlock, ScoreRule, Stage, along_keys, stable_argsort


@dataclass(frozen=True, eq=False, repr=False)
class Sigmoid(ScoreRule):
    """Sigmoid attention: each weight depends on its own score only, and a row has no sum.

    p_ij = 1 / (1 + exp(-s_ij - bias)), by default -ln n_i for the n_i visible keys

    So a row of zero scores sums to about 1. The paper has `Sigmoid(-math.log(n))` for length n.

    Args:
        bias: a number, a float tensor `[H]` that may require a gradient, or None: -ln n_i.

    Raises:
        ArgumentError, ArgumentTypeError: the bias is no finite number or float tensor `[H]`.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 4, 8)
    >>> regard.attention_weights(q, q, score=regard.scores.Sigmoid(0.0))[0, 0, 0].tolist()
    [0.5, 0.5, 0.5, 0.5]

    Source: Ramapuram et al. 2024 (arXiv 2409.04431), equation 3 and section 4.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
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

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
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


@dataclass(frozen=True, eq=False, repr=False)
class ReLU(ScoreRule):
    """ReLU attention: each weight depends on its own score only, and a row has no sum.

    p_ij = max(0, s_ij)^power / n_i, where n_i is the number of keys that query i sees

    Args:
        power: the exponent, greater than 0; 2 is squared ReLU.

    Raises:
        ArgumentError, ArgumentTypeError: the power is not a number greater than 0.

    >>> import torch, regard
    >>> q = torch.full((1, 1, 4, 1), 2.0)
    >>> regard.attention_weights(q, q, score=regard.scores.ReLU())[0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    Source: Wortsman et al. 2023 (arXiv 2309.08586), section 3.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
    scope: ClassVar[Scope] = "pair"
    needs_count: ClassVar[bool] = True
    is_same_for_heads: ClassVar[bool] = True

    power: float = 1.0

    def __post_init__(self) -> None:
        check_number("power", self.power, 0, float("inf"), "a number greater than 0")

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the rectified scores divided by the number of visible keys."""
        assert block.key_count is not None, "given because of `needs_count`"
        rectified = s.clamp(min=0)
        if self.power != 1:
            # the power of 0 has no derivative for powers below 1
            rectified = torch.where(s > 0, torch.where(s > 0, s, 1) ** self.power, 0)
        return rectified / block.key_count.clamp(min=1).to(s.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Softpick(ScoreRule):
    """Softpick: a softmax that is rectified, so that a row may put its weight nowhere.

    p_ij = max(0, exp(s_ij) - 1) / sum_l |exp(s_il) - 1|, and 0 if every score of the row is 0

    A score of 0 or less gets no weight; negative scores count in the sum, for gradients.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0.0, -1.0]).view(1, 1, 3, 1)
    >>> regard.attention_weights(q, k, scale=1.0, score=regard.scores.Softpick())[0, 0, 0].tolist()
    [0.7310585975646973, 0.0, 0.0]

    Source: Zuhri et al. 2025 (arXiv 2504.20966), equation 4.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = True

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the rectified exponentials divided by the sum of their sizes."""
        if s.shape[-1] == 0:
            return s
        s = torch.where(block.visible, s, 0)  # exp(0) - 1 adds nothing to the sum
        largest = s.detach().amax(-1, keepdim=True).clamp(min=0)
        # expm1 keeps the digits of small scores; exp(-largest) keeps large ones finite
        sizes = torch.where(s > 0, 0, _expm1(s.clamp(max=0)) * torch.exp(-largest))
        sizes = sizes + torch.where(
            s > 0, -_expm1(-s.clamp(min=0)) * torch.exp(s.clamp(min=0) - largest), 0
        )
        total = sizes.abs().sum(-1, keepdim=True)
        return sizes.clamp(min=0) / torch.where(total == 0, 1, total)


def _expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 for x <= 0 with all digits; ONNX has no such operator."""
    return torch.tanh(x / 2) * (x.exp() + 1) if is_tracing_onnx() else torch.expm1(x)


@dataclass(frozen=True, eq=False, repr=False)
class Entmax(ScoreRule):
    """Entmax: weights that sum to 1 and are exactly 0 for keys with small scores.

    p_i = argmax over the simplex of p . s_i + H_alpha(p), with the Tsallis entropy H_alpha:
    p_ij = max(0, (alpha - 1) s_ij - tau_i)^(1 / (alpha - 1)), where tau_i makes the sum 1

    alpha = 2 is sparsemax, the projection onto the simplex.

    Args:
        alpha: 1.5 or 2, for which tau has a closed form.

    Raises:
        ArgumentError: another alpha.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0.5, -1.0, 0.8]).view(1, 1, 4, 1)
    >>> p = regard.attention_weights(q, k, scale=1.0, score=regard.scores.Entmax(2.0))
    >>> [round(x, 4) for x in p.flatten().tolist()]
    [0.5667, 0.0667, 0.0, 0.3667]

    Source: Martins and Astudillo 2016 (arXiv 1602.02068), equation 3; Peters et al. 2019 (arXiv
    1905.05702), equation 9.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = True

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if self.alpha not in (1.5, 2, 2.0):
            raise ArgumentError(
                f"alpha is {self.alpha}; it must be 1.5 or 2 (sparsemax): for other values the "
                "threshold has no closed form"
            )

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the weights above the threshold of each row."""
        if s.shape[-1] == 0:
            return s
        visible = block.visible
        least = torch.finfo(s.dtype).min
        s = torch.where(visible, s, least)
        largest = s.detach().amax(-1, keepdim=True)
        z = torch.where(visible, (s - largest) * (self.alpha - 1), -4)  # weights need z > -1
        supported = (z > self._threshold(z.detach())) & visible
        count = supported.sum(-1, keepdim=True).clamp(min=1).to(s.dtype)
        mean = torch.where(supported, z, 0).sum(-1, keepdim=True) / count
        if self.alpha == 2:
            return torch.where(supported, z - mean + 1 / count, 0)
        squares = torch.where(supported, z - mean, 0).square().sum(-1, keepdim=True)
        above = ((1 - squares) / count).clamp(min=torch.finfo(s.dtype).tiny).sqrt()
        return torch.where(supported, z - mean + above, 0).square()

    def _threshold(self, z: Tensor) -> Tensor:
        """Return tau of each row; hidden keys have z = -4, which no threshold reaches."""
        ordered = z.sort(dim=-1, descending=True).values
        count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
        mean = ordered.cumsum(-1) / count
        if self.alpha == 2:
            tau = mean - 1 / count
        else:
            squares = (ordered.square().cumsum(-1) / count - mean.square()) * count
            tau = mean - ((1 - squares) / count).clamp(min=0).sqrt()
        support = (ordered > tau).sum(-1, keepdim=True).clamp(min=1)
        return tau.gather(-1, support - 1)


@dataclass(frozen=True, eq=False, repr=False)
class SignedSoftmax(ScoreRule):
    """Signed weights: a softmax of the sizes of the scores, with the signs of the scores.

    p_ij = sign(s_ij) exp(|s_ij|) / sum_l exp(|s_il|)

    A key with a negative score takes its values away; a score of 0 has the weight 0.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    >>> regard.attention_weights(q, k, score=regard.scores.SignedSoftmax()).flatten().tolist()
    [0.5, -0.5]

    Source: Lv et al. 2024 (arXiv 2411.07176), equation 4.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = True

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the softmax of the sizes, with the signs."""
        if s.shape[-1] == 0:
            return s
        sign = torch.where(block.visible, s.detach().sign(), 0)
        # the size of a hidden score must not be the largest one
        sizes = torch.where(block.visible, s * sign, torch.finfo(s.dtype).min)
        return sign * sizes.softmax(-1)


@dataclass(frozen=True, eq=False, repr=False)
class StickBreaking(ScoreRule):
    """Stick-breaking attention: from the last key to the first, each takes a share of the rest.

    p_ij = sigmoid(s_ij) prod over visible l after j of (1 - sigmoid(s_il))

    "After" means a larger position, or slot. A row sums to less than 1. The order replaces position
    encodings. The paper hides the query's own key: `mask=masks.Causal() & ~masks.Window(1)`.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> regard.attention_weights(q, q, score=regard.scores.StickBreaking())[0, 0, 0].tolist()
    [0.125, 0.25, 0.5]

    Source: Tan et al. 2024 (arXiv 2410.17980), equations 1 to 3.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("normalizer",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = True

    def normalize(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return each key's share of what the keys after it leave, computed with logarithms."""
        s = torch.where(block.visible, s, 0)
        order = stable_argsort(block.k)
        left = torch.where(block.visible, torch.nn.functional.logsigmoid(-s), 0)
        left = along_keys(left, order)
        # the sum over the keys after each: the last key has all of the weight before it
        after = left.flip(-1).cumsum(-1).flip(-1).roll(-1, -1)
        last = torch.arange(s.shape[-1], device=s.device) == s.shape[-1] - 1
        after = along_keys(after.masked_fill(last, 0), stable_argsort(order))
        return torch.exp(torch.nn.functional.logsigmoid(s) + after)
