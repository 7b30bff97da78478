"""The least that attention reads and writes, what training it computes, and the pairs that a window leaves."""

from __future__ import annotations


def window_pairs(queries: int, keys: int, window: int) -> int:
    """Query-key pairs of the last T of S tokens under a causal window of W: the sum of min(W, i + 1), T at most S.

    >>> window_pairs(5, 5, 2), window_pairs(1, 5, 2), window_pairs(3, 5, 9)
    (9, 2, 12)
    """
    first = keys - queries + 1  # how many keys the first query may see, but for the window
    short = max(0, min(queries, window - first))  # queries that see fewer than W
    return short * first + short * (short - 1) // 2 + (queries - short) * window


def attention_bytes(
    *, B: int, H: int, G: int, T: int, S: int, D: int, E: int, itemsize: int
) -> int:
    """Bytes of q, k, v and the output, each moved once: itemsize B (T H + S G) (D + E).

    >>> attention_bytes(B=1, H=32, G=8, T=1, S=32768, D=128, E=128, itemsize=4) // 2**20
    256
    """
    return itemsize * B * (T * H + S * G) * (D + E)


def training_flops(pairs: int, D: int, E: int) -> int:
    """FLOPs of a call and its gradient, which computes the scores again: n (8 D + 6 E), n pairs.

    q k^T and p v; then q k^T, dO v^T, p^T dO, ds k and ds^T q. For D = E that is 3.5 times the call alone.

    >>> training_flops(1000, 64, 64) / (4 * 1000 * 64)
    3.5

    Source: Dao 2023 (arXiv 2307.08691), section 4.1: a backward pass is 2.5 times the forward.
    """
    return pairs * (8 * D + 6 * E)


def training_bytes(*, B: int, H: int, G: int, T: int, S: int, D: int, E: int, itemsize: int) -> int:
    """Bytes of a call and its gradient: q, k, v and out twice, and as much again for dO, dq, dk and dv.

    >>> sizes = {"B": 1, "H": 1, "G": 1, "T": 8, "S": 8, "D": 4, "E": 4}
    >>> training_bytes(**sizes, itemsize=4) / attention_bytes(**sizes, itemsize=4)
    3.0
    """
    return 3 * attention_bytes(B=B, H=H, G=G, T=T, S=S, D=D, E=E, itemsize=itemsize)
