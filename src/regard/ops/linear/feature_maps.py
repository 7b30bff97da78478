"""Feature maps with more features than channels: powers, Taylor series, random, cosines.

Linear attention then has the weights f(s) = phi(q) . phi(k) of a function of the score.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import combinations_with_replacement

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import check_positions, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import ConstantTensor, constant_in_graphs, is_compiling, random_generator
from regard.span import Positions, as_tensor


@constant_in_graphs
def monomials(dim: int, power: int) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return the monomials of a degree in `dim` variables, and roots of their multiplicities."""
    return _cached_monomials(dim, power)


@lru_cache(maxsize=64)
def _cached_monomials(
    dim: int, power: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return `monomials`; those of a few thousand features take milliseconds."""
    indices = tuple(combinations_with_replacement(range(dim), power))
    factors = tuple(
        math.sqrt(
            math.factorial(power) / math.prod(math.factorial(n) for n in Counter(index).values())
        )
        for index in indices
    )
    return tuple(zip(*indices, strict=True)), factors


def _power_features(x: Tensor, power: int) -> Tensor:
    """Return features `[..., C(D + power - 1, power)]` with phi(x) . phi(y) = (x . y)^power."""
    if is_compiling():  # a graph has the constants itself
        indices, numbers = monomials(x.shape[-1], power)
        factors = x.new_tensor(numbers)
        channels = [torch.tensor(index, device=x.device) for index in indices]
    else:
        constants = _monomial_tensors(x.shape[-1], power, x.dtype)
        factors, *channels = (constant.on(x.device) for constant in constants)
    features = factors
    for index in channels:
        features = features * x.index_select(-1, index)
    return features if channels else features.expand(*x.shape[:-1], -1)


@lru_cache(maxsize=64)
def _monomial_tensors(dim: int, power: int, dtype: torch.dtype) -> tuple[ConstantTensor, ...]:
    """Return `monomials` as tensors that travel to a device once: factors, then indices."""
    indices, factors = _cached_monomials(dim, power)
    with torch.inference_mode(False):  # so that a later call may save them for its gradient
        tensors = [
            torch.tensor(factors, dtype=dtype, device="cpu"),
            *(torch.tensor(index, device="cpu") for index in indices),
        ]
    return tuple(ConstantTensor(tensor) for tensor in tensors)


@dataclass(frozen=True)
class PowerFeatures:
    """The feature map of power attention: phi(q) . phi(k) = (q . k)^p.

    The features are the C(D + p - 1, p) products of p channels, with factors. An even power keeps
    all weights at least 0.

    Args:
        power: p, an even number of at least 2.

    Raises:
        ArgumentError, ArgumentTypeError: power is not an even int of at least 2.

    >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    >>> round(float(PowerFeatures(2)(x) @ PowerFeatures(2)(y)), 5)  # (3 - 2)^2
    1.0

    Source: Gelada et al. 2025 (arXiv 2507.04239); Aksenov et al. 2024 (arXiv 2402.10644).
    """

    power: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.power, bool) or not isinstance(self.power, int):
            raise ArgumentTypeError(f"power is {type(self.power).__name__}; it must be an int")
        if self.power < 2 or self.power % 2:
            raise ArgumentError(
                f"power is {self.power}; it must be an even number of at least 2, because weights "
                "of an odd power may be negative and have the sum 0"
            )

    def __call__(self, x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L F"]:
        """Return the features of x [..., D]."""
        return _power_features(x, self.power)

    def feature_count(self, dim: int) -> int:
        """Return the number of features of a head.

        Args:
            dim: D, the number of channels.

        Returns:
            F, the number of features.
        """
        return math.comb(dim + self.power - 1, self.power)


@dataclass(frozen=True)
class TaylorFeatures:
    """The feature map of Based: phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(D).

    There are 1 + D + D (D + 1) / 2 features.

    >>> x = torch.tensor([2.0])
    >>> round(float(TaylorFeatures()(x) @ TaylorFeatures()(-x)), 5)  # 1 - 4 + 8
    5.0

    Source: Arora et al. 2024 (arXiv 2402.18668), section 4.1.
    """

    def __call__(self, x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L F"]:
        """Return the features of x [..., D]."""
        y = x * x.shape[-1] ** -0.25
        squares = _power_features(y, 2) * 0.5**0.5
        return torch.cat([torch.ones_like(x[..., :1]), y, squares], -1)

    def feature_count(self, dim: int) -> int:
        """Return the number of features of a head.

        Args:
            dim: D, the number of channels.

        Returns:
            F, the number of features.
        """
        return 1 + dim + dim * (dim + 1) // 2


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """The positive random features of Performer: phi(q) . phi(k) is exp(q . k / sqrt(D)) on
    average.

    phi(x)_r = exp(w_r . x' - |x'|^2 / 2) / sqrt(R),  x' = x / D^(1/4)

    Directions are orthogonal in blocks of D, with Gaussian lengths, from the seed.

    Args:
        dim: D, the number of channels.
        count: R, the number of directions.
        seed: the seed of the directions.

    Raises:
        ArgumentError: a size is less than 1.

    >>> phi, x = RandomFeatures(4, 4096), torch.tensor([0.5, -0.5, 0.5, 0.5])
    >>> abs(float(phi(x) @ phi(x)) / 1.6487 - 1) < 0.1  # exp(1 / 2) = 1.6487
    True

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 and section 3.
    """

    dim: int
    count: int
    seed: int = 0
    directions: Tensor = field(init=False, repr=False, compare=False)
    _on_devices: ConstantTensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.dim, self.count) < 1:
            raise ArgumentError(
                f"RandomFeatures(dim={self.dim}, count={self.count}): each must be at least 1"
            )
        draw = random_generator(self.seed)
        normal = partial(torch.randn, generator=draw, dtype=torch.float64, device="cpu")
        blocks = -(-self.count // self.dim)
        gaussian = normal(blocks, self.dim, self.dim)
        # the sign of a column of Q depends on the library: the diagonal of R fixes it
        q, r = torch.linalg.qr(gaussian)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
        lengths = normal(blocks, self.dim, self.dim).norm(dim=-1, keepdim=True)
        directions = (q * lengths).flatten(0, 1)[: self.count]
        object.__setattr__(self, "directions", directions)
        object.__setattr__(self, "_on_devices", ConstantTensor(directions))

    def __call__(self, x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L F"]:
        """Return the features of x [..., D]."""
        if x.shape[-1] != self.dim:
            raise ArgumentError(
                f"x has {x.shape[-1]} channels; these random features are for {self.dim}"
            )
        y = x * self.dim**-0.25
        directions = self._on_devices.on(y.device).to(y.dtype)
        exponents = y @ directions.mT - y.square().sum(-1, keepdim=True) / 2
        features: Tensor = exponents.exp() * self.count**-0.5
        return features

    def feature_count(self, dim: int) -> int:
        """Return the number of features of a head.

        Args:
            dim: D, the number of channels, on which it does not depend.

        Returns:
            F, the number of features.
        """
        return self.count


def cosine_features(
    x: Float[Tensor, "B n T D"], positions: Positions, period: int
) -> Float[Tensor, "B n T F"]:
    """Return the features of cosFormer, with relu(q_i) . relu(k_j) cos(pi (i - j) / (2 period)).

    phi(x_i) = [relu(x_i) cos(a_i), relu(x_i) sin(a_i)],  a_i = pi i / (2 period)

    Beyond the period the weights are negative.

    Args:
        x: queries or keys `[B, n, T, D]`.
        positions: positions of their tokens.
        period: the distance at which the weight reaches 0, in tokens.

    Returns:
        The features `[B, n, T, 2 D]`.

    Raises:
        ArgumentError, ArgumentTypeError: x, positions or period does not fit.

    >>> x = torch.tensor([[1.0], [1.0]])[None, None]
    >>> phi = cosine_features(x, torch.tensor([[0, 4]]), 6)[0, 0]
    >>> round(float(phi[0] @ phi[1]), 6)  # cos(60 degrees)
    0.5

    Source: Qin et al. 2022 (arXiv 2202.08791), equations 8 to 10.
    """
    check_tensor("x", x)
    if x.ndim != 4:
        raise ArgumentError(f"x is {tuple(x.shape)}; it must be [batch, heads, length, dim]")
    check_positions("positions", positions, x.shape[0], x.shape[2])
    if period < 1:
        raise ArgumentError(f"period is {period}; it must be at least 1")
    where = as_tensor(positions, x.device).clamp(min=0)
    # in fp64, because an angle of a far position loses digits
    angles = where.double()[:, None, :, None] * (math.pi / (2 * period))
    positive = x.relu()
    return torch.cat([positive * angles.cos().to(x.dtype), positive * angles.sin().to(x.dtype)], -1)
