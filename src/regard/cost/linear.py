"""Linear attention, retention and gated linear attention: the numbers of the state, and what one token costs."""

from __future__ import annotations


def linear_state(groups: int, D: int, E: int, *, normalised: bool = False) -> int:
    """Numbers of the state, whatever the length: S has D E per key/value head, a normaliser z has D.

    >>> linear_state(groups=8, D=64, E=64), linear_state(groups=8, D=64, E=64, normalised=True)
    (32768, 33280)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 and 19.
    """
    return groups * D * (E + 1 if normalised else E)


def linear_flops(
    heads: int, groups: int, D: int, E: int, *, normalised: bool = False, decayed: bool = False
) -> int:
    """FLOPs of one token behind its projections, step by step: one read per head, one write per key/value head.

    A read is S^T q, 2 D E; a write is k v^T and the sum, 2 D E; a decay multiplies the state, D E. A normaliser is read by
    z . q and a division, 2 D + E, and written by D additions. Feature maps are not counted.

    >>> linear_flops(heads=2, groups=1, D=4, E=4), linear_flops(heads=2, groups=1, D=4, E=4, normalised=True)
    (96, 124)
    >>> linear_flops(heads=2, groups=1, D=4, E=4, decayed=True)
    112

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; decay: Sun et al. 2023 (arXiv 2307.08621), equation 6.
    """
    read = 2 * D * E + (2 * D + E if normalised else 0)
    write = 2 * D * E + (D * E if decayed else 0) + (D if normalised else 0)
    return heads * read + groups * write
