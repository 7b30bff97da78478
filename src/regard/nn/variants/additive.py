"""Attention of a recurrent decoder to the states of its encoder: additive and multiplicative."""

from __future__ import annotations

from torch import nn

from regard.errors import ArgumentError
from regard.nn.additive import AdditiveAttention
from regard.nn.cross import CrossAttention
from regard.nn.linear import Linear
from regard.nn.states import States
from regard.nn.variants.registry import variant

SCORES = ("dot", "general", "concat")


@variant(
    family="additive",
    equation="e_ij = v . tanh(W s_{i-1} + U h_j); a_i = softmax(e_i); c_i = sum_j a_ij h_j",
    source="Bahdanau et al. 2015 (arXiv 1409.0473), equations 5 and 6, appendix A.1.2",
)
def bahdanau(
    dim: int, heads: int = 1, *, memory_dim: int | None = None, hidden: int | None = None
) -> AdditiveAttention:
    """Additive attention: a small network scores each state of the encoder against the decoder's state.

    s [B,T,M], memory h [B,S,M3] -> context c [B,T,M3]; a cache keeps h and U h. The paper's query is the previous
    state of the decoder, and its h joins both directions of the encoder.

    Args:
        dim: the size M of a decoder's state.
        heads: H; the paper has 1. Each has its share of the hidden layer and of the states.
        memory_dim: the size M3 of an encoder's state; None is M.
        hidden: A, the width of the hidden layer; None is M.

    Raises:
        ArgumentError: a size is less than 1 or not a multiple of heads.

    >>> import torch
    >>> bahdanau(32)(torch.zeros(1, 1, 32), memory=torch.zeros(1, 5, 32)).shape
    torch.Size([1, 1, 32])

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), equations 5 and 6, appendix A.1.2.
    """
    M3, A = _sizes(dim, memory_dim, hidden)
    query, key = Linear(dim, A, bias=False), Linear(M3, A, bias=False)
    return AdditiveAttention(States(query, M3, heads=heads, key=key))


@variant(
    family="additive",
    equation="e_ij = s_i . h_j (dot) | s_i^T W h_j (general) | v . tanh(W [s_i; h_j]) (concat); c_i = sum_j softmax(e_i)_j h_j",
    source="Luong et al. 2015 (arXiv 1508.04025), equations 7 and 8",
)
def luong(
    dim: int,
    heads: int = 1,
    *,
    memory_dim: int | None = None,
    score: str = "general",
    hidden: int | None = None,
) -> CrossAttention | AdditiveAttention:
    """Multiplicative attention, global: states of the encoder, scored by a product with the decoder's present state.

    s [B,T,M], memory h [B,S,M3] -> context c [B,T,M3]; a cache keeps h. It is cross-attention whose keys and values are
    the states themselves, with scale 1; `concat` is additive attention.

    Args:
        dim: the size M of a decoder's state.
        heads: H; the paper has 1.
        memory_dim: the size M3 of an encoder's state; None is M, which "dot" needs.
        score: "dot", "general" or "concat".
        hidden: the width of the hidden layer of "concat"; None is M.

    Raises:
        ArgumentError: score is unknown, or a size does not fit it.

    >>> import torch
    >>> luong(32, score="dot")(torch.zeros(1, 2, 32), memory=torch.zeros(1, 5, 32)).shape
    torch.Size([1, 2, 32])

    Source: Luong et al. 2015 (arXiv 1508.04025), section 3.1.
    """
    M3, _ = _sizes(dim, memory_dim, hidden)
    if score == "concat":  # W [s; h] = W_1 s + W_2 h
        return bahdanau(dim, heads, memory_dim=memory_dim, hidden=hidden)
    if score not in SCORES:
        raise ArgumentError(f"score is {score!r}; it must be one of {', '.join(SCORES)}")
    if hidden is not None:
        raise ArgumentError(f'hidden is {hidden}, but only score="concat" has a hidden layer')
    query = dim if score == "dot" else Linear(dim, M3, bias=False)
    return CrossAttention(States(query, M3, heads=heads), nn.Identity(), scale=1.0)


def _sizes(dim: int, memory_dim: int | None, hidden: int | None) -> tuple[int, int]:
    """The sizes of a state of the encoder and of the hidden layer."""
    M3 = dim if memory_dim is None else memory_dim
    A = dim if hidden is None else hidden
    for name, size in (("dim", dim), ("memory_dim", M3), ("hidden", A)):
        if size < 1:
            raise ArgumentError(f"{name} is {size}; it must be at least 1")
    return M3, A
