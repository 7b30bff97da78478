"""The rotary frequencies of a head: how fast each pair of dims turns."""

from __future__ import annotations

import torch

from regard.arguments import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions.scalings import Linear, RopeFrequencies, Scaling, Unscaled, plain


def rope_frequencies(
    dim: int,
    base: float = 10000.0,
    *,
    scaling: Scaling | None = None,
    rotary_dim: int | None = None,
    proportional: bool = False,
    length: int | None = None,
) -> RopeFrequencies:
    """Radians per position of each rotary pair, fp64, and the factors on cos and sin and on the softmax scale.

    theta_i = base^(-2i/d), i < rotary_dim / 2, with d = rotary_dim; if proportional, d = dim and the pairs beyond
    rotary_dim / 2 stand still (frequency 0). Then the scaling.

    Args:
        dim: the head dim D, even.
        base: b.
        scaling: one of `Linear`, `NTK`, `DynamicNTK`, `YaRN`, `DynamicYaRN`, `Llama3`, `LongRoPE`.
        rotary_dim: how many dims turn, all by default.
        proportional: whether to divide exponents by the head dim: p-RoPE, as in Gemma 4. The result then has D/2 pairs,
            so that with layout "half" other dims turn than under partial rotary.
        length: how long the sequence is; for the scalings that depend on it.

    Raises:
        ArgumentError: dim or rotary_dim is odd or out of range, base is not above 1, or the scaling does not fit.
        ArgumentTypeError: scaling is not a scaling.

    >>> rope_frequencies(4).inv_freq.tolist()
    [1.0, 0.01]
    >>> rope_frequencies(8, rotary_dim=4).inv_freq.tolist()
    [1.0, 0.01]
    >>> rope_frequencies(8, rotary_dim=4, proportional=True).inv_freq.tolist()
    [1.0, 0.1, 0.0, 0.0]

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2; proportional: Barbero et al. 2024 (arXiv 2410.06205).
    """
    turning = dim if rotary_dim is None else rotary_dim
    _check(dim, base, turning, scaling, length, proportional=proportional)
    divisor = dim if proportional else turning
    theta = plain(base, divisor, turning // 2)
    if scaling is None:
        result = RopeFrequencies(theta, 1.0, 1.0)
    else:
        result = scaling.scale(Unscaled(theta, base, divisor, length))
    if not proportional:
        return result
    still = theta.new_zeros((dim - turning) // 2)
    return result._replace(inv_freq=torch.cat((result.inv_freq, still)))


def _check(
    dim: int,
    base: float,
    turning: int,
    scaling: Scaling | None,
    length: int | None,
    *,
    proportional: bool,
) -> None:
    if dim < 2 or dim % 2:
        raise ArgumentError(f"dim is {dim}; rotary pairs need an even head dim of at least 2")
    if not 0 <= turning <= dim or turning % 2:
        raise ArgumentError(
            f"rotary_dim is {turning}; it must be even, from 0 to the head dim {dim}"
        )
    check_number("base", base, 1, float("inf"), "above 1")
    if length is not None and length < 0:
        raise ArgumentError(f"length is {length}; it must be 0 or more")
    if scaling is not None and not isinstance(scaling, Scaling):
        raise ArgumentTypeError(
            f"scaling is {type(scaling).__name__}; it must be a scaling of regard.positions, such as YaRN(...), or None"
        )
    if proportional and not isinstance(scaling, Linear | None):
        raise ArgumentError(
            f"scaling {type(scaling).__name__} with proportional=True is not defined anywhere; use Linear or None"
        )
