"""Floating-point operations; a multiplication and an addition are two."""


def attention_flops(pairs: int, D: int, E: int) -> int:
    """FLOPs of scores and mix for a number of query-key pairs (over all batch rows and query heads).

    2 pairs D for q k^T and 2 pairs E for p v; the softmax itself is not counted, as is usual.

    >>> attention_flops(pairs=8 * 1024 * 1024, D=64, E=64)  # 8 heads, 1024 tokens, every pair
    2147483648

    Source: Dao 2023 (arXiv 2307.08691), section 4.1, for D = E.
    """
    return 2 * pairs * D + 2 * pairs * E
