"""Softmax attention in its first forms: without weights, one head, many heads, one fused matrix."""

from __future__ import annotations

from torch import nn

from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.fused import Fused, Order, PerHead, Unprojected
from regard.nn.project import Separate
from regard.nn.variants.parts import head_size, join, separate
from regard.nn.variants.registry import variant


@variant(
    family="softmax",
    equation="z = softmax(x x^T) x",
    source="Raschka 2024, Build a Large Language Model (From Scratch), section 3.3",
    causal=False,
)
def weightless(dim: int, heads: int = 1) -> Attention:
    """Self-attention without weights: tokens look at one another as they are.

    x [B,T,M] -> [B,T,M]; every token sees every other; the scale is 1.

    Args:
        dim: the model dim M.
        heads: of no meaning here: one head is as wide as the model.

    Raises:
        ArgumentError: dim is less than 1.

    >>> import torch
    >>> weightless(3)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 3])

    Source: Raschka 2024, section 3.3.
    """
    del heads
    return Attention(Unprojected(dim), nn.Identity(), scale=1.0)


@variant(
    family="softmax",
    equation="z = softmax(q k^T / sqrt(D)) v, q = W_q x, k = W_k x, v = W_v x",
    source="Vaswani et al. 2017 (arXiv 1706.03762), equation 1",
    causal=False,
)
def single_head(
    dim: int, heads: int = 1, *, head_dim: int | None = None, bias: bool = False
) -> Attention:
    """Scaled dot-product attention with trained weights, in one head, without a mask.

    x [B,T,M] -> [B,T,D]: the head itself, without an output projection.

    Args:
        dim: the model dim M.
        heads: of no meaning here.
        head_dim: D; None is M.
        bias: whether the three maps have one.

    Raises:
        ArgumentError: a size is less than 1.

    >>> import torch
    >>> single_head(3, head_dim=2)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 2])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    del heads
    project = separate(dim, 1, 1, dim if head_dim is None else head_dim, bias=bias)
    return Attention(project, nn.Identity())


@variant(
    family="softmax",
    equation="z = softmax(q k^T / sqrt(D) + causal) v",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3",
)
def causal(
    dim: int, heads: int = 1, *, head_dim: int | None = None, dropout: float = 0.0
) -> Attention:
    """Causal attention in one head: a token sees itself and what came before it.

    x [B,T,M] -> [B,T,D]. Dropout acts on the weights, in training only.

    Args:
        dim: the model dim M.
        heads: of no meaning here.
        head_dim: D; None is M.
        dropout: on the weights.

    Raises:
        ArgumentError: a size is less than 1, or dropout is out of range.

    >>> import torch
    >>> causal(3, head_dim=2, dropout=0.1)(torch.zeros(1, 6, 3)).shape
    torch.Size([1, 6, 2])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """
    del heads
    project = separate(dim, 1, 1, dim if head_dim is None else head_dim)
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
    """Multi-head attention: H heads side by side, their matrices stacked into one.

    x [B,T,M] -> [B,T,M]; a cache keeps 2 H D numbers per token.

    Args:
        dim, heads: the model dim M and the heads H.
        head_dim: D; None is M / H.
        bias: whether the linear maps have one.
        dropout: on the weights, in training only.
        is_causal: whether a token sees only itself and what came before.

    Raises:
        ArgumentError: a size is less than 1, M / H is not whole and head_dim is None, or dropout is out of range.

    >>> mha(32, 4).project.shape.memory
    (32, 32)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2.
    """
    D = head_size(dim, heads, head_dim)
    return Attention(
        separate(dim, heads, heads, D, bias=bias), join(dim, heads, D, bias=bias),
        mask=Causal() if is_causal else None, dropout=dropout,
    )  # fmt: skip


@variant(
    family="softmax",
    equation="out = W_o [z_1; ...; z_H], z_h = softmax(W_h^Q x (W_h^K x)^T / sqrt(D)) W_h^V x",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2",
    causal=False,
)
def mha_per_head(
    dim: int, heads: int, *, head_dim: int | None = None, bias: bool = False
) -> Attention:
    """Multi-head attention written head by head: the function of `mha`, with a matrix of its own for every head.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, head_dim, bias: as for `mha`.

    Raises:
        ArgumentError: as for `mha`.

    >>> len(mha_per_head(32, 4).project.q.linear)
    4

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2.
    """
    D = head_size(dim, heads, head_dim)
    q, k, v = (PerHead(dim, heads, D, bias=bias) for _ in range(3))
    return Attention(Separate(q, k, v), join(dim, heads, D, bias=bias))


def stacked(split: Attention) -> Attention:
    """The same attention with the matrices of its heads stacked: `mha` out of `mha_per_head`.

    >>> import torch
    >>> split, x = mha_per_head(8, 2), torch.randn(1, 5, 8)
    >>> torch.allclose(stacked(split)(x), split(x), atol=1e-6)
    True
    """
    project = split.project
    assert isinstance(project, Separate)
    parts = (project.q, project.k, project.v)
    heads = [part.stack() if isinstance(part, PerHead) else part for part in parts]
    return Attention(Separate(*heads), split.output, mask=split.mask, dropout=split.dropout)


@variant(
    family="softmax",
    equation="[q; k; v] = W x + b; out = W_o [z_1; ...; z_H] + b_o, z_h = softmax(q_h k_h^T / sqrt(D) + causal) v_h",
    source="Radford et al. 2018, Improving Language Understanding by Generative Pre-Training, section 3.1",
)
def gpt(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    order: Order = "parts",
    bias: bool = True,
    dropout: float = 0.0,
) -> Attention:
    """GPT attention: causal, with queries, keys and values from one fused matrix.

    x [B,T,M] -> [B,T,M]; positions are the model's matter (learned, added to the embedding).

    Args:
        dim, heads: the model dim M and the heads H.
        groups: key/value heads G; None is H.
        head_dim: D; None is M / H.
        order: how the rows of the matrix are laid out: "parts" is GPT-2's.
        bias: whether the linear maps have one.
        dropout: on the weights, in training only.

    Raises:
        ArgumentError: a size is less than 1, G does not divide H, or order or dropout is out of range.

    >>> gpt(32, 4).project.linear.weight.shape
    torch.Size([96, 32])

    Source: Radford et al. 2018, section 3.1; code: GPT-2.
    """
    D = head_size(dim, heads, head_dim)
    project = Fused(dim, heads, groups or heads, D, order=order, bias=bias)
    return Attention(project, join(dim, heads, D, bias=bias), mask=Causal(), dropout=dropout)
