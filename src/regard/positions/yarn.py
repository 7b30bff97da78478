"""YaRN: divide the slow rotary frequencies, keep the fast ones, and sharpen the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from regard.arguments import check_number
from regard.errors import ArgumentError
from regard.positions.scalings import (
    RopeFrequencies,
    Scaling,
    Unscaled,
    needed,
    ordered,
    positive,
)


def pair_index(rotations: float, dim: int, base: float, length: int) -> float:
    """The (fractional) pair that makes so many rotations within a length: d ln(L / (2 pi r)) / (2 ln b).

    >>> round(pair_index(1, 128, 10000.0, 4096), 6)
    45.026881
    """
    return dim * math.log(length / (math.tau * rotations)) / (2 * math.log(base))


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """f(m) = 0.1 m ln s + 1, and 1 where s <= 1.

    >>> yarn_mscale(40.0)
    1.3688879454113936
    """
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class YaRN(Scaling):
    """YaRN as released: the ramp between kept and divided frequencies is linear in the pair index.

    low = floor(index(beta_fast)), high = ceil(index(beta_slow)), clamped to 0 and d - 1;  index: see `pair_index`
    ramp_i = clamp((i - low) / (high - low), 0, 1);  theta'_i = (1 - ramp_i) theta_i + ramp_i theta_i / s
    rotary factor f(1) = 0.1 ln s + 1, or DeepSeek's f(mscale) / f(mscale_all_dim), f(m) = 0.1 m ln s + 1;
    softmax factor f(mscale_all_dim)^2

    Args:
        factor: s.
        original_length: L.
        beta_fast, beta_slow: pairs with more rotations within L than beta_fast are kept, with fewer than beta_slow
            divided.
        truncate: whether low and high are rounded to whole pairs (gpt-oss does not).
        ramp: "index", as in the released code and every released checkpoint, or "rotations", the paper's definition:
            theta' = (1 - g) theta / s + g theta, g = clamp((r - beta_slow) / (beta_fast - beta_slow), 0, 1).
        attention_factor: the rotary factor, if not the one above.
        mscale, mscale_all_dim: as in a DeepSeek config, where they count as 1 and 0 when absent.

    Raises:
        ArgumentError: a number is not above 0, beta_slow is not below beta_fast, or ramp is unknown; when used, the
            ramp has no pairs to run over.

    >>> from regard.positions import rope_frequencies
    >>> inv_freq, rotary_factor, softmax_factor = rope_frequencies(128, scaling=YaRN(16.0, 4096))
    >>> rotary_factor, softmax_factor
    (1.2772588722239782, 1.0)

    Source: Peng et al. 2023 (arXiv 2309.00071), definitions 2 and 3, and its released code;
    mscale: DeepSeek-AI 2024 (arXiv 2405.04434) and its released code.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations"] = "index"
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        check_ramp(self.original_length, self.beta_fast, self.beta_slow, self.ramp)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")
        for name in ("mscale", "mscale_all_dim"):
            check_number(name, getattr(self, name), -1e-300, math.inf, "at least 0")

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """Blend theta and theta / s by the ramp."""
        if self.ramp == "rotations":
            r = self.original_length * rope.theta / math.tau
            divided = 1 - ((r - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        else:
            low, high = self.bounds(rope.dim, rope.base)
            i = torch.arange(len(rope.theta), dtype=torch.float64, device="cpu")
            divided = ((i - low) / (high - low)).clamp(0, 1)
        blended = rope.theta * (1 - divided) + rope.theta / self.factor * divided
        softmax_factor = yarn_mscale(self.factor, self.mscale_all_dim or 0) ** 2
        return RopeFrequencies(blended, self.rotary_factor, softmax_factor)

    def bounds(self, dim: int, base: float) -> tuple[float, float]:
        """low and high, in pairs: where the ramp starts and ends.

        `high` is clamped at d - 1 although pairs end at d/2 - 1: so do the released tables.
        """
        low = pair_index(self.beta_fast, dim, base, self.original_length)
        high = pair_index(self.beta_slow, dim, base, self.original_length)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low > high:
            raise ArgumentError(
                f"YaRN's ramp would run from pair {low:.6g} down to {high:.6g} (dim {dim}, base {base}, original_length "
                f'{self.original_length}); check original_length and base, or use ramp="rotations"'
            )
        return low, high + 0.001 if low == high else high

    @property
    def rotary_factor(self) -> float:
        """f(mscale) / f(mscale_all_dim), f(1) without them."""
        if self.attention_factor is not None:
            return self.attention_factor
        mscale = 1.0 if self.mscale is None else self.mscale
        return yarn_mscale(self.factor, mscale) / yarn_mscale(self.factor, self.mscale_all_dim or 0)


@dataclass(frozen=True)
class DynamicYaRN(Scaling):
    """YaRN whose factor follows the length l: s = max(1, l / L), rotary factor included.

    Args:
        original_length: L.
        beta_fast, beta_slow, truncate, ramp: as in `YaRN`.

    Raises:
        ArgumentError: as `YaRN`; when used, no length.

    >>> from regard.positions import rope_frequencies
    >>> rope_frequencies(128, scaling=DynamicYaRN(4096), length=65536).rotary_factor
    1.2772588722239782

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.3, and its released code.
    """

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations"] = "index"
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ramp(self.original_length, self.beta_fast, self.beta_slow, self.ramp)

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """`YaRN` with the factor of this length."""
        L = self.original_length
        factor = max(1.0, needed(self, rope.length) / L)
        return YaRN(factor, L, self.beta_fast, self.beta_slow, self.truncate, self.ramp).scale(rope)


def check_ramp(original_length: int, beta_fast: float, beta_slow: float, ramp: str) -> None:
    """The arguments that shape the ramp."""
    positive("original_length", original_length)
    positive("beta_slow", beta_slow)
    positive("beta_fast", beta_fast)
    ordered("beta_slow", beta_slow, "beta_fast", beta_fast)
    if ramp not in ("index", "rotations"):
        raise ArgumentError(
            f'ramp is {ramp!r}; it must be "index" (released code) or "rotations" (paper)'
        )
