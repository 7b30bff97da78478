"""Cross-attention."""

from __future__ import annotations

from regard.nn.cross import CrossAttention
from regard.nn.project import Heads, Separate
from regard.nn.variants.parts import head_size, join
from regard.nn.variants.registry import variant


@variant(
    family="cross",
    equation="z_h = softmax(q_h k_g^T / sqrt(D)) v_g; q = W_q x; k, v = W_k m, W_v m of a memory m",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3",
    causal=True,
)
def cross_attention(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    memory_dim: int | None = None,
    head_dim: int | None = None,
    bias: bool = False,
) -> CrossAttention:
    """Cross-attention: queries from one sequence, keys and values from another.

    x [B,T,M], memory [B,S,M3] -> [B,T,M]; a cache is written once and keeps 2 G D numbers per token of memory.

    Args:
        dim, heads: the model dim M and the query heads H.
        groups: the key/value heads G; None is H.
        memory_dim: M3, the size of a token of memory; None is M.
        head_dim: D; None is M / H.
        bias: whether the four maps have one.

    Raises:
        ArgumentError: a size is less than 1, or groups does not divide heads; head_dim is None and M / H is not whole.

    >>> import torch
    >>> cross_attention(32, 4)(torch.zeros(1, 2, 32), memory=torch.zeros(1, 5, 32)).shape
    torch.Size([1, 2, 32])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """
    D = head_size(dim, heads, head_dim)
    G, M3 = groups or heads, memory_dim or dim
    project = Separate(
        Heads(dim, heads, D, bias=bias), Heads(M3, G, D, bias=bias), Heads(M3, G, D, bias=bias)
    )
    return CrossAttention(project, join(dim, heads, D, bias=bias))
