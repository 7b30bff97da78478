"""How far rotary positions reach: the dims that turned fully in training, and what a base allows.

Letters: d rotary dim, b base, T length. All plain numbers, no tensors but the distances.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from regard.errors import ArgumentError
from regard.positions.scalings import pair_index, plain, positive


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
    positive("dim", dim)
    positive("base", base, above=1)
    positive("length", length)
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
    positive("dim", dim)
    positive("base", base, above=1)
    return math.tau * math.pow(base, critical / dim)


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
    positive("length", length, above=6)
    positive("tuned", tuned, above=6)
    positive("base", base, above=1)
    return math.pow(base, math.log(tuned / math.tau) / math.log(length / math.tau))


def small_bases(length: int) -> tuple[float, float, float]:
    """The bases 2T/pi, T/pi and T/(2 pi), below which every dim meets a quarter, half and whole
    turn of cos.

    Raises:
        ArgumentError: length is not above 0.

    >>> [round(b, 2) for b in small_bases(4096)]
    [2607.59, 1303.8, 651.9]

    Source: Liu et al. 2023 (arXiv 2310.05209).
    """
    positive("length", length)
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
    positive("base", base, above=1)
    m = torch.tensor(distances, dtype=torch.float64) if isinstance(distances, range) else distances
    return (m[:, None] * plain(base, dim, dim // 2).to(m.device)).cos().sum(-1)


def base_reaches(dim: int, base: float, length: int) -> bool:
    """Whether B(m) >= 0 for every distance m <= length. The bases for which it holds are not an
    interval.

    Raises:
        ArgumentError: as `long_term_decay`.

    >>> base_reaches(128, 4293.0, 1024), base_reaches(128, 4294.0, 1024), base_reaches(128, 5000.0, 1024)
    (False, True, False)

    Source: Men et al. 2024 (arXiv 2405.14591).
    """
    return bool((long_term_decay(dim, base, range(length + 1)) >= 0).all())
