"""Attention between two sequences: cross-attention, Bahdanau's and Luong's attention."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.nn.attention.cross import AdditiveAttention, CrossAttention
from regard.nn.projections.fused import EncoderStateProjection
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.variants.options import Biased, OptionalGroups
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.nn.weights import Linear


@variant(
    "cross",
    "z_h = softmax(q_h k_g^T / sqrt(D)) v_g; q = W_q x; k, v = W_k m, W_v m of a memory m",
    "Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3",
    users="the decoders of T5, BART, Marian and Whisper; image models that read a text",
    choose="one sequence is read while another one is written, and the first one is complete",
    avoid="a decoder alone is enough: it reads prompt and answer as one sequence",
    shapes="x [B,T,M], memory [B,S,M3] -> [B,T,M]",
)
def cross_attention(
    dim: int,
    heads: int,
    *,
    groups: OptionalGroups = None,
    memory_dim: int | None = None,
    **options: Unpack[Biased],
) -> CrossAttention:
    """Cross-attention: queries come from one sequence, keys and values from another.

    A cache is written once and stores 2 G D values per token of memory.

    Args:
        memory_dim: the size M3 of a token of memory; None is M.
        bias: whether the four linear maps have a bias.
    """
    D = resolve_head_dim(dim, heads, options["head_dim"])
    G, M3 = heads if groups is None else groups, dim if memory_dim is None else memory_dim
    project = SeparateQKV(
        HeadProjection(dim, heads, D, bias=options["bias"]),
        HeadProjection(M3, G, D, bias=options["bias"]),
        HeadProjection(M3, G, D, bias=options["bias"]),
    )
    return CrossAttention(project, output_projection(dim, heads, D, bias=options["bias"]))


SCORES = ("dot", "general", "concat")


@variant(
    "translation",
    "e_ij = v . tanh(W s_{i-1} + U h_j); a_i = softmax(e_i); c_i = sum_j a_ij h_j",
    "Bahdanau et al. 2015 (arXiv 1409.0473), equations 5 and 6, appendix A.1.2",
    users="RNNsearch, the first neural translation with attention",
    choose="a recurrent decoder reads a recurrent encoder of another width",
    avoid="a transformer is possible: its dot products are faster, and as good with a scale",
    where=(
        "U: learned matrix of the encoder states; W: learned matrix of the decoder state; a: "
        "weights over the encoder steps; c: context: the weighted sum of the encoder states; e: "
        "score of a decoder step and an encoder step; h: states of the encoder; s: state of the "
        "decoder; v: learned vector"
    ),
    shapes="s [B,T,M], memory h [B,S,M3] -> context c [B,T,M3]",
)
def bahdanau(
    dim: int, heads: int = 1, *, memory_dim: int | None = None, hidden: int | None = None
) -> AdditiveAttention:
    """Additive attention: a small network scores each encoder state against the decoder's state.

    A cache stores h and U h. In the paper the query is the previous state of the decoder, and h
    concatenates both directions of the encoder.

    Args:
        dim: the size M of a decoder state.
        heads: the number of heads H, which share the hidden layer and the states; the paper has 1.
        memory_dim: the size M3 of an encoder state; None is M.
        hidden: the size A of the hidden layer; None is M.
    """
    M3, A = _sizes(dim, memory_dim, hidden)
    query, key = Linear(dim, A, bias=False), Linear(M3, A, bias=False)
    return AdditiveAttention(EncoderStateProjection(query, M3, heads=heads, key=key))


@variant(
    "translation",
    "e_ij = s_i . h_j (dot) | s_i^T W h_j (general) | v . tanh(W [s_i; h_j]) (concat); c_i = "
    "sum_j softmax(e_i)_j h_j",
    "Luong et al. 2015 (arXiv 1508.04025), equations 7 and 8",
    users="the recurrent translation models of 2015 to 2017",
    choose="a recurrent decoder reads an encoder of the same width, with one product a step",
    avoid="a transformer is possible",
    where=(
        "W: learned matrix of the general and the concat score; c: context: the weighted sum of "
        "the encoder states; e: score of a decoder step and an encoder step; h: states of the "
        "encoder; s: state of the decoder; v: learned vector"
    ),
    shapes="s [B,T,M], memory h [B,S,M3] -> context c [B,T,M3]",
)
def luong(
    dim: int,
    heads: int = 1,
    *,
    memory_dim: int | None = None,
    score: str = "general",
    hidden: int | None = None,
) -> CrossAttention | AdditiveAttention:
    """Multiplicative (global) attention: encoder states are scored by a product with the decoder's
    current state.

    A cache stores h. It is cross-attention whose keys and values are the states themselves, with
    scale 1. The score "concat" is additive attention.

    Args:
        dim: the size M of a decoder state.
        heads: the number of heads H; the paper has 1.
        memory_dim: the size M3 of an encoder state; None is M, which "dot" requires.
        score: "dot", "general" or "concat".
        hidden: the size of the hidden layer of "concat"; None is M.
    """
    M3, _ = _sizes(dim, memory_dim, hidden)
    if score == "concat":  # W [s; h] = W_1 s + W_2 h
        return bahdanau(dim, heads, memory_dim=memory_dim, hidden=hidden)
    if score not in SCORES:
        raise ArgumentError(
            f"score is {score!r}; it must be one of {', '.join(SCORES)}", argument="score"
        )
    if hidden is not None:
        raise ArgumentError(
            f'hidden is {hidden}, but only score="concat" has a hidden layer', argument="hidden"
        )
    query = dim if score == "dot" else Linear(dim, M3, bias=False)
    return CrossAttention(EncoderStateProjection(query, M3, heads=heads), nn.Identity(), scale=1.0)


def _sizes(dim: int, memory_dim: int | None, hidden: int | None) -> tuple[int, int]:
    """Return the sizes of an encoder state and of the hidden layer, with their defaults."""
    M3 = dim if memory_dim is None else memory_dim
    A = dim if hidden is None else hidden
    for name, size in (("dim", dim), ("memory_dim", M3), ("hidden", A)):
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    return M3, A
