"""Rotary positions for longer contexts: scalings, and formulas for the length of a base.

Letters: d is the rotary dim, b the base, theta_i the frequency of pair i in radians per position, L
or T the trained length, s the factor by which the context becomes longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.units import plural


class RopeFrequencies(NamedTuple):
    """The frequencies and factors of a rotary scheme.

    Attributes:
        inv_freq: radians per position of each pair, fp64 [rotary_dim / 2].
        rotary_factor: the factor on cos and sin, and so on the rotated dims of queries and keys.
        softmax_factor: the factor on the softmax scale, and so on all dims.
    """

    inv_freq: Float64[Tensor, " n"]
    rotary_factor: float
    softmax_factor: float


class UnscaledFrequencies(NamedTuple):
    """The unscaled frequencies of a rotary scheme, which are the input of a scaling."""

    theta: Float64[Tensor, " n"]
    base: float
    dim: int
    length: int | None


@dataclass(frozen=True)
class Scaling:
    """Base class of the scalings of rotary frequencies.

    Attributes:
        needs_length: whether the frequencies depend on the present length (see `Rotary`).
    """

    needs_length: ClassVar[bool] = False

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Compute the scaled frequencies.

        Args:
            rope: the unscaled frequencies.

        Returns:
            The scaled frequencies and the two factors.
        """
        raise NotImplementedError


def base_frequencies(base: float, dim: int, pairs: int) -> Float64[Tensor, " n"]:
    """Return theta_i = base^(-2i/dim) for i < pairs, fp64, on the CPU."""
    i = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return base ** (-2 * i / dim)


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: the frequencies theta_i / s, which are equivalent to positions p / s.

    Args:
        factor: the factor s.

    Raises:
        ArgumentError: factor is not above 0.

    >>> from regard.positions import rope_frequencies
    >>> rope_frequencies(4, scaling=LinearScaling(4.0)).inv_freq.tolist()
    [0.25, 0.0025]

    Source: Chen et al. 2023 (arXiv 2306.15595), equation 4.
    """

    factor: float

    def __post_init__(self) -> None:
        check_above("factor", self.factor)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Divide every frequency theta by the factor s."""
        return RopeFrequencies(rope.theta / self.factor, 1.0, 1.0)


