"""Softmax attention under a sparse mask, or with other positions: windows, chunks, documents,
global and random keys, rotary positions with several axes, and other distances for long texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from regard.errors import ArgumentError
from regard.masks import (
    BigBird,
    Causal,
    Chunk,
    Dilated,
    Document,
    Global,
    Mask,
    Prefix,
    Strided,
    Window,
)
from regard.nn.attention.attention import Attention
from regard.nn.attention.remapped import (
    DistanceMap,
    DualChunk,
    LMInfinite,
    MultiAxisAttention,
    MultiAxisProjection,
    RemappedAttention,
    ReRoPE,
    SelfExtend,
)
from regard.nn.attention.windowed import Longformer
from regard.nn.variants.options import Bias, Biased, HeadSize, Rotated
from regard.nn.variants.projections import Start, is_last_of_period
from regard.nn.variants.registry import variant
from regard.positions.multi_axis import MultiAxisRotary


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j",
    "Beltagy et al. 2020 (arXiv 2004.05150), section 3.1; Jiang et al. 2023, Mistral 7B (arXiv "
    "2310.06825)",
    users="Mistral 7B v0.1",
    choose="the context is long, memory is short, and near tokens decide",
    avoid="single facts from far back are asked for: take local_global",
    where="W: the window: how many of the last keys a token sees, itself included",
    example={"window": 5},
    published={"window": 4096},
)
def sliding_window(dim: int, heads: int, *, window: int, **options: Unpack[Rotated]) -> Attention:
    """Sliding window: a token sees the last W tokens, itself included, as in Mistral 7B.

    A cache stores W tokens at any length. Through l layers, a token depends on the last l (W - 1) +
    1 tokens.

    Args:
        window: the number of tokens W.
    """
    return Start(dim, heads, **options).attention(mask=Causal() & Window(window))


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j; in every n-th layer over j <= i",
    "Gemma 3 (arXiv 2503.19786), section 2.1; Gemma 2 (arXiv 2408.00118), section 2",
    users="Gemma 2, Gemma 3, gpt-oss, Cohere Command A, OLMo 3; ModernBERT without a causal mask",
    choose="long contexts: nearly the cache of a window, nearly the quality of full attention",
    avoid="the context is short, so that the window never ends",
    where=(
        "W: the window: how many of the last keys a token sees, itself included; n: distance of "
        "two global layers"
    ),
    example={"window": 5},
    published={"window": 1024},
)
def local_global(
    dim: int,
    heads: int,
    *,
    window: int,
    layer: int = 0,
    every: int = 6,
    global_base: float | None = None,
    **options: Unpack[Rotated],
) -> Attention:
    """Alternating layers: most layers attend to a window, and every n-th to all past tokens.

    Gemma 2 has n = 2, and Gemma 3 has n = 6.

    This is the attention of one layer.

    Args:
        window: the window W of the local layers.
        layer: the index of the layer, from 0; layers n - 1, 2 n - 1, ... are global.
        every: the period n of the global layers.
        global_base: the base in global layers; None is the same. Gemma 3 uses 10,000 and 1,000,000.
        base: the base of the rotary positions in local layers.
    """
    if is_last_of_period(layer, every):
        options["base"] = global_base or options["base"]
        return Start(dim, heads, **options).attention()
    return Start(dim, heads, **options).attention(mask=Causal() & Window(window))


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, j // C = i // C) v_j",
    "Meta 2025, Llama 4 model card and code: layers with chunked attention",
    users="Llama 4, in three of four layers",
    choose="long contexts, with masks that never cross the border of a chunk",
    avoid="the first tokens of a chunk need those before it, and no layer is global",
    where="C: size of a chunk",
    example={"chunk": 4},
    published={"chunk": 8192},
)
def chunked(dim: int, heads: int, *, chunk: int, **options: Unpack[Rotated]) -> Attention:
    """Chunked attention: a token sees the past of its own chunk of C positions, and no other chunk,
    as in Llama 4.

    Args:
        chunk: the number of positions C in a chunk.
    """
    return Start(dim, heads, **options).attention(mask=Causal() & Chunk(chunk))


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over j <= i or j < n) v_j",
    "Raffel et al. 2020 (arXiv 1910.10683), section 3.2.1; Liu et al. 2018 (arXiv 1801.10198)",
    users="PaliGemma, UL2",
    choose="a prompt is read at once, and its tokens profit from later ones",
    avoid="prompts grow turn by turn: every new turn changes the cache of the prefix",
    where="n: length of the prefix",
    example={"prefix": 4},
    published={"prefix": 256},
    causal=False,
)
def prefix_lm(
    dim: int, heads: int, *, prefix: int | Sequence[int], **options: Unpack[Rotated]
) -> Attention:
    """Prefix language model: the first n tokens see one another, later tokens see the past.

    With a cache, the whole prefix must be passed in one call.

    Args:
        prefix: the length n of the prefix, or one for each row of the batch.
    """
    length = prefix if isinstance(prefix, int) else tuple(prefix)
    return Start(dim, heads, **options).attention(mask=Causal() | Prefix(length))


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, document(j) = document(i)) v_j",
    "Krell et al. 2021 (arXiv 2107.02027), section 3",
    users="the training of most language models",
    choose="short documents fill a row of training without padding",
    avoid="at inference, where each sequence has its own row",
    where="document: number of the document of a token",
    example={"bounds": (0, 5, 9, 64)},
    published={"bounds": (0, 1024, 3072, 4096)},
)
def packed(dim: int, heads: int, *, bounds: Sequence[int], **options: Unpack[Rotated]) -> Attention:
    """Packed documents: several texts share one row, and each token sees the past of its own text
    only.

    Positions need not start at 0 in each document, because rotary scores depend on differences of
    positions only.

    Args:
        bounds: the start of each document, and the end of the last.
    """
    return Start(dim, heads, **options).attention(mask=Causal() & Document(tuple(bounds)))


@variant(
    "masks",
    "z_t = softmax(q_t k_j^T / sqrt(D) over window and global tokens j) v_j; for a global token "
    "t: softmax(q'_t k'_j^T / sqrt(D) over all tokens j) v'_j",
    "Beltagy et al. 2020 (arXiv 2004.05150), section 3.1",
    users="Longformer and LED",
    choose="an encoder reads long documents, and a few tokens collect their meaning",
    avoid="text is generated: windows with global layers have faster kernels",
    where="q': queries, keys and values (q', k', v') of the global tokens' own projections",
    example={"window": 4, "positions": (0, 6)},
    published={"window": 512},
    causal=False,
)
def longformer(
    dim: int,
    heads: int,
    *,
    window: int,
    positions: tuple[int, ...] = (0,),
    step: int = 1,
    bias: Bias = True,
    is_causal: bool = False,
    **options: Unpack[HeadSize],
) -> Longformer:
    """Longformer: a window around every token, and global tokens with separate projections.

    Args:
        window: the total width w of the window, even: w/2 keys on either side; with is_causal, w/2
            keys before the token.
        positions: the positions of the global tokens.
        step: the dilation of the window: a token sees every step-th key, as many keys as without
            dilation.
        is_causal: whether a token sees no later tokens.
    """
    if window < 2 or window % 2:
        raise ArgumentError(
            f"window is {window}; it is the total width and must be even, such as "
            f"{max(2, window - 1)} or {window + 1}",
            argument="window",
        )
    start = Start(dim, heads, bias=bias, **options)
    return Longformer(
        start.qkv(),
        start.qkv(),
        start.output(),
        positions=positions,
        window=window // 2 + 1,
        ahead=None if is_causal else window // 2,
        step=step,
    )


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over i - j = 0, s, 2 s, ..., (W - 1) s, and globals) v_j",
    "Beltagy et al. 2020 (arXiv 2004.05150), section 3.1, dilated sliding window",
    users="the character models of Longformer, in their upper layers",
    choose="the window must reach further at the same cost",
    avoid="any neighbouring token may matter: a dilated window jumps over most of them",
    where=(
        "W: the window: how many of the last keys a token sees, itself included; s: step between "
        "two keys"
    ),
    example={"window": 3, "step": 2},
    published={"step": 2, "window": 512},
)
def dilated(
    dim: int,
    heads: int,
    *,
    window: int,
    step: int,
    positions: tuple[int, ...] = (),
    **options: Unpack[HeadSize],
) -> Attention:
    """Dilated window: a token sees W past keys at distances 0, s, 2 s, ..., and the global tokens
    of the past.

    Args:
        window: the number of keys W.
        step: the distance s between two of these keys.
        positions: the positions of the global tokens.
    """
    mask: Mask = Dilated(window, step)
    mask = mask | Global(positions) if positions else mask
    return Start(dim, heads, **options).attention(mask=Causal() & mask)


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over window, global and random blocks) v_j",
    "Zaheer et al. 2020 (arXiv 2007.14062), section 2",
    users="BigBird and BigBird-Pegasus",
    choose="an encoder reads long documents with a proof that every pair is connected",
    avoid="speed on a CPU or GPU matters: random blocks are read in no order",
    example={"block": 2, "blocks": 32, "random": 2},
    causal=False,
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
    is_causal: bool = False,
    **options: Unpack[Biased],
) -> Attention:
    """BigBird: the tokens of a block see the neighbouring blocks, the first and the last block, and
    a few random blocks.

    The random blocks are drawn from the seed once, and are the same in training and evaluation and
    at every length.

    Args:
        block: the number of positions in a block.
        blocks: the number of blocks; block * blocks is the maximum length.
        window: the number of neighbouring blocks, its own included; odd.
        random: the number of random blocks per block.
        seed: the seed of the random blocks.
        is_causal: whether random blocks are drawn from the past, and a token sees no later tokens.
    """
    mask = BigBird(block, blocks, window, random, seed, is_causal)
    return Start(dim, heads, **options).attention(mask=mask)


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, i - j < l or (i - j) mod l = 0) v_j",
    "Child et al. 2019 (arXiv 1904.10509), section 4.2",
    users="the Sparse Transformer, for images and music",
    choose="data has rows of equal length, such as images",
    avoid="data is text: take a window",
    where="l: the stride",
    example={"stride": 4},
    published={"stride": 128},
)
def sparse_strided(dim: int, heads: int, *, stride: int, **options: Unpack[HeadSize]) -> Attention:
    """Sparse Transformer, strided: a token sees the last l tokens, and every l-th token before
    them.

    Through two layers, a token depends on every earlier token. With l near sqrt n, the cost is O(n
    sqrt n) for n tokens.

    Args:
        stride: the stride l.
    """
    return Start(dim, heads, **options).attention(mask=Causal() & Strided(stride))


@variant(
    "masks",
    "z_i = softmax(q_i k_j^T / sqrt(D) over j <= i, j // l = i // l or j mod l >= l - c) v_j",
    "Child et al. 2019 (arXiv 1904.10509), section 4.2",
    users="the Sparse Transformer, for text; GPT-3 in every second layer, with another pattern",
    choose="every block can be summarized in its last tokens",
    avoid="the choice is open: windows with global layers are simpler, and measured better",
    where="c: number of summary tokens of a block; l: the stride",
    example={"stride": 4},
    published={"stride": 128},
)
def sparse_fixed(
    dim: int, heads: int, *, stride: int, columns: int = 1, **options: Unpack[HeadSize]
) -> Attention:
    """Sparse Transformer, fixed: a token sees its own block of l tokens, and the last c tokens of
    every earlier block.

    Args:
        stride: the block size l.
        columns: the number c of last tokens of each earlier block.
    """
    return Start(dim, heads, **options).attention(mask=Causal() & Strided(stride, columns))


def _with_axes(start: Start, rotary: MultiAxisRotary, mask: Mask | None) -> MultiAxisAttention:
    """Build grouped-query attention with rotary positions of several axes."""
    project = MultiAxisProjection(start.q(rotary), start.kv(rotary), start.kv())
    return MultiAxisAttention(project, start.output(), mask=mask)


@variant(
    "coordinates",
    "z_h = softmax(q_h R^T R k_g^T / sqrt(D) + causal) v_g, R rotates each pair by one of t, h, w",
    "Wang et al. 2024 (arXiv 2409.12191), section 2.1, Qwen2-VL; Qwen3-VL 2025",
    users="Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.5V and others that read images and videos",
    choose="images and videos stand between text, and one rotation should serve all",
    avoid="there is only text: it is then gqa, with one number more for each token in the cache",
    where=(
        "R: rotation to the coordinates of a token; h: index of a query head; alone, the "
        "coordinate in height; t: coordinate in time; w: coordinate in width"
    ),
)
def mrope(
    dim: int,
    heads: int,
    *,
    sections: Sequence[int] | None = None,
    order: Literal["chunks", "interleaved"] = "chunks",
    **options: Unpack[Rotated],
) -> MultiAxisAttention:
    """Multimodal rotary positions (M-RoPE): each pair of dims is rotated by one of the three
    coordinates of a token in time, height and width. For text, this is `gqa`.

    Positions are [4,B,T] (`regard.positions.multi_axis_positions`), or those of text. A cache also
    stores one number per token, from which the next text token gets its coordinate.

    Args:
        sections: the number of pairs for time, height and width, D/2 together; None has the shares
            of the models: 16, 24, 24 of 64 in chunks, 24, 20, 20 interleaved.
        order: "chunks" as in Qwen2-VL, or "interleaved" as in Qwen3-VL.
    """
    start = Start(dim, heads, groups=options["groups"], head_dim=options["head_dim"])
    if sections is None:
        n = start.D // 2
        side = 5 * n // 16 if order == "interleaved" else 3 * n // 8
        sections = (n - 2 * side, side, side)
    rotary = MultiAxisRotary(start.D, options["base"], sections=sections, order=order)
    return _with_axes(start, rotary, Causal())


@variant(
    "coordinates",
    "z_h = softmax(q_h R^T R k_g^T / sqrt(D)) v_g, R rotates half of the pairs by h, and the "
    "others by w",
    "Agrawal et al. 2024, Pixtral (arXiv 2410.07073), section 2.1; the image encoders of Qwen2-VL "
    "and Kimi-VL",
    users="the image encoders of Pixtral, Qwen2-VL and Kimi-VL",
    choose="an encoder reads images of any size and shape",
    avoid="the tokens are text, which has one order",
    where=(
        "R: rotation to the row and column of a patch; h: index of a query head; alone, the row; "
        "w: the column"
    ),
    causal=False,
)
def rope_2d(dim: int, heads: int, **options: Unpack[Rotated]) -> MultiAxisAttention:
    """Rotary positions in two dimensions: half of the pairs are rotated by the row of an image, and
    half by its column, each with frequencies of its own.

    Every patch sees every other. Positions are [3,B,T]: the order of the patches, their rows and
    columns, as `multi_axis_positions(...)[[0, 2, 3]]` of one image; without coordinates, patch i is
    at row i and column i. D is a multiple of 4.
    """
    start = Start(dim, heads, groups=options["groups"], head_dim=options["head_dim"])
    sections = (start.D // 4, start.D // 4)
    rotary = MultiAxisRotary(start.D, options["base"], sections=sections, own_frequencies=True)
    return _with_axes(start, rotary, None)


def _remapped(start: Start, distances: DistanceMap) -> RemappedAttention:
    """Build grouped-query attention with these distances."""
    return RemappedAttention(start.qkv(), start.output(), distances)


@variant(
    "distances",
    "z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = i - j in the same chunk, min(i "
    "mod c + c, n) - j mod c for the block before, min(2 c - 1, n) - j mod c for earlier blocks",
    "An et al. 2024 (arXiv 2402.17463), section 3",
    users="Qwen2 and Qwen2.5-1M, beyond their training length",
    choose="a trained model must read longer texts without training, and near order matters",
    avoid="the model can be trained further, or yarn reaches far enough: it is one call",
    where="c: size of a chunk; d: distance between query and key; n: largest position of a query",
    example={"chunk": 4, "length": 6},
    published={"chunk": 8192, "length": 16384},
)
def dual_chunk(
    dim: int, heads: int, *, chunk: int, length: int, **options: Unpack[Rotated]
) -> RemappedAttention:
    """Dual chunk attention (DCA): a trained model reads longer texts, because no rotary distance
    exceeds the training length; distances within a chunk are the real ones.

    Weights and cache are those of `gqa`.

    Args:
        chunk: the size c of a chunk, below the training length.
        length: n, the largest position of a query, below the training length.
    """
    return _remapped(Start(dim, heads, **options), DualChunk(chunk, length))


@variant(
    "distances",
    "z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = i - j in the window W, then "
    "floor(i / n) + W - W / n - floor(j / n)",
    "Jin et al. 2024 (arXiv 2401.01325), section 3.2",
    users="no model is trained with it; it extends Llama 2, Mistral and Phi-2",
    choose="a trained model must read longer texts without training",
    avoid="speed matters: all keys are rotated again in each step; take yarn",
    where=(
        "W: the number of nearest keys; d: distance between query and key; n: the number of "
        "positions that become one"
    ),
    example={"group": 2, "window": 4},
    published={"group": 8, "window": 1024},
)
def self_extend(
    dim: int, heads: int, *, group: int, window: int, **options: Unpack[Rotated]
) -> RemappedAttention:
    """Self-Extend: a trained model reads longer texts, because far positions are grouped; the
    nearest keys keep their distances.

    Weights and cache are those of `gqa`.

    Args:
        group: the number of positions that become one.
        window: the number W of nearest keys, a multiple of group.
    """
    return _remapped(Start(dim, heads, **options), SelfExtend(group, window))


@variant(
    "distances",
    "z_i = softmax(q_i R_d k_j^T / sqrt(D) over j <= i) v_j, d = min(i - j, W)",
    "Su 2023, Rectified Rotary Position Embeddings (code: bojone/rerope)",
    users="no model is trained with it; it extends Llama 2 and Baichuan",
    choose="the order of far tokens does not matter, and the text is longer than those of training",
    avoid="far order matters: all far keys seem to be at one distance; take dual_chunk",
    where="W: the largest distance; d: distance between query and key",
    example={"window": 4},
    published={"window": 1024},
)
def rerope(dim: int, heads: int, *, window: int, **options: Unpack[Rotated]) -> RemappedAttention:
    """ReRoPE: a trained model reads longer texts, because no rotary distance exceeds the window.

    Weights and cache are those of `gqa`.

    Args:
        window: the largest distance W, below the training length.
    """
    return _remapped(Start(dim, heads, **options), ReRoPE(window))


@variant(
    "distances",
    "z_i = softmax(q_i R_d k_j^T / sqrt(D) over i - W < j <= i or j < s) v_j, d = min(i - j, W)",
    "Han et al. 2023 (arXiv 2308.16137), section 3.2",
    users="no model is trained with it; it runs Llama 2, MPT and GPT-J without end",
    choose="a trained model must read a stream without end, as with streaming",
    avoid="the answer is further back than the window: those keys are gone",
    where=(
        "W: the window: how many of the last keys a token sees, itself included; d: distance "
        "between query and key; s: number of first tokens that stay"
    ),
    example={"sinks": 2, "window": 4},
    published={"sinks": 4, "window": 4096},
)
def lm_infinite(
    dim: int, heads: int, *, sinks: int, window: int, **options: Unpack[Rotated]
) -> RemappedAttention:
    """LM-Infinite: a trained model reads a stream without end. It sees the last tokens and the
    first ones, at no larger distance than the window.

    A cache stores the first and the last tokens.

    Args:
        sinks: the number s of first tokens.
        window: the number W of last tokens, and the largest distance.
    """
    return _remapped(Start(dim, heads, **options), LMInfinite(sinks, window))
