"""Softmax attention with other scores: capped, biased by distance, or beside a learned sink."""

from __future__ import annotations

import torch
from torch import nn

from regard.biases import ALiBi, T5Relative
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant
from regard.positions import Rotary


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
        cap: c.
        scale: of the scores; None is 1/sqrt(D).

    Raises:
        ArgumentError: as for `gqa`, or cap is not positive.

    >>> softcap(32, 4, groups=2, cap=30.0).softcap
    30.0

    Source: Gemma 2 (arXiv 2408.00118), section 2; Bello et al. 2016 (arXiv 1611.09940), equation 16.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base))
    return Attention(project, join(dim, heads, D), mask=Causal(), softcap=cap, scale=scale)


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
    """A learned sink: one logit per head takes part in the denominator, so that a head may attend to nothing.

    x [B,T,M] -> [B,T,M]; the sinks start at 0, which is the softmax "off by one".

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        bias: whether the linear maps have one; gpt-oss has.

    Raises:
        ArgumentError: as for `gqa`.

    >>> learned_sink(32, 4, groups=2).sink.shape
    torch.Size([4])

    Source: gpt-oss model card (arXiv 2508.10925), section 2.2.
    """
    D = head_size(dim, heads, head_dim)
    project = separate(dim, heads, groups, D, Rotary(D, base), bias=bias)
    sink = nn.Parameter(torch.zeros(heads))
    return Attention(project, join(dim, heads, D, bias=bias), mask=Causal(), sink=sink)


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_h^T / sqrt(D) - m_h (i - j) + causal) v_h",
    source="Press et al. 2021 (arXiv 2108.12409), section 3",
)
def alibi(dim: int, heads: int, *, head_dim: int | None = None, bias: bool = False) -> Attention:
    """ALiBi: no positions but a penalty on distance, at a slope of its own for each head, as in BLOOM and MPT.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.

    Raises:
        ArgumentError: as for `mha`.

    >>> alibi(32, 4).bias
    alibi(4)

    Source: Press et al. 2021 (arXiv 2108.12409), section 3.
    """
    D = head_size(dim, heads, head_dim)
    return Attention(
        separate(dim, heads, heads, D, bias=bias), join(dim, heads, D, bias=bias),
        mask=Causal(), bias=ALiBi(heads),
    )  # fmt: skip


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
    """T5's relative bias: a learned number for each bucket of distances and head; scores are not scaled.

    x [B,T,M] -> [B,T,M]; the decoder's form, causal, unless bidirectional.

    Args:
        dim, heads, head_dim: as for `mha`.
        buckets, max_distance: of `T5Relative`.
        bidirectional: the encoder's form, which sees everything.

    Raises:
        ArgumentError: as for `mha` and `T5Relative`.

    >>> t5(32, 4).scale
    1.0

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """
    D = head_size(dim, heads, head_dim)
    table = nn.Parameter(0.1 * torch.randn(buckets, heads))
    return Attention(
        separate(dim, heads, heads, D), join(dim, heads, D), scale=1.0,
        mask=None if bidirectional else Causal(),
        bias=T5Relative(table, bidirectional=bidirectional, max_distance=max_distance),
    )  # fmt: skip
