"""Infini-attention: the numbers that its memory holds, and what one token costs."""

from __future__ import annotations

from regard.cost.flops import attention_flops


def infini_state(groups: int, D: int, E: int, layers: int = 1) -> int:
    """Numbers of the compressive memory, M and z, whatever the length: D (E + 1) per key/value head and layer.

    >>> infini_state(groups=8, D=128, E=128, layers=12)  # the paper's model: "1.6M (114x)"
    1585152

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), tables 1 and 2.
    """
    return layers * groups * D * (E + 1)


def infini_flops(heads: int, groups: int, seen: int, D: int, E: int, *, delta: bool = False) -> int:
    """FLOPs of one token behind its projections: local softmax over `seen` keys, one read per head, one write per group.

    A read is sigma(q) M and sigma(q) z, 2 D (E + 1); a write is sigma(k)^T v and the sum of sigma(k), 2 D E + D; under the
    delta rule every key reads as well.

    >>> infini_flops(heads=2, groups=1, seen=10, D=4, E=4)
    436

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 9.
    """
    read, write = 2 * D * (E + 1), 2 * D * E + D
    reads = heads + (groups if delta else 0)
    return attention_flops(heads * seen, D, E) + reads * read + groups * write