@dataclass(frozen=True)
class Backwards(Scaling):
    """The frequencies -theta_i: pairs turn in the other direction.

    Source: the code of nanochat, 2025.
    """

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Return theta with its sign turned, and factor 1: pairs turn the other way."""
        return RopeFrequencies(-rope.theta, 1.0, 1.0)


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware scaling by the base b' = b s^(d/(d-2)): the highest frequency is unchanged.

    Args:
        factor: the factor s.

    Raises:
        ArgumentError: factor is not above 0; when used, the rotary dim is below 4.

    >>> from regard.positions import rope_frequencies
    >>> rope_frequencies(4, scaling=NTK(4.0)).inv_freq.tolist()
    [1.0, 0.0025]

    Source: Peng et al. 2023 (arXiv 2309.00071), definition 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_above("factor", self.factor)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Compute the frequencies b'^(-2i/d) of the larger base."""
        base = self.base(rope.base, rope.dim)
        return RopeFrequencies(base_frequencies(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int) -> float:
        """Compute the larger base b' = b s^(d/(d-2)).

        Args:
            base: the base b.
            dim: the rotary dim d.

        Returns:
            The base b'.
        """
        return base * math.pow(self.factor, ntk_exponent(dim))


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware scaling by length l: b' = b (a l / L - (a - 1))^(d/(d-2)) if l > L, else b.

    Args:
        factor: the factor a, "factor" of Hugging Face; 1 in the YaRN paper.
        original_length: the trained length L; Hugging Face reads it from max_position_embeddings.

    Raises:
        ArgumentError: a number is not above 0; when used, there is no length, or d is below 4.

    >>> round(DynamicNTK(2.0, 4096).base(10000.0, 128, length=8192), 4)
    30527.7367

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.3.
    """

    factor: float
    original_length: int
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_above("factor", self.factor)
        check_above("original_length", self.original_length)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Compute the frequencies b'^(-2i/d) of the base for the present length."""
        base = self.base(rope.base, rope.dim, require_length(self, rope.length))
        return RopeFrequencies(base_frequencies(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int, length: int) -> float:
        """Compute the base b (a l / L - (a - 1))^(d/(d-2)), with l at least L.

        Args:
            base: the base b.
            dim: the rotary dim d.
            length: the length l of the sequence.

        Returns:
            The base b'.
        """
        stretch = max(length, self.original_length) / self.original_length
        return base * math.pow(self.factor * stretch - (self.factor - 1), ntk_exponent(dim))


@dataclass(frozen=True)
class Llama3(Scaling):
    """The scaling of Llama 3.1: pairs with many rotations are kept, those with few divided by s.

    theta' = (1 - m) theta / s + m theta
    m = clamp((r - low) / (high - low), 0, 1),  r = L theta / (2 pi), the rotations within L

    Where low = high, as in Llama 4, m is 1 where r >= low, else 0.

    Args:
        factor: the factor s.
        low_freq_factor, high_freq_factor: the numbers of rotations low and high.
        original_length: the trained length L.

    Raises:
        ArgumentError: a number is not above 0, or low is above high.

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
            check_above(name, value)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low != high:
            check_increasing("low_freq_factor", low, "high_freq_factor", high)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Keep, blend or divide each frequency."""
        theta, low, high = rope.theta, self.low_freq_factor, self.high_freq_factor
        rotations = self.original_length * theta / math.tau
        if low == high:
            m = (rotations >= low).to(theta.dtype)
        else:
            m = ((rotations - low) / (high - low)).clamp(0, 1)
        return RopeFrequencies((1 - m) * theta / self.factor + m * theta, 1.0, 1.0)


def ntk_exponent(dim: int) -> float:
    """Return the exponent d / (d - 2) of NTK scalings."""
    if dim < 4:
        raise ArgumentError(
            f"the rotary dim is {dim}; NTK scaling needs at least 4, because its exponent is "
            "d/(d-2); use LinearScaling"
        )
    return dim / (dim - 2)


def require_length(scaling: Scaling, length: int | None) -> int:
    """Return the length, or raise an `ArgumentError` if it is None."""
    if length is None:
        raise ArgumentError(
            f"length is None, but the frequencies of {type(scaling).__name__} depend on it; pass "
            "the length of the sequence"
        )
    return length


def check_above(name: str, value: float, *, above: float = 0) -> None:
    """Check that a value is a finite number above a bound."""
    if value is None:
        raise ArgumentTypeError(f"{name} is None; it must be a number above {above}")
    check_number(name, value, above, math.inf, f"above {above}")


def check_increasing(low_name: str, low: float, high_name: str, high: float) -> None:
    """Check that the first of two values is below the second."""
    if not low < high:
        raise ArgumentError(
            f"{low_name} is {low} and {high_name} is {high}; the first must be below the second"
        )


def pair_index(rotations: float, dim: int, base: float, length: int) -> float:
    """Compute the index d ln(L / (2 pi r)) / (2 ln b) of the pair with r rotations within L.

    Args:
        rotations: the number of rotations r.
        dim: the rotary dim d.
        base: the base b.
        length: the length L in positions.

    Returns:
        The index of the pair.

    >>> round(pair_index(1, 128, 10000.0, 4096), 6)
    45.026881
    """
    return dim * math.log(length / (math.tau * rotations)) / (2 * math.log(base))


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """Compute YaRN's attention factor f(m) = 0.1 m ln s + 1, which is 1 for s <= 1.

    Args:
        factor: the scaling factor s.
        m: the multiplier m of the logarithm, such as DeepSeek's mscale.

    Returns:
        The factor f(m).

    >>> yarn_mscale(40.0)
    1.3688879454113936
    """
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class YaRN(Scaling):
    """YaRN scaling: pairs with many rotations keep theta, those with few get theta / s.

    low = floor(index(beta_fast)), high = ceil(index(beta_slow)), clamped to 0 and d - 1, where
    index is `pair_index`
    ramp_i = clamp((i - low) / (high - low), 0, 1)
    theta'_i = (1 - ramp_i) theta_i + ramp_i theta_i / s
    rotary factor f(1), or DeepSeek's f(mscale) / f(mscale_all_dim), f(m) = 0.1 m ln s + 1; softmax
    factor f(mscale_all_dim)^2

    Args:
        factor: the factor s.
        original_length: the trained length L.
        beta_fast, beta_slow: rotations within L; pairs above the one keep theta, below the other
            get theta / s.
        truncate: whether low and high are rounded to whole pairs (False in gpt-oss).
        ramp: "index", as in the released code and every released checkpoint, or "rotations", the
            paper's definition:
            theta' = (1 - g) theta / s + g theta,
            g = clamp((r - beta_slow) / (beta_fast - beta_slow), 0, 1).
        attention_factor: the rotary factor; None computes it as above.
        mscale, mscale_all_dim: as in a DeepSeek config; None counts as 1 and 0.

    Raises:
        ArgumentError: a number is out of range, or ramp is unknown; when used, low is above high.

    >>> from regard.positions import rope_frequencies
    >>> inv_freq, rotary_factor, softmax_factor = rope_frequencies(128, scaling=YaRN(16.0, 4096))
    >>> rotary_factor, softmax_factor
    (1.2772588722239782, 1.0)

    Source: Peng et al. 2023 (arXiv 2309.00071), definitions 2 and 3, and its released code;
    DeepSeek-AI 2024 (arXiv 2405.04434).
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
        check_above("factor", self.factor)
        check_ramp(self.original_length, self.beta_fast, self.beta_slow, self.ramp)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")
        for name in ("mscale", "mscale_all_dim"):
            check_number(name, getattr(self, name), -1e-300, math.inf, "at least 0")

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Blend the frequencies theta and theta / s by the ramp."""
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
        """Compute the pair indices low and high between which the ramp runs.

        `high` is clamped at d - 1 although pairs end at d/2 - 1, as in the released code.

        Args:
            dim: the rotary dim d.
            base: the base b.

        Returns:
            The indices low and high.

        Raises:
            ArgumentError: low is above high.
        """
        low = pair_index(self.beta_fast, dim, base, self.original_length)
        high = pair_index(self.beta_slow, dim, base, self.original_length)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low > high:
            raise ArgumentError(
                f"YaRN's ramp would run from pair {low:.6g} down to {high:.6g} (dim {dim}, base "
                f"{base}, original_length {self.original_length}); "
                'check original_length and base, or use ramp="rotations"'
            )
        return low, high + 0.001 if low == high else high

    @property
    def rotary_factor(self) -> float:
        """The factor on cos and sin: f(mscale) / f(mscale_all_dim), or f(1) without them."""
        if self.attention_factor is not None:
            return self.attention_factor
        mscale = 1.0 if self.mscale is None else self.mscale
        return yarn_mscale(self.factor, mscale) / yarn_mscale(self.factor, self.mscale_all_dim or 0)


@dataclass(frozen=True)
class DynamicYaRN(Scaling):
    """YaRN scaling whose factor follows the length l: s = max(1, l / L).

    Args:
        original_length: the trained length L.
        beta_fast, beta_slow, truncate, ramp: as in `YaRN`.

    Raises:
        ArgumentError: as for `YaRN`; when used, there is no length.

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

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Apply `YaRN` with the factor of the present length."""
        L = self.original_length
        factor = max(1.0, require_length(self, rope.length) / L)
        return YaRN(factor, L, self.beta_fast, self.beta_slow, self.truncate, self.ramp).scale(rope)


def check_ramp(original_length: int, beta_fast: float, beta_slow: float, ramp: str) -> None:
    """Check the arguments that define YaRN's ramp."""
    check_above("original_length", original_length)
    check_above("beta_slow", beta_slow)
    check_above("beta_fast", beta_fast)
    check_increasing("beta_slow", beta_slow, "beta_fast", beta_fast)
    if ramp not in ("index", "rotations"):
        raise ArgumentError(
            f'ramp is {ramp!r}; it must be "index" (released code) or "rotations" (paper)'
        )


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """LongRoPE scaling: searched divisors, one list up to the trained length, one beyond.

    theta'_i = theta_i / ext_i,  ext = short if length <= L else long
    rotary factor sqrt(1 + ln s / ln L)

    Args:
        short_factor, long_factor: the two lists, each with one factor for each of the d/2 pairs.
        original_length: the trained length L.
        factor: the factor s, usually max_position_embeddings / L.
        attention_factor: the rotary factor; None computes it as above.

    Raises:
        ArgumentError: a number or a list does not fit; when used, there is no length.

    >>> from regard.positions import rope_frequencies
    >>> scaling = LongRoPE((1.0, 2.0), (4.0, 8.0), 4096, 32.0)
    >>> rope_frequencies(4, scaling=scaling, length=4097).inv_freq.tolist()
    [0.25, 0.00125]

    Source: Ding et al. 2024 (arXiv 2402.13753); the rotary factor: the code released with Phi-3.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_length: int
    factor: float
    attention_factor: float | None = None
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a tuple is hashable
            for i, value in enumerate(getattr(self, name)):
                check_above(f"{name}[{i}]", value)
        check_above("original_length", self.original_length, above=1)
        check_above("factor", self.factor)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Divide each frequency theta_i by ext_i, from the list for the present length."""
        long = require_length(self, rope.length) > self.original_length
        name, ext = (
            ("long_factor", self.long_factor) if long else ("short_factor", self.short_factor)
        )
        if len(ext) != len(rope.theta):
            raise ArgumentError(
                f"{name} has length {len(ext)}; it must have one number for each of the "
                f"{plural(len(rope.theta), 'rotary pair')}"
            )
        ratio = torch.tensor(ext, dtype=torch.float64, device="cpu")
        return RopeFrequencies(rope.theta / ratio, self.rotary_factor, 1.0)

    @property
    def rotary_factor(self) -> float:
        """The factor on cos and sin: sqrt(1 + ln s / ln L), or 1 for s <= 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_length))


def critical_dimension(dim: int, base: float, length: int) -> int:
    """Compute the number of dims with a rotation within the trained length: 2 ceil((d/2) log_b(T /
    (2 pi))).

    The other dims saw a part of their period: longer sequences have angles never seen.

    Args:
        dim: the rotary dim d.
        base: the base b.
        length: the trained length T.

    Returns:
        The number of dims.

    Raises:
        ArgumentError: base is not above 1, or dim or length not above 0.

    >>> critical_dimension(128, 10000.0, 4096)
    92

    Source: Liu et al. 2023 (arXiv 2310.05209).
    """
    check_above("dim", dim)
    check_above("base", base, above=1)
    check_above("length", length)
    return min(dim, max(0, 2 * math.ceil(pair_index(1, dim, base, length))))


def extrapolation_length(dim: int, base: float, critical: int) -> float:
    """Compute the length after fine-tuning with a larger base: 2 pi b^(d_extra / d) positions.

    Args:
        dim: the rotary dim d.
        base: the base b of the fine-tuning.
        critical: the critical dimension d_extra of the pretraining.

    Returns:
        The length in positions.

    Raises:
        ArgumentError: base is not above 1, or dim not above 0.

    >>> round(extrapolation_length(128, 1e6, critical=92))
    129027

    Source: Liu et al. 2023 (arXiv 2310.05209).
    """
    check_above("dim", dim)
    check_above("base", base, above=1)
    result: float = math.tau * base ** (critical / dim)
    return result


def critical_base(length: int, tuned: int, base: float = 10000.0) -> float:
    """Compute the base b0 = b^(log_{T/2pi}(T_tune/2pi)), above which tuning extends the context.

    Args:
        length: the trained length T.
        tuned: the length T_tune of the fine-tuning.
        base: the base b of the pretraining.

    Returns:
        The base b0.

    Raises:
        ArgumentError: a length is 6 or less, or base not above 1.

    >>> round(critical_base(4096, 16384), 3)
    71738.436

    Source: Liu et al. 2023 (arXiv 2310.05209).
    """
    check_above("length", length, above=6)
    check_above("tuned", tuned, above=6)
    check_above("base", base, above=1)
    result: float = base ** (math.log(tuned / math.tau) / math.log(length / math.tau))
    return result


def small_bases(length: int) -> tuple[float, float, float]:
    """Compute the bases 2T/pi, T/pi and T/(2 pi), for a quarter, a half and a whole period.

    Args:
        length: the length T.

    Returns:
        The three bases.

    Raises:
        ArgumentError: length is not above 0.

    >>> [round(b, 2) for b in small_bases(4096)]
    [2607.59, 1303.8, 651.9]

    Source: Liu et al. 2023 (arXiv 2310.05209).
    """
    check_above("length", length)
    return 2 * length / math.pi, length / math.pi, length / math.tau


def long_term_decay(
    dim: int, base: float, distances: Float64[Tensor, " m"] | range
) -> Float64[Tensor, " m"]:
    """Compute B(m) = sum_i cos(m theta_i), by which a similar key exceeds a random one.

    Where B is negative, an unrelated token gets a higher score than a similar one.

    Args:
        dim: the rotary dim d, even.
        base: the base b.
        distances: the distances m, fp64 or a range.

    Returns:
        B(m) for each distance, fp64.

    Raises:
        ArgumentError: dim is odd or below 2, or base is not above 1.

    >>> [round(b, 6) for b in long_term_decay(128, 10000.0, range(2)).tolist()]
    [64.0, 62.093684]

    Source: Men et al. 2024 (arXiv 2405.14591).
    """
    if dim < 2 or dim % 2:
        raise ArgumentError(f"dim is {dim}; rotary pairs need an even dim of at least 2")
    check_above("base", base, above=1)
    m = (
        torch.tensor(distances, dtype=torch.float64, device="cpu")
        if isinstance(distances, range)
        else distances
    )
    return (m[:, None] * base_frequencies(base, dim, dim // 2).to(m.device)).cos().sum(-1)


def base_reaches(dim: int, base: float, length: int) -> bool:
    """Return whether B(m) of `long_term_decay` is at least 0 for every distance m up to a length.

    Args:
        dim: the rotary dim d, even.
        base: the base b.
        length: the length in positions.

    Returns:
        Whether the base supports the length.

    Raises:
        ArgumentError: dim is odd or below 2, or base is not above 1.

    >>> [base_reaches(128, base, 1024) for base in (4293.0, 4294.0, 5000.0)]
    [False, True, False]

    Source: Men et al. 2024 (arXiv 2405.14591).
    """
    return bool((long_term_decay(dim, base, range(length + 1)) >= 0).all())
