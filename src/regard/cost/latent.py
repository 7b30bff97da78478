"""What multi-head latent attention keeps and computes, in its forms; arguments are sizes, results are exact integers."""

from __future__ import annotations

from regard.cost.flops import attention_flops


def latent_numbers(kv_rank: int, rope_dim: int) -> int:
    """Numbers that one token takes in a cache of latents: the latent, and the one rotary key that all heads share.

    >>> latent_numbers(512, 64)  # DeepSeek-V3
    576

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), table 1.
    """
    return kv_rank + rope_dim


def naive_numbers(H: int, nope_dim: int, rope_dim: int, value_dim: int) -> int:
    """Numbers that one token takes where keys and values of every head are kept.

    >>> naive_numbers(128, 128, 64, 128)  # DeepSeek-V3
    40960
    """
    return H * (nope_dim + rope_dim + value_dim)


def recall_flops(keys: int, H: int, kv_rank: int, nope_dim: int, value_dim: int) -> int:
    """FLOPs of expanding so many latents to keys and values of all heads: 2 S r H (d_nope + d_v).

    >>> recall_flops(1024, 128, 512, 128, 128)
    34359738368
    """
    return 2 * keys * kv_rank * H * (nope_dim + value_dim)


def expand_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """FLOPs of expanding all latents and attending with the last queries under a causal mask.

    2 S r H (d_nope + d_v) + 2 H n (d_nope + d_rope + d_v), n pairs

    >>> expand_flops(1, 1024, 128, 512, 128, 64, 128)
    34443624448
    """
    return recall_flops(keys, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), nope_dim + rope_dim, value_dim
    )


def absorb_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """FLOPs of taking queries to the latents, attending there, and taking the result to the values of each head.

    2 T H r (d_nope + d_v) + 2 H n (2 r + d_rope), n pairs

    >>> absorb_flops(1, 1024, 128, 512, 128, 64, 128)
    318767104
    """
    return recall_flops(queries, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), kv_rank + rope_dim, kv_rank
    )


def absorbing_is_cheaper(
    queries: int, keys: int, *, kv_rank: int, nope_dim: int, value_dim: int
) -> bool:
    """Whether `absorb_flops` is below `expand_flops`; the heads and the rotary dim cancel.

    r (d_nope + d_v) (S - T) > n (2 r - d_nope - d_v), n pairs: at DeepSeek-V3's sizes, up to 170 queries against many keys

    >>> size = {"kv_rank": 512, "nope_dim": 128, "value_dim": 128}
    >>> [absorbing_is_cheaper(T, 65536, **size) for T in (1, 170, 171)], absorbing_is_cheaper(1, 1, **size)
    ([True, True, False], False)
    """
    saved = kv_rank * (nope_dim + value_dim) * (keys - queries)
    return saved > causal_pairs(queries, keys) * (2 * kv_rank - nope_dim - value_dim)


def causal_pairs(queries: int, keys: int) -> int:
    """Query-key pairs of the last T of S tokens under a causal mask: T S - T (T - 1) / 2, T at most S.

    >>> causal_pairs(3, 5)
    12
    """
    return queries * keys - queries * (queries - 1) // 2
