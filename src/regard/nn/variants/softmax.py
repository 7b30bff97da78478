"""Softmax attention that sees all past tokens: one head, many heads, shared keys and values, norms
on queries and keys, ALiBi, T5's bias, sinks, gates and differences of patterns.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from regard.argument_checks import check_positive_sizes, resolve_head_dim
from regard.biases import ALiBi, T5Relative
from regard.masks import Causal
from regard.nn.attention.attention import Attention
from regard.nn.blocks.norms import RMSNorm
from regard.nn.projections.fused import FusedQKV, IdentityProjection, PerHeadProjection, QKVRowOrder
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.projections.steps import DifferentialProjection, GatedProjection
from regard.nn.variants.options import (
    Base,
    Bias,
    Biased,
    Dropout,
    HeadSize,
    OptionalGroups,
    Rotated,
    SharedHeads,
)
from regard.nn.variants.projections import Start, output_projection
from regard.nn.variants.registry import variant
from regard.positions import Rotary
from regard.positions.rotary import Layout


@variant(
    "heads",
    "z = softmax(x x^T) x",
    "Raschka 2024, Build a Large Language Model (From Scratch), section 3.3",
    users="none; it is the first step of many lessons",
    choose="to see what attention does before anything is learned",
    avoid="for anything else",
    causal=False,
)
def weightless(dim: int, heads: int = 1) -> Attention:
    """Self-attention without weights: queries, keys and values are the tokens themselves.

    Every token sees every other; the scale is 1.

    Args:
        heads: ignored; there is one head as wide as the model.
    """
    del heads
    return Attention(IdentityProjection(dim), nn.Identity(), scale=1.0)


@variant(
    "heads",
    "z = softmax(q k^T / sqrt(D)) v, q = W_q x, k = W_k x, v = W_v x",
    "Vaswani et al. 2017 (arXiv 1706.03762), equation 1",
    users="none; it is the second step of many lessons",
    choose="to see queries, keys and values",
    avoid="for a real model: take several heads",
    causal=False,
    shapes="x [B,T,M] -> [B,T,D]",
)
def single_head(dim: int, heads: int = 1, **options: Unpack[Biased]) -> Attention:
    """Scaled dot-product attention with trained weights, in one head and without a mask.

    The head itself, without an output map.

    Args:
        heads: ignored; there is one head.
        head_dim: the head dim D; None is M.
        bias: whether the three linear maps have a bias.
    """
    del heads
    return Attention(Start(dim, 1, **options).qkv(), nn.Identity())


@variant(
    "heads",
    "z = softmax(q k^T / sqrt(D) + causal) v",
    "Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3",
    users="none; it is the third step of many lessons",
    choose="to see the causal mask",
    avoid="for a real model: take several heads",
    shapes="x [B,T,M] -> [B,T,D]",
)
def causal(
    dim: int, heads: int = 1, *, dropout: Dropout = 0.0, **options: Unpack[HeadSize]
) -> Attention:
    """Causal attention in one head: a token sees itself and the tokens before it.

    Args:
        heads: ignored; there is one head.
        head_dim: the head dim D; None is M.
    """
    del heads
    project = Start(dim, 1, **options).qkv()
    return Attention(project, nn.Identity(), mask=Causal(), dropout=dropout)


@variant(
    "heads",
    "out = W_o [z_1; ...; z_H], z_h = softmax(q_h k_h^T / sqrt(D)) v_h",
    "Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2",
    users="BERT, Llama 2 7B and 13B, OPT, Pythia",
    choose="the model is small, or an encoder, which has no cache",
    avoid="a decoder with long contexts: its cache is H/G times that of gqa",
    causal=False,
)
def mha(
    dim: int,
    heads: int,
    *,
    dropout: Dropout = 0.0,
    is_causal: bool = False,
    **options: Unpack[Biased],
) -> Attention:
    """Multi-head attention: H heads in parallel, with their matrices stacked into one.

    A cache stores 2 H D values per token.

    Args:
        is_causal: whether a token sees only itself and the tokens before it.
    """
    mask = Causal() if is_causal else None
    return Start(dim, heads, **options).attention(mask=mask, dropout=dropout)


@variant(
    "heads",
    "out = W_o [z_1; ...; z_H], z_h = softmax(W_h^Q x (W_h^K x)^T / sqrt(D)) W_h^V x",
    "Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2",
    users="none; it computes what mha computes",
    choose="to read the equation head by head",
    avoid="speed matters: stacked matrices are one product",
    where=(
        "W_h^K: learned matrix of the keys of head h; W_h^Q: learned matrix of the queries of "
        "head h; W_h^V: learned matrix of the values of head h"
    ),
    causal=False,
)
def mha_per_head(dim: int, heads: int, **options: Unpack[Biased]) -> Attention:
    """Multi-head attention with a separate matrix for every head, which computes the same function
    as `mha`.
    """
    start = Start(dim, heads, **options)
    q, k, v = (PerHeadProjection(dim, heads, start.D, bias=start.bias) for _ in range(3))
    return start.attention(SeparateQKV(q, k, v), mask=None)


def stacked(split: Attention) -> Attention:
    """Convert an `mha_per_head` to an `mha` with the same result, by stacking the matrices of its
    heads.

    Args:
        split: attention whose heads have separate matrices.

    Returns:
        Attention with copies of these matrices, stacked; it shares the output map.

    >>> split, x = mha_per_head(8, 2), torch.randn(1, 5, 8)
    >>> torch.allclose(stacked(split)(x), split(x), atol=1e-6)
    True
    """
    project = split.project
    assert isinstance(project, SeparateQKV)
    parts = (project.q, project.k, project.v)
    heads = [part.stack() if isinstance(part, PerHeadProjection) else part for part in parts]
    return Attention(SeparateQKV(*heads), split.output, mask=split.mask, dropout=split.dropout)


@variant(
    "heads",
    "[q; k; v] = W x + b; out = W_o [z_1; ...; z_H] + b_o, z_h = softmax(q_h k_h^T / sqrt(D) + "
    "causal) v_h",
    "Radford et al. 2018, Improving Language Understanding by Generative Pre-Training, section 3.1",
    users="GPT-2 and GPT-3",
    choose="to load or study GPT-2",
    avoid="a new model: take gqa with rotary positions",
)
def gpt(
    dim: int,
    heads: int,
    *,
    order: QKVRowOrder = "parts",
    bias: Bias = True,
    dropout: Dropout = 0.0,
    **options: Unpack[SharedHeads],
) -> Attention:
    """GPT attention: causal, with queries, keys and values from one fused matrix.

    The model adds learned positions to the embedding.

    Args:
        order: the order of the rows in the matrix (`FusedQKV`); "parts" is that of GPT-2.
    """
    start = Start(dim, heads, bias=bias, **options)
    project = FusedQKV(dim, heads, start.groups, start.D, order=order, bias=bias)
    return start.attention(project, dropout=dropout)


@variant(
    "heads",
    "z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, g = h // (H/G); out = W_o [z_1; ...; z_H]",
    "Ainslie et al. 2023 (arXiv 2305.13245), section 2.2",
    users="Llama 3, Mistral, Qwen2.5, and most open models since 2023",
    choose="the default of a new decoder: nearly the quality of mha, a cache of G/H of its size",
    avoid="the cache still decides how many users fit: take mla or local_global",
)
def gqa(dim: int, heads: int, *, layout: Layout = "half", **options: Unpack[Rotated]) -> Attention:
    """Grouped-query attention: H/G query heads share each key/value head.

    ; a cache stores 2 G D values per token.

    Args:
        layout: which dims form a rotary pair: "half" or "interleaved" (`regard.positions.rotate`).
    """
    return Start(dim, heads, layout=layout, **options).attention()


@variant(
    "heads",
    "z_h = softmax(q_h k^T / sqrt(D) + causal) v",
    "Shazeer 2019 (arXiv 1911.02150), section 3",
    users="PaLM, StarCoder, Falcon 7B, Gemma 2B",
    choose="the model is small, and decoding speed is everything",
    avoid="quality matters at some billion parameters: take gqa, which costs little more",
)
def mqa(dim: int, heads: int, *, base: Base = 10000.0, **options: Unpack[HeadSize]) -> Attention:
    """Multi-query attention: all query heads share one key/value head.

    A cache stores 2 D values per token.
    """
    return Start(dim, heads, groups=1, base=base, **options).attention()


@variant(
    "heads",
    "q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g)",
    "Yang et al. 2025, Qwen3 (arXiv 2505.09388), section 2; Henry et al. 2020 (arXiv 2010.04245)",
    users="Qwen3, Gemma 3",
    choose="training diverges because scores grow",
    avoid="a checkpoint without these norms is continued",
)
def qk_norm(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """QK-norm before rotary: queries and keys are normalized head by head, then rotated, as in
    Qwen3 and Gemma 3.
    """
    start = Start(dim, heads, **options)
    q, k = (each(RMSNorm(start.D), *start.rotary) for each in (start.q, start.kv))
    return start.attention(SeparateQKV(q, k, start.kv()))


@variant(
    "heads",
    "q_h = norm(rotary(W_q x)_h), k_g = norm(rotary(W_k x)_g)",
    "Henry et al. 2020 (arXiv 2010.04245); order: Hunyuan and nanochat",
    users="Hunyuan; Llama 4 without learned weights",
    choose="to load such a checkpoint",
    avoid="a new model: the norm before the rotation is usual",
)
def qk_norm_after_rotary(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """QK-norm after rotary: queries and keys are rotated, then normalized head by head. The result
    differs from that of `qk_norm`.
    """
    start = Start(dim, heads, **options)
    q, k = (each(*start.rotary, RMSNorm(start.D)) for each in (start.q, start.kv))
    return start.attention(SeparateQKV(q, k, start.kv()))


@variant(
    "heads",
    "q = norm(W_q x) over all heads, then split and rotated; k in the same way",
    "OLMo 2 (arXiv 2501.00656), section 3.3",
    users="OLMo 2, OLMoE",
    choose="to load such a checkpoint",
    avoid="heads are split over devices: the norm needs all of them",
    where="norm: RMS norm of all heads together",
)
def qk_norm_flat(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """QK-norm over the full width: queries and keys are normalized before they are split into
    heads, as in OLMo 2.
    """
    start = Start(dim, heads, **options)
    q, k = (
        HeadProjection(dim, n, start.D, *start.rotary, flat=RMSNorm(n * start.D))
        for n in (heads, start.groups)
    )
    return start.attention(SeparateQKV(q, k, start.kv()))


@variant(
    "heads",
    "z_h = softmax(c tanh(q_h k_g^T / (c sqrt(D))) + causal) v_g",
    "Gemma 2 (arXiv 2408.00118), section 2; Bello et al. 2016 (arXiv 1611.09940), equation 16",
    users="Gemma 2, Grok-1",
    choose="scores must stay bounded without norms",
    avoid="fused kernels matter: many have no tanh in the scores; take qk_norm",
    where="c: the cap",
)
def softcap(
    dim: int,
    heads: int,
    *,
    cap: float = 50.0,
    scale: float | None = None,
    **options: Unpack[Rotated],
) -> Attention:
    """Capped scores: a tanh keeps every score within (-c, c), as in Gemma 2.

    Args:
        cap: the cap c.
        scale: the factor on the scores; None is 1/sqrt(D).
    """
    return Start(dim, heads, **options).attention(softcap=cap, scale=scale)


@variant(
    "heads",
    "p_ij = exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij))",
    "gpt-oss model card (arXiv 2508.10925), section 2.2",
    users="gpt-oss",
    choose="heads need a way to attend to nothing, mostly with windows",
    avoid="a kernel without the logit is used: the first tokens become the sink by themselves",
    where="sink: learned logit of a head",
)
def learned_sink(
    dim: int, heads: int, *, bias: bool = True, **options: Unpack[Rotated]
) -> Attention:
    """Learned attention sink: one logit per head is added to the softmax denominator, so that a
    head can attend to nothing.

    The sinks start at 0, which is the softmax "off by one".

    Args:
        bias: whether the linear maps have a bias, as in gpt-oss.
    """
    sink = nn.Parameter(torch.zeros(heads))
    return Start(dim, heads, bias=bias, **options).attention(sink=sink)


@variant(
    "heads",
    "z_h = softmax(q_h k_h^T / sqrt(D) - m_h (i - j) + causal) v_h",
    "Press et al. 2021 (arXiv 2108.12409), section 3",
    users="BLOOM, MPT",
    choose="texts longer than those of training, without any change",
    avoid="far tokens matter: the penalty hides them; take rotary positions and yarn",
    where="m: slope of a head",
)
def alibi(dim: int, heads: int, **options: Unpack[Biased]) -> Attention:
    """ALiBi: a penalty that is linear in the distance replaces position embeddings; each head has a
    fixed slope, as in BLOOM and MPT.
    """
    return Start(dim, heads, **options).attention(bias=ALiBi(heads))


@variant(
    "heads",
    "z_h = softmax(q_h k_h^T + table[bucket(j - i), h] + causal) v_h",
    "Raffel et al. 2020 (arXiv 1910.10683), section 2.1",
    users="T5, mT5, Flan-T5",
    choose="encoders and encoder-decoders of moderate length",
    avoid="fused kernels matter: a learned bias for each pair is read for each score",
    where="bucket: bucket of a distance; table: learned bias of a bucket and a head",
)
def t5(
    dim: int,
    heads: int,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
    **options: Unpack[HeadSize],
) -> Attention:
    """T5's relative bias: each bucket of distances has a learned bias per head, and scores are not
    scaled.

    Causal, as in the decoder, unless bidirectional.

    Args:
        buckets: the number of buckets of distances.
        max_distance: the distance from which on all keys share one bucket.
        bidirectional: whether to build the encoder's form, which sees all tokens.
    """
    start = Start(dim, heads, **options)
    check_positive_sizes("t5", buckets=buckets, heads=heads)
    table = nn.Parameter(0.1 * torch.randn(buckets, heads))
    bias = T5Relative(table, bidirectional=bidirectional, max_distance=max_distance)
    return start.attention(scale=1.0, mask=None if bidirectional else Causal(), bias=bias)


@variant(
    "heads",
    "z'_h = z_h * sigmoid(W_g x)_h",
    "Qiu et al. 2025 (arXiv 2505.06708), section 3",
    users="Qwen3-Next and Qwen3.5, in their layers of full attention",
    choose="a new model: it removes sinks and large activations at little cost",
    avoid="a checkpoint without the gate is continued",
)
def gated(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Gated output: every element of the heads is multiplied by a sigmoid gate, which is computed
    from the hidden state of the query, as in Qwen3-Next.
    """
    start = Start(dim, heads, **options)
    return start.attention(GatedProjection(start.qkv(), start.q()))


