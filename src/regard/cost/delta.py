"""The delta rule: the numbers that its state holds, and what one token costs."""

from __future__ import annotations


def delta_state(groups: int, D: int, E: int) -> int:
    """Numbers of the state S, whatever the length: D E per key/value head.

    >>> delta_state(groups=16, D=128, E=128)
    262144

    Source: Yang et al. 2024 (arXiv 2406.06484), section 2.2.
    """
    return groups * D * E


def delta_flops(heads: int, groups: int, D: int, E: int, *, gated: bool = False) -> int:
    """FLOPs of one token behind its projections, step by step: H reads, and per key/value head one correction.

    A read is S^T q, 2 D E; a correction is S^T k, 2 D E, beta (v - S^T k), 2 E, and the outer product added to S, 2 D E;
    a decay multiplies the state, D E.

    >>> delta_flops(heads=2, groups=1, D=4, E=4), delta_flops(heads=2, groups=1, D=4, E=4, gated=True)
    (136, 152)

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 2; with decay: arXiv 2412.06464, equation 10.
    """
    return heads * 2 * D * E + groups * (4 * D * E + 2 * E + (D * E if gated else 0))
