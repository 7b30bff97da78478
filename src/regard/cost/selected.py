"""What selected attention reads and computes for one decoded token: sizes in, numbers out."""

from __future__ import annotations


def block_tokens(context: int, size: int, blocks: int) -> int:
    """Keys that the last token sees in its own block and the `blocks` - 1 fullest others.

    The own block ends at the token: min(blocks - 1, blocks in front) size + (context - 1) mod size + 1.

    >>> block_tokens(8192, 64, 16)
    1024
    >>> block_tokens(65, 64, 16)  # one token in its own block, 64 in front
    65
    """
    own = context - 1
    return min(blocks - 1, own // size) * size + own % size + 1


def compressed_tokens(context: int, compress: int, stride: int) -> int:
    """Compressed tokens that the last token sees: those whose blocks are complete, floor((s - l) / d) + 1.

    >>> compressed_tokens(8192, 32, 16), compressed_tokens(31, 32, 16)
    (511, 0)
    """
    return (context - compress) // stride + 1 if context >= compress else 0


def block_pairs(context: int, size: int, blocks: int) -> int:
    """Query-key pairs of selected blocks over the first `context` tokens: the sum of `block_tokens`, in closed form.

    >>> block_pairs(100, 8, 3) == sum(block_tokens(t, 8, 3) for t in range(1, 101))
    True
    """
    whole, rest = divmod(context, size)
    own = whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    most = blocks - 1
    full = min(most, whole)
    # the sum of min(most, b) over whole blocks b, and what the last, open one adds
    others = size * (full * (full - 1) // 2 + (whole - full) * most) + rest * full
    return own + size * others


def compressed_pairs(context: int, compress: int, stride: int) -> int:
    """Query-key pairs of compressed tokens over the first `context` tokens: the sum of `compressed_tokens`.

    n (s - l + 1) - d n (n - 1) / 2, n = `compressed_tokens`: number j is seen from the token l + j d on

    >>> compressed_pairs(100, 8, 4) == sum(compressed_tokens(t, 8, 4) for t in range(1, 101))
    True
    """
    n = compressed_tokens(context, compress, stride)
    return n * (context - compress + 1) - stride * n * (n - 1) // 2


def nsa_tokens(context: int, stride: int, select: int, count: int, window: int) -> int:
    """Tokens that one decoding step of native sparse attention reads, as the paper counts them: s / d + n l' + w.

    Never more than the context in a branch. The exact number of compressed tokens is `compressed_tokens`, which is
    l / d - 1 less.

    >>> nsa_tokens(8192, 16, 64, 16, 512)
    2048

    Source: Yuan et al. 2025 (arXiv 2502.11089), table 4.
    """
    return context // stride + min(context, count * select) + min(context, window)


def compression_flops(blocks: int, compress: int, dim: int, hidden: int) -> int:
    """FLOPs of a two-layer network on the l D numbers of each compressed block: 2 C (l D h + h D).

    >>> compression_flops(1, 32, 128, 128)
    1081344
    """
    return 2 * blocks * (compress * dim * hidden + hidden * dim)


def gate_flops(blocks: int, heads: int, dim: int) -> int:
    """FLOPs of one query's scores against block means: 2 H N D.

    >>> gate_flops(64, 32, 128)
    524288
    """
    return 2 * heads * blocks * dim


def indexer_flops(keys: int, heads: int, dim: int) -> int:
    """FLOPs of one query's index scores: 2 J S d for the products, 2 J S for the weighted sum.

    >>> indexer_flops(1, 64, 128)
    16512
    """
    return 2 * heads * keys * dim + 2 * heads * keys