@variant(
    "heads",
    "z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v)",
    "Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3",
    users="research models of up to 13B parameters",
    choose="noise in long contexts hurts, and two patterns for each head can be paid for",
    avoid="fused kernels and public checkpoints matter",
    where=(
        "k1: keys of the first pattern; k2: keys of the second pattern; l: learned weight of the "
        "second pattern; l0: first value of that weight, by the depth of the layer; q1: queries "
        "of the first pattern; q2: queries of the second pattern"
    ),
)
def differential(
    dim: int,
    heads: int,
    *,
    groups: OptionalGroups = None,
    head_dim: int | None = None,
    depth: int = 0,
    base: Base = 10000.0,
) -> Attention:
    """Differential attention: the difference of two attention patterns over the same values.

    Each of the H heads has two query heads of size D, and values of size 2 D.

    Args:
        head_dim: the head dim D; None is M / (2 H), which gives as many parameters as `mha`.
        depth: the index of the layer, from 0.
    """
    D = resolve_head_dim(dim, 2 * heads, head_dim)
    G = heads if groups is None else groups
    rotary = Rotary(D, base)
    project = DifferentialProjection(
        HeadProjection(dim, 2 * heads, D, rotary),
        HeadProjection(dim, 2 * G, D, rotary),
        HeadProjection(dim, G, 2 * D),
        depth=depth,
    )
    return Attention(project, output_projection(dim, heads, 2 * D), mask=Causal())
