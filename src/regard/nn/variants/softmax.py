"""Constructors of softmax mechanisms that attend to all past tokens: multi-head, grouped-query,
QK-norm, ALiBi, learned sinks, gated, differential and latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.biases import ALiBi, T5Relative
from regard.cost.latent import Form
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.head_finishes import DifferentialProjection, GatedProjection
from regard.nn.latent_projection import LatentProjection, NaiveLatentProjection
from regard.nn.norms import RMSNorm
from regard.nn.projections import (
    FusedQKV,
    HeadProjection,
    IdentityProjection,
    PerHeadProjection,
    QKVRowOrder,
    SeparateQKV,
)
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary, Scaling
from regard.positions.rotary import Layout


@variant(
    family="softmax",
    equation="z = softmax(x x^T) x",
    source="Raschka 2024, Build a Large Language Model (From Scratch), section 3.3",
    causal=False,
)
def weightless(dim: int, heads: int = 1) -> Attention:
    """Self-attention without weights: queries, keys and values are the tokens themselves.

    x [B,T,M] -> [B,T,M]; every token sees every other; the scale is 1.

    Args:
        dim: the model dim M.
        heads: ignored; there is one head as wide as the model.

    Returns:
        The module.

    Raises:
        ArgumentError: dim is less than 1.

    >>> import torch
    >>> weightless(3)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 3])

    Source: Raschka 2024, section 3.3.
    """
    del heads
    return Attention(IdentityProjection(dim), nn.Identity(), scale=1.0)


@variant(
    family="softmax",
    equation="z = softmax(q k^T / sqrt(D)) v, q = W_q x, k = W_k x, v = W_v x",
    source="Vaswani et al. 2017 (arXiv 1706.03762), equation 1",
    causal=False,
)
def single_head(
    dim: int, heads: int = 1, *, head_dim: int | None = None, bias: bool = False
) -> Attention:
    """Scaled dot-product attention with trained weights, in one head and without a mask.

    x [B,T,M] -> [B,T,D]: the head itself, without an output map.

    Args:
        dim: the model dim M.
        heads: ignored; there is one head.
        head_dim: the head dim D; None is M.
        bias: whether the three linear maps have a bias.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1.

    >>> import torch
    >>> single_head(3, head_dim=2)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 2])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    del heads
    project = separate_qkv(dim, 1, 1, dim if head_dim is None else head_dim, bias=bias)
    return Attention(project, nn.Identity())


@variant(
    family="softmax",
    equation="z = softmax(q k^T / sqrt(D) + causal) v",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3",
)
def causal(
    dim: int, heads: int = 1, *, head_dim: int | None = None, dropout: float = 0.0
) -> Attention:
    """Causal attention in one head: a token sees itself and the tokens before it.

    x [B,T,M] -> [B,T,D]

    Args:
        dim: the model dim M.
        heads: ignored; there is one head.
        head_dim: the head dim D; None is M.
        dropout: the probability of dropping an attention weight, in training only.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or dropout is out of range.

    >>> import torch
    >>> causal(3, head_dim=2, dropout=0.1)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 2])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """
    del heads
    project = separate_qkv(dim, 1, 1, dim if head_dim is None else head_dim)
    return Attention(project, nn.Identity(), mask=Causal(), dropout=dropout)


