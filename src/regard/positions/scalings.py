"""Rotary positions for contexts longer than those trained: scalings of the frequencies (linear,
NTK, YaRN, Llama 3, LongRoPE), and how far a base reaches without them.

Letters: d is the rotary dim, b the base, T the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from regard.arguments import check_number
from regard.errors import ArgumentError, ArgumentTypeError


class RopeFrequencies(NamedTuple):
    """What a rotary scheme comes to.

    inv_freq: radians per position of each pair, fp64 [rotary_dim / 2].
    rotary_factor: multiplies cos and sin, hence each rotated query and key.
    softmax_factor: multiplies the softmax scale, hence the rotated and the other dims alike. Never
        folded into
        rotary_factor: the two are equal only where the whole head is rotary.
    """

    inv_freq: Float64[Tensor, " n"]
    rotary_factor: float
    softmax_factor: float


class UnscaledFrequencies(NamedTuple):
    """What a scaling starts from: theta_i = base^(-2i/dim), fp64 [n], and the length of the
    sequence where it is known.
    """

    theta: Float64[Tensor, " n"]
    base: float
    dim: int
    length: int | None


@dataclass(frozen=True)
class Scaling:
    """Base of the scalings: frequencies become others.

    `needs_length` says that the result depends on how long the sequence is now. Keys that were
    rotated under one length and are scored under another are no longer a function of distance: see
    `Rotary`.
    """

    needs_length: ClassVar[bool] = False

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """The frequencies in place of theta, and the two factors."""
        raise NotImplementedError


def base_frequencies(base: float, dim: int, pairs: int) -> Float64[Tensor, " n"]:
    """theta_i = base^(-2i/dim) for i < pairs, fp64, on the CPU whatever the default device is."""
    i = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return base ** (-2 * i / dim)


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: theta_i / s, the same as positions p / s.

    Args:
        factor: s.

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
        """theta / s."""
        return RopeFrequencies(rope.theta / self.factor, 1.0, 1.0)


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware, static: b' = b s^(d/(d-2)). The lowest frequency is that of `LinearScaling`, the highest
    is unchanged.

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
        check_above("factor", self.factor)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """base'^(-2i/d)."""
        base = self.base(rope.base, rope.dim)
        return RopeFrequencies(base_frequencies(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int) -> float:
        """b s^(d/(d-2))."""
        return base * math.pow(self.factor, ntk_exponent(dim))


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK that follows the length l: b' = b (a l / L - (a - 1))^(d/(d-2)) for l > L, unchanged up
    to L.

    Args:
        factor: a. Hugging Face's "dynamic" has its factor here; a = 1 is the dynamic scaling of the
            YaRN paper.
        original_length: L. Hugging Face reads it from max_position_embeddings.

    Raises:
        ArgumentError: factor or original_length is not above 0; when used, no length, or a rotary
            dim below 4.

    >>> round(DynamicNTK(2.0, 4096).base(10000.0, 128, length=8192), 4)
    30527.7367

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.3; its use with a cache: see `Rotary`.
    """

    factor: float
    original_length: int
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_above("factor", self.factor)
        check_above("original_length", self.original_length)

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """base'^(-2i/d)."""
        base = self.base(rope.base, rope.dim, require_length(self, rope.length))
        return RopeFrequencies(base_frequencies(base, rope.dim, len(rope.theta)), 1.0, 1.0)

    def base(self, base: float, dim: int, length: int) -> float:
        """b (a l / L - (a - 1))^(d/(d-2)), with l at least L."""
        stretch = max(length, self.original_length) / self.original_length
        return base * math.pow(self.factor * stretch - (self.factor - 1), ntk_exponent(dim))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1: keep the pairs with r > high, divide by s those with r < low, blend linearly in r
    between.

    theta' = (1 - m) theta / s + m theta
    m = clamp((r - low) / (high - low), 0, 1),  r = L theta / (2 pi)

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
            check_above(name, value)
        check_increasing(
            "low_freq_factor", self.low_freq_factor, "high_freq_factor", self.high_freq_factor
        )

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """Keep, blend or divide each pair."""
        theta, low, high = rope.theta, self.low_freq_factor, self.high_freq_factor
        m = ((self.original_length * theta / math.tau - low) / (high - low)).clamp(0, 1)
        return RopeFrequencies((1 - m) * theta / self.factor + m * theta, 1.0, 1.0)


def ntk_exponent(dim: int) -> float:
    """d / (d - 2)."""
    if dim < 4:
        raise ArgumentError(
            f"NTK scaling of a rotary dim of {dim}: its exponent d/(d-2) needs at least 4; use "
            "Linear"
        )
    return dim / (dim - 2)


def require_length(scaling: Scaling, length: int | None) -> int:
    """The length, which a scaling cannot do without."""
    if length is None:
        raise ArgumentError(
            f"length is None, and {type(scaling).__name__} depends on it; pass the length of the "
            "sequence, "
            "or the length to freeze the frequencies at"
        )
    return length


def check_above(name: str, value: float, *, above: float = 0) -> None:
    """A finite number above a bound."""
    if value is None:
        raise ArgumentTypeError(f"{name} is None; it must be a number above {above}")
    check_number(name, value, above, math.inf, f"above {above}")


def check_increasing(low_name: str, low: float, high_name: str, high: float) -> None:
    """low < high."""
    if not low < high:
        raise ArgumentError(
            f"{low_name} is {low} and {high_name} is {high}; the first must be below the second"
        )


def pair_index(rotations: float, dim: int, base: float, length: int) -> float:
    """The (fractional) pair that makes so many rotations within a length: d ln(L / (2 pi r)) / (2
    ln b).

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

    low = floor(index(beta_fast)), high = ceil(index(beta_slow)), clamped to 0 and d - 1, where
    index is `pair_index`
    ramp_i = clamp((i - low) / (high - low), 0, 1)
    theta'_i = (1 - ramp_i) theta_i + ramp_i theta_i / s
    rotary factor f(1) = 0.1 ln s + 1, or DeepSeek's f(mscale) / f(mscale_all_dim), f(m) = 0.1 m ln
    s + 1; softmax factor f(mscale_all_dim)^2

    Args:
        factor: s.
        original_length: L.
        beta_fast, beta_slow: pairs with more rotations within L than beta_fast are kept, with fewer
            than beta_slow divided.
        truncate: whether low and high are rounded to whole pairs (gpt-oss does not).
        ramp: "index", as in the released code and every released checkpoint, or "rotations", the
            paper's definition:
            theta' = (1 - g) theta / s + g theta,
            g = clamp((r - beta_slow) / (beta_fast - beta_slow), 0, 1).
        attention_factor: the rotary factor, if not the one above.
        mscale, mscale_all_dim: as in a DeepSeek config, where they count as 1 and 0 when absent.

    Raises:
        ArgumentError: a number is not above 0, beta_slow is not below beta_fast, or ramp is
            unknown; when used, the ramp has no pairs to run over.

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
        check_above("factor", self.factor)
        check_ramp(self.original_length, self.beta_fast, self.beta_slow, self.ramp)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")
        for name in ("mscale", "mscale_all_dim"):
            check_number(name, getattr(self, name), -1e-300, math.inf, "at least 0")

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
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
                f"YaRN's ramp would run from pair {low:.6g} down to {high:.6g} (dim {dim}, base "
                f"{base}, original_length "
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

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """`YaRN` with the factor of this length."""
        L = self.original_length
        factor = max(1.0, require_length(self, rope.length) / L)
        return YaRN(factor, L, self.beta_fast, self.beta_slow, self.truncate, self.ramp).scale(rope)


def check_ramp(original_length: int, beta_fast: float, beta_slow: float, ramp: str) -> None:
    """The arguments that shape the ramp."""
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
    """A searched divisor for each pair, one list up to the trained length L and another beyond it.

    theta'_i = theta_i / ext_i,  ext = short if length <= L else long
    rotary factor sqrt(1 + ln s / ln L)

    Args:
        short_factor, long_factor: d/2 numbers each.
        original_length: L.
        factor: s, usually max_position_embeddings / L.
        attention_factor: the rotary factor, if not the one above.

    Raises:
        ArgumentError: a number is not above 0, or the lists differ in length; when used, no length,
            or lists that are not as long as there are pairs.

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
            object.__setattr__(self, name, tuple(getattr(self, name)))  # hashable, also from a list
            for i, value in enumerate(getattr(self, name)):
                check_above(f"{name}[{i}]", value)
        check_above("original_length", self.original_length, above=1)
        check_above("factor", self.factor)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")

    def scale(self, rope: UnscaledFrequencies) -> RopeFrequencies:
        """theta / ext, with the list that the length asks for."""
        long = require_length(self, rope.length) > self.original_length
        name, ext = (
            ("long_factor", self.long_factor) if long else ("short_factor", self.short_factor)
        )
        if len(ext) != len(rope.theta):
            raise ArgumentError(
                f"{name} has {len(ext)} numbers and there are {len(rope.theta)} rotary pairs; "
                "give one number per pair"
            )
        ratio = torch.tensor(ext, dtype=torch.float64, device="cpu")
        return RopeFrequencies(rope.theta / ratio, self.rotary_factor, 1.0)

    @property
    def rotary_factor(self) -> float:
        """sqrt(1 + ln s / ln L), 1 where s <= 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_length))


def critical_dimension(dim: int, base: float, length: int) -> int:
    """How many dims made at least one full turn within the trained length: 2 ceil((d/2) log_b(T /
    (2 pi))).

    The others met only part of a period, so that longer sequences show them angles they never saw.

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
    """How far a model reads that was tuned with a new, larger base: T_extra = 2 pi b^(d_extra / d)
    positions.

    Args:
        dim: d.
        base: the base b of the tuning.
        critical: d_extra, the critical dimension of the pretraining.

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
    """The base above which tuning on a longer length reaches beyond it: b0 =
    b^(log_{T/2pi}(T_tune/2pi)).

    Args:
        length: the trained length T.
        tuned: the length T_tune of the tuning.
        base: the base b of the pretraining.

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
    """The bases 2T/pi, T/pi and T/(2 pi), below which every dim meets a quarter, half and whole
    turn of cos.

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
    """How much better a like key scores than a random one at each distance: B(m) = sum_i cos(m
    theta_i).

    Where B is negative, the model prefers an unrelated token to a similar one.

    Args:
        dim: d, even.
        base: b.
        distances: m, fp64 or a range.

    Raises:
        ArgumentError: dim is odd or below 2, or base is not above 1.

    >>> [round(b, 6) for b in long_term_decay(128, 10000.0, range(2)).tolist()]
    [64.0, 62.093684]

    Source: Men et al. 2024 (arXiv 2405.14591).
    """
    if dim < 2 or dim % 2:
        raise ArgumentError(f"dim is {dim}; rotary pairs need an even dim of at least 2")
    check_above("base", base, above=1)
    m = torch.tensor(distances, dtype=torch.float64) if isinstance(distances, range) else distances
    return (m[:, None] * base_frequencies(base, dim, dim // 2).to(m.device)).cos().sum(-1)


def base_reaches(dim: int, base: float, length: int) -> bool:
    """Whether B(m) >= 0 for every distance m <= length. The bases for which it holds are not an
    interval.

    Raises:
        ArgumentError: as `long_term_decay`.

    >>> [base_reaches(128, base, 1024) for base in (4293.0, 4294.0, 5000.0)]
    [False, True, False]

    Source: Men et al. 2024 (arXiv 2405.14591).
    """
    return bool((long_term_decay(dim, base, range(length + 1)) >= 0).all())
