"""Softmax attention over sparse patterns: Longformer, BigBird, the Sparse Transformer."""

from __future__ import annotations

from regard.errors import ArgumentError
from regard.masks import BigBird, Causal, Dilated, Global, Mask, Strided
from regard.nn.attention import Attention
from regard.nn.longformer import Longformer
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant


@variant(
    family="softmax",
    equation="z_t = softmax over window(t) and globals, by q, k, v; a global t: over all, by q', k', v'",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1",
    causal=False,
    window=4,
    positions=(0, 6),
)
def longformer(
    dim: int,
    heads: int,
    *,
    window: int,
    positions: tuple[int, ...] = (0,),
    step: int = 1,
    head_dim: int | None = None,
    bias: bool = True,
    is_causal: bool = False,
) -> Longformer:
    """Longformer: a window around every token, and global tokens with projections of their own.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.
        window: the total width w, even: w/2 keys on either side; with is_causal, w/2 keys before the token.
        positions: the positions of the global tokens.
        step: of a dilated window, which sees every step-th key on either side, as many as without gaps.
        is_causal: the autoregressive form.

    Raises:
        ArgumentError: as for `mha`, window is odd, or step is less than 1.

    >>> print(longformer(32, 4, window=4).mask)
    window(3, ahead=2) | global((0,))

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    if window < 2 or window % 2:
        raise ArgumentError(
            f"window is {window}; it is the total width, an even number: {max(2, window - 1)} or {window + 1}"
        )
    D = head_size(dim, heads, head_dim)
    local, globally = (separate(dim, heads, heads, D, bias=bias) for _ in range(2))
    return Longformer(
        local, globally, join(dim, heads, D, bias=bias), positions=positions,
        window=window // 2 + 1, ahead=None if is_causal else window // 2,
        step=step,
    )  # fmt: skip


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - j = 0, s, 2 s, ..., (W - 1) s, and globals) v_j",
    source="Beltagy et al. 2020 (arXiv 2004.05150), section 3.1, dilated sliding window",
    window=3,
    step=2,
)
def dilated(
    dim: int,
    heads: int,
    *,
    window: int,
    step: int,
    positions: tuple[int, ...] = (),
    head_dim: int | None = None,
) -> Attention:
    """Dilated window: a token sees every s-th key of the past, W of them, and global tokens; causal.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim: as for `mha`.
        window, step: W and s.
        positions: the positions of the global tokens.

    Raises:
        ArgumentError: as for `mha`, or window or step is less than 1.

    >>> print(dilated(32, 4, window=3, step=2).mask)
    causal & dilated(3, 2)

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    mask: Mask = Dilated(window, step)
    return _under(
        Causal() & (mask | Global(positions) if positions else mask), dim, heads, head_dim
    )


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over window, global and random blocks) v_j",
    source="Zaheer et al. 2020 (arXiv 2007.14062), section 2",
    causal=False,
    block=2,
    blocks=32,
    random=2,
)
def bigbird(
    dim: int,
    heads: int,
    *,
    block: int = 64,
    blocks: int = 64,
    window: int = 3,
    random: int = 3,
    seed: int = 0,
    head_dim: int | None = None,
    bias: bool = False,
    is_causal: bool = False,
) -> Attention:
    """BigBird: blocks see their neighbours, the first and last block, and a few random blocks drawn from a seed.

    x [B,T,M] -> [B,T,M]; training and evaluation see the same blocks, at every length.

    Args:
        dim, heads, head_dim, bias: as for `mha`.
        block, blocks, window, random, seed: of `regard.masks.BigBird`; block * blocks bounds the length.
        is_causal: blocks are drawn from the past, and a token sees no later one.

    Raises:
        ArgumentError: as for `mha` and `regard.masks.BigBird`.

    >>> bigbird(32, 4, block=2, blocks=8, is_causal=True).mask.causal
    True

    Source: Zaheer et al. 2020 (arXiv 2007.14062), section 2.
    """
    mask = BigBird(block, blocks, window, random, seed, is_causal)
    return _under(mask, dim, heads, head_dim, bias=bias)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, i - j < l or (i - j) mod l = 0) v_j",
    source="Child et al. 2019 (arXiv 1904.10509), section 4.2",
    stride=4,
)
def sparse_strided(dim: int, heads: int, *, stride: int, head_dim: int | None = None) -> Attention:
    """Sparse Transformer, strided: the last l tokens, and every l-th before them.

    x [B,T,M] -> [B,T,M]; two layers reach every earlier token, at a cost of O(n sqrt n) for l near sqrt n.

    Args:
        dim, heads, head_dim: as for `mha`.
        stride: l.

    Raises:
        ArgumentError: as for `mha`, or stride is less than 1.

    >>> print(sparse_strided(32, 4, stride=8).mask)
    causal & strided(8)

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.2.
    """
    return _under(Causal() & Strided(stride), dim, heads, head_dim)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, j // l = i // l or j mod l >= l - c) v_j",
    source="Child et al. 2019 (arXiv 1904.10509), section 4.2",
    stride=4,
)
def sparse_fixed(
    dim: int, heads: int, *, stride: int, columns: int = 1, head_dim: int | None = None
) -> Attention:
    """Sparse Transformer, fixed: the own block of l tokens, and the last c columns of every earlier block.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim: as for `mha`.
        stride, columns: l and c.

    Raises:
        ArgumentError: as for `mha`, stride is less than 1, or columns is not 1 to stride.

    >>> print(sparse_fixed(32, 4, stride=8).mask)
    causal & strided(8, fixed=1)

    Source: Child et al. 2019 (arXiv 1904.10509), section 4.2.
    """
    return _under(Causal() & Strided(stride, columns), dim, heads, head_dim)


def _under(
    mask: Mask, dim: int, heads: int, head_dim: int | None, *, bias: bool = False
) -> Attention:
    """Multi-head attention under a mask."""
    D = head_size(dim, heads, head_dim)
    return Attention(
        separate(dim, heads, heads, D, bias=bias), join(dim, heads, D, bias=bias), mask=mask
    )