@variant(
    family="softmax",
    equation="out = W_o [z_1; ...; z_H], z_h = softmax(q_h k_h^T / sqrt(D)) v_h",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2",
    causal=False,
)
def mha(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    bias: bool = False,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Attention:
    """Multi-head attention: H heads in parallel, with their matrices stacked into one.

    x [B,T,M] -> [B,T,M]; a cache stores 2 H D values per token.

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        head_dim: the head dim D; None is M / H.
        bias: whether the linear maps have a bias.
        dropout: the probability of dropping an attention weight, in training only.
        is_causal: whether a token sees only itself and the tokens before it.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, M / H is not whole and head_dim is None, or dropout is
            out of range.

    >>> mha(32, 4).project.shape.memory
    (32, 32)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        separate_qkv(dim, heads, heads, D, bias=bias),
        output_projection(dim, heads, D, bias=bias),
        mask=Causal() if is_causal else None,
        dropout=dropout,
    )


@variant(
    family="softmax",
    equation="out = W_o [z_1; ...; z_H], z_h = softmax(W_h^Q x (W_h^K x)^T / sqrt(D)) W_h^V x",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2",
    causal=False,
)
def mha_per_head(
    dim: int, heads: int, *, head_dim: int | None = None, bias: bool = False
) -> Attention:
    """Multi-head attention with a separate matrix for every head, which computes the same function
    as `mha`.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`.

    >>> len(mha_per_head(32, 4).project.q.linear)
    4

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    q, k, v = (PerHeadProjection(dim, heads, D, bias=bias) for _ in range(3))
    return Attention(SeparateQKV(q, k, v), output_projection(dim, heads, D, bias=bias))


def stacked(split: Attention) -> Attention:
    """Convert an `mha_per_head` to an `mha` with the same result, by stacking the matrices of its
    heads.

    Args:
        split: attention whose heads have separate matrices.

    Returns:
        Attention with copies of these matrices, stacked; it shares the output map.

    >>> import torch
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
    family="softmax",
    equation="[q; k; v] = W x + b; out = W_o [z_1; ...; z_H] + b_o, z_h = softmax(q_h k_h^T / "
    "sqrt(D) + causal) v_h",
    source="Radford et al. 2018, Improving Language Understanding by Generative Pre-Training, "
    "section 3.1",
)
def gpt(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    order: QKVRowOrder = "parts",
    bias: bool = True,
    dropout: float = 0.0,
) -> Attention:
    """GPT attention: causal, with queries, keys and values from one fused matrix.

    x [B,T,M] -> [B,T,M]; the model adds learned positions to the embedding.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        order: the order of the rows in the matrix (`FusedQKV`); "parts" is that of GPT-2.
        bias: whether the linear maps have a bias.
        dropout: the probability of dropping an attention weight, in training only.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, or order or dropout is out of
            range.

    >>> gpt(32, 4).project.linear.weight.shape
    torch.Size([96, 32])

    Source: Radford et al. 2018, section 3.1; code: GPT-2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = FusedQKV(dim, heads, groups or heads, D, order=order, bias=bias)
    return Attention(
        project, output_projection(dim, heads, D, bias=bias), mask=Causal(), dropout=dropout
    )


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, g = h // (H/G); out = W_o [z_1; "
    "...; z_H]",
    source="Ainslie et al. 2023 (arXiv 2305.13245), section 2.2",
    groups=2,
)
def gqa(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    layout: Layout = "half",
) -> Attention:
    """Grouped-query attention: H/G query heads share each key/value head.

    x [B,T,M] -> [B,T,M]; causal, with rotary positions; a cache stores 2 G D values per token.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions.
        layout: which dims form a rotary pair: "half" or "interleaved" (`regard.positions.rotate`).

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, head_dim is None and M /
            H is not whole, or layout is unknown.

    >>> import torch
    >>> gqa(32, 4, groups=2)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base, layout=layout))
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k^T / sqrt(D) + causal) v",
    source="Shazeer 2019 (arXiv 1911.02150), section 3",
)
def mqa(dim: int, heads: int, *, head_dim: int | None = None, base: float = 10000.0) -> Attention:
    """Multi-query attention: all query heads share one key/value head.

    x [B,T,M] -> [B,T,M]; a cache stores 2 D values per token.

    Args:
        dim, heads, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> mqa(32, 4).project.shape.memory
    (8, 8)

    Source: Shazeer 2019 (arXiv 1911.02150), section 3.
    """
    return gqa(dim, heads, groups=1, head_dim=head_dim, base=base)


@variant(
    family="softmax",
    equation="q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g)",
    source="Yang et al. 2025, Qwen3 (arXiv 2505.09388), section 2; Henry et al. 2020 (arXiv "
    "2010.04245)",
    groups=2,
)
def qk_norm(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm before rotary: queries and keys are normalised head by head, then rotated, as in
    Qwen3 and Gemma 3.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> [type(step).__name__ for step in qk_norm(32, 4, groups=2).project.q.steps]
    ['RMSNorm', 'Rotary']

    Source: Henry et al. 2020 (arXiv 2010.04245); order: Qwen3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    return _gqa_with_norm(dim, heads, groups, D, lambda: (RMSNorm(D), rotary))


@variant(
    family="softmax",
    equation="q_h = norm(rotary(W_q x)_h), k_g = norm(rotary(W_k x)_g)",
    source="Henry et al. 2020 (arXiv 2010.04245); order: Hunyuan and nanochat",
    groups=2,
)
def qk_norm_after_rotary(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm after rotary: queries and keys are rotated, then normalised head by head. The result
    differs from that of `qk_norm`.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> [type(step).__name__ for step in qk_norm_after_rotary(32, 4, groups=2).project.q.steps]
    ['Rotary', 'RMSNorm']

    Source: Henry et al. 2020 (arXiv 2010.04245).
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    return _gqa_with_norm(dim, heads, groups, D, lambda: (rotary, RMSNorm(D)))


@variant(
    family="softmax",
    equation="q = norm(W_q x) over all heads, then split and rotated; k in the same way",
    source="OLMo 2 (arXiv 2501.00656), section 3.3",
    groups=2,
)
def qk_norm_flat(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm over the full width: queries and keys are normalised before they are split into
    heads, as in OLMo 2.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> qk_norm_flat(32, 4, groups=2).project.k.flat
    RMSNorm(16, eps=1e-06)

    Source: OLMo 2 (arXiv 2501.00656), section 3.3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    project = SeparateQKV(
        HeadProjection(dim, heads, D, rotary, flat=RMSNorm(heads * D)),
        HeadProjection(dim, groups, D, rotary, flat=RMSNorm(groups * D)),
        HeadProjection(dim, groups, D),
    )
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


def _gqa_with_norm(
    dim: int, heads: int, groups: int, D: int, steps: Callable[[], tuple[nn.Module, ...]]
) -> Attention:
    """Build causal grouped-query attention with these steps on queries and keys."""
    # `steps` is called twice, so that queries and keys have separate norms and share the rotary.
    project = SeparateQKV(
        HeadProjection(dim, heads, D, *steps()),
        HeadProjection(dim, groups, D, *steps()),
        HeadProjection(dim, groups, D),
    )
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(c tanh(q_h k_g^T / (c sqrt(D))) + causal) v_g",
    source="Gemma 2 (arXiv 2408.00118), section 2",
    groups=2,
)
def softcap(
    dim: int,
    heads: int,
    *,
    groups: int,
    cap: float = 50.0,
    scale: float | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Capped scores: a tanh keeps every score within (-c, c), as in Gemma 2.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        cap: the cap c.
        scale: the factor on the scores; None is 1/sqrt(D).

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or cap is not positive.

    >>> softcap(32, 4, groups=2, cap=30.0).softcap
    30.0

    Source: Gemma 2 (arXiv 2408.00118), section 2; Bello et al. 2016 (arXiv 1611.09940), equation
    16.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return Attention(
        project, output_projection(dim, heads, D), mask=Causal(), softcap=cap, scale=scale
    )


@variant(
    family="softmax",
    equation="p_ij = exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij))",
    source="gpt-oss model card (arXiv 2508.10925), section 2.2",
    groups=2,
)
def learned_sink(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
    bias: bool = True,
) -> Attention:
    """Learned attention sink: one logit per head is added to the softmax denominator, so that a
    head can attend to nothing.

    x [B,T,M] -> [B,T,M]; the sinks start at 0, which is the softmax "off by one".

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        bias: whether the linear maps have a bias, as in gpt-oss.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> learned_sink(32, 4, groups=2).sink.shape
    torch.Size([4])

    Source: gpt-oss model card (arXiv 2508.10925), section 2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base), bias=bias)
    sink = nn.Parameter(torch.zeros(heads))
    return Attention(project, output_projection(dim, heads, D, bias=bias), mask=Causal(), sink=sink)


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_h^T / sqrt(D) - m_h (i - j) + causal) v_h",
    source="Press et al. 2021 (arXiv 2108.12409), section 3",
)
def alibi(dim: int, heads: int, *, head_dim: int | None = None, bias: bool = False) -> Attention:
    """ALiBi: a penalty that is linear in the distance replaces position embeddings; each head has a
    fixed slope, as in BLOOM and MPT.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha`.

    >>> alibi(32, 4).bias
    alibi(4)

    Source: Press et al. 2021 (arXiv 2108.12409), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return Attention(
        separate_qkv(dim, heads, heads, D, bias=bias),
        output_projection(dim, heads, D, bias=bias),
        mask=Causal(),
        bias=ALiBi(heads),
    )


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_h^T + table[bucket(j - i), h] + causal) v_h",
    source="Raffel et al. 2020 (arXiv 1910.10683), section 2.1",
)
def t5(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> Attention:
    """T5's relative bias: each bucket of distances has a learned bias per head, and scores are not
    scaled.

    x [B,T,M] -> [B,T,M]; causal, as in the decoder, unless bidirectional.

    Args:
        dim, heads, head_dim: as for `mha`.
        buckets: the number of buckets of distances.
        max_distance: the distance from which on all keys share one bucket.
        bidirectional: whether to build the encoder's form, which sees all tokens.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `mha` and `T5Relative`.

    >>> t5(32, 4).scale
    1.0

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    table = nn.Parameter(0.1 * torch.randn(buckets, heads))
    return Attention(
        separate_qkv(dim, heads, heads, D),
        output_projection(dim, heads, D),
        scale=1.0,
        mask=None if bidirectional else Causal(),
        bias=T5Relative(table, bidirectional=bidirectional, max_distance=max_distance),
    )


@variant(
    family="softmax",
    equation="z'_h = z_h * sigmoid(W_g x)_h",
    source="Qiu et al. 2025 (arXiv 2505.06708), section 3",
    groups=2,
)
def gated(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Gated output: every element of the heads is multiplied by a sigmoid gate, which is computed
    from the hidden state of the query, as in Qwen3-Next.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> gated(32, 4, groups=2).project.gate
    HeadProjection(
      4 heads of 8
      (linear): Linear(in_features=32, out_features=32, bias=False)
      (flat): Identity()
      (steps): ModuleList()
    )

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = separate_qkv(dim, heads, groups, D, Rotary(D, base))
    return Attention(
        GatedProjection(project, HeadProjection(dim, heads, D)),
        output_projection(dim, heads, D),
        mask=Causal(),
    )


@variant(
    family="softmax",
    equation="z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v)",
    source="Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3",
)
def differential(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    depth: int = 0,
    base: float = 10000.0,
) -> Attention:
    """Differential attention: the difference of two attention patterns over the same values.

    x [B,T,M] -> [B,T,M]; each of the H heads has two query heads of size D, and values of size 2 D.

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / (2 H), which gives as many parameters as `mha`.
        depth: the index of the layer, from 0.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, or depth is negative.

    >>> differential(32, 4).project.shape
    ProjectionShape(H=8, G=8, D=4, E=8, memory=(32, 32))

    Source: Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3.
    """
    D, G = resolve_head_dim(dim, 2 * heads, head_dim), groups or heads
    rotary = Rotary(D, base)
    project = DifferentialProjection(
        HeadProjection(dim, 2 * heads, D, rotary),
        HeadProjection(dim, 2 * G, D, rotary),
        HeadProjection(dim, G, 2 * D),
        depth=depth,
    )
    return Attention(project, output_projection(dim, heads, 2 * D), mask=Causal())


@variant(
    family="latent",
    equation="c = norm(W_dkv x), k_r = R_s W_kr x; z_h = softmax(([W_uk,h^T q_h; q_r,h]^T [c; "
    "k_r]) scale + causal) c W_uv,h^T",
    source="DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 to 47",
    q_rank=24,
    kv_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
)
def mla(
    dim: int,
    heads: int,
    *,
    q_rank: int | None = None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    form: Form | Literal["naive"] = "auto",
) -> Attention:
    """Multi-head latent attention: all heads compute keys and values from one latent and one rotary
    key per token.

    x [B,T,M] -> [B,T,M]; a cache stores r + d_rope values per token. As in DeepSeek-V2 and V3,
    rotary pairs are interleaved, both latents are normalised, and the scale is
    1/sqrt(d_nope + d_rope), times f(mscale_all_dim)^2 of a `YaRN` scaling.

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        q_rank: the size of the latent of queries; None computes queries directly from x (V2-Lite).
        kv_rank: the size r of the latent of keys and values.
        nope_dim: the dims of a query and key head without rotary positions, d_nope.
        rope_dim: the dims of a query and key head with rotary positions, d_rope; even.
        value_dim: the value dim E.
        base: the base of the rotary positions.
        scaling: a scaling of the rotary frequencies (`regard.positions`), or None.
        form: "naive" caches the keys and values of each head; "expand", "absorb" and "auto" cache
            latents (`LatentProjection`).

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, rope_dim is odd, or form is unknown.

    >>> import torch
    >>> layer = mla(32, 4, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
    >>> layer(torch.zeros(1, 5, 32)).shape, layer.project.shape.memory
    (torch.Size([1, 5, 32]), (20,))

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; the same in V3 (arXiv 2412.19437).
    """
    forms = ("naive", *get_args(Form))
    if form not in forms:
        raise ArgumentError(
            f"form is {form!r}; it must be one of {', '.join(forms)}", argument="form"
        )
    if rope_dim < 2 or rope_dim % 2:
        allowed = max(2, rope_dim + 1)
        raise ArgumentError(
            f"rope_dim is {rope_dim}; it must be even and at least 2, since rotary positions "
            f"rotate pairs; use for example {allowed}",
            argument="rope_dim",
        )
    rotary = Rotary(rope_dim, base, scaling=scaling, layout="interleaved")
    make = NaiveLatentProjection if form == "naive" else LatentProjection
    project = make(
        dim,
        heads,
        rotary,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        value_dim=value_dim,
        q_rank=q_rank,
        form="expand" if form == "naive" else form,
    )
    return Attention(
        project, output_projection(dim, heads, value_dim), mask=Causal(), scale=project.scale
    )
