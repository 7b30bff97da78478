"""Scalings: how rotary frequencies change so that a model reads further than it was trained.

Letters: d rotary dim, b base, L trained length, s factor, i pair index 0..d/2-1, theta_i = b^(-2i/d) in radians per
position, r_i = L theta_i / (2 pi) rotations within the trained length. YaRN and LongRoPE have files of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from regard.arguments import check_number
from regard.errors import ArgumentError, ArgumentTypeError


class RopeFrequencies(NamedTuple):
    """What a rotary scheme comes to.

    inv_freq: radians per position of each pair, fp64 [rotary_dim / 2].
    rotary_factor: multiplies cos and sin, hence each rotated query and key.
    softmax_factor: multiplies the softmax scale, hence the rotated and the other dims alike. Never folded into
        rotary_factor: the two are equal only where the whole head is rotary.
    """

    inv_freq: Float64[Tensor, " n"]
    rotary_factor: float
    softmax_factor: float


class Unscaled(NamedTuple):
    """What a scaling starts from: theta_i = base^(-2i/dim), fp64 [n], and the length of the sequence where it is known."""

    theta: Float64[Tensor, " n"]
    base: float
    dim: int
    length: int | None


@dataclass(frozen=True)
class Scaling:
    """Base of the scalings: frequencies become others.

    `needs_length` says that the result depends on how long the sequence is now. Keys that were rotated under one length
    and are scored under another are no longer a function of distance: see `Rotary`.
    """

    needs_length: ClassVar[bool] = False

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """The frequencies in place of theta, and the two factors."""
        raise NotImplementedError


def plain(base: float, dim: int, pairs: int) -> Float64[Tensor, " n"]:
    """theta_i = base^(-2i/dim) for i < pairs, fp64, on the CPU whatever the default device is."""
    i = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return base ** (-2 * i / dim)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: theta_i / s, the same as positions p / s.

    Args:
        factor: s.

    Raises:
        ArgumentError: factor is not above 0.

    >>> from regard.positions import rope_frequencies
    >>> rope_frequencies(4, scaling=Linear(4.0)).inv_freq.tolist()
    [0.25, 0.0025]

    Source: Chen et al. 2023 (arXiv 2306.15595), equation 4.
    """

    factor: float

    def __post_init__(self) -> None:
        positive("factor", self.factor)

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """theta / s."""
        return RopeFrequencies(rope.theta / self.factor, 1.0, 1.0)


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware, static: b' = b s^(d/(d-2)). The lowest frequency is that of `Linear`, the highest is unchanged.

    Args:
        factor: s.

    Raises:
        ArgumentError: factor is not above 0; when used, a rotary dim below 4.

    >>> from regard.positions import rope_frequencies
    >>> rope_frequencies(4, scaling=NTK(4.0)).inv_freq.tolist()
    [1.0, 0.0025]

    Source: Peng et al. 2023 (arXiv 2309.00071), definition 1.
    """

    factor: float

    def __post_init__(self) -> None:
        positive("factor", self.factor)

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """base'^(-2i/d)."""
        base = self.base(rope.base, rope.dim)
        return RopeFrequencies(plain(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int) -> float:
        """b s^(d/(d-2))."""
        return base * self.factor ** ntk_exponent(dim)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK that follows the length l: b' = b (a l / L - (a - 1))^(d/(d-2)) for l > L, unchanged up to L.

    Args:
        factor: a. Hugging Face's "dynamic" has its factor here; a = 1 is the dynamic scaling of the YaRN paper.
        original_length: L. Hugging Face reads it from max_position_embeddings.

    Raises:
        ArgumentError: factor or original_length is not above 0; when used, no length, or a rotary dim below 4.

    >>> round(DynamicNTK(2.0, 4096).base(10000.0, 128, length=8192), 4)
    30527.7367

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.3; its use with a cache: see `Rotary`.
    """

    factor: float
    original_length: int
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("factor", self.factor)
        positive("original_length", self.original_length)

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """base'^(-2i/d)."""
        base = self.base(rope.base, rope.dim, needed(self, rope.length))
        return RopeFrequencies(plain(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int, length: int) -> float:
        """b (a l / L - (a - 1))^(d/(d-2)), with l at least L."""
        stretch = max(length, self.original_length) / self.original_length
        return base * (self.factor * stretch - (self.factor - 1)) ** ntk_exponent(dim)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1: keep the pairs with r > high, divide by s those with r < low, blend linearly in r between.

    theta' = (1 - m) theta / s + m theta,  m = clamp((r - low) / (high - low), 0, 1),  r = L theta / (2 pi)

    Args:
        factor: s.
        low_freq_factor, high_freq_factor: low and high, in rotations within L.
        original_length: L.

    Raises:
        ArgumentError: a number is not above 0, or low is not below high.

    >>> from regard.positions import rope_frequencies
    >>> scaled = rope_frequencies(128, 500000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)).inv_freq
    >>> int((scaled == rope_frequencies(128, 500000.0).inv_freq).sum())
    29

    Source: the code released with Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            positive(name, value)
        ordered("low_freq_factor", self.low_freq_factor, "high_freq_factor", self.high_freq_factor)

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """Keep, blend or divide each pair."""
        theta, low, high = rope.theta, self.low_freq_factor, self.high_freq_factor
        m = ((self.original_length * theta / math.tau - low) / (high - low)).clamp(0, 1)
        return RopeFrequencies((1 - m) * theta / self.factor + m * theta, 1.0, 1.0)


def ntk_exponent(dim: int) -> float:
    """d / (d - 2)."""
    if dim < 4:
        raise ArgumentError(
            f"NTK scaling of a rotary dim of {dim}: its exponent d/(d-2) needs at least 4; use Linear"
        )
    return dim / (dim - 2)


def needed(scaling: Scaling, length: int | None) -> int:
    """The length, which a scaling cannot do without."""
    if length is None:
        raise ArgumentError(
            f"length is None, and {type(scaling).__name__} depends on it; pass the length of the sequence, "
            "or the length to freeze the frequencies at"
        )
    return length


def positive(name: str, value: float, *, above: float = 0) -> None:
    """A finite number above a bound."""
    if value is None:
        raise ArgumentTypeError(f"{name} is None; it must be a number above {above}")
    check_number(name, value, above, math.inf, f"above {above}")


def ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    """low < high."""
    if not low < high:
        raise ArgumentError(
            f"{low_name} is {low} and {high_name} is {high}; the first must be below the second"
        )
