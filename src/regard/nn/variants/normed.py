"""Softmax attention with normed queries and keys: before rotary, after it, or over all heads at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.norms import RMSNorm
from regard.nn.project import Heads, Separate
from regard.nn.variants.parts import head_size, join
from regard.nn.variants.registry import variant
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g)",
    source="Yang et al. 2025, Qwen3 (arXiv 2505.09388), section 2; Henry et al. 2020 (arXiv 2010.04245)",
    groups=2,
)
def qk_norm(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm before rotary: queries and keys are normed head by head, then rotated, as in Qwen3 and Gemma 3.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Raises:
        ArgumentError: as for `gqa`.

    >>> [type(step).__name__ for step in qk_norm(32, 4, groups=2).project.q.steps]
    ['RMSNorm', 'Rotary']

    Source: Henry et al. 2020 (arXiv 2010.04245); order: Qwen3.
    """
    D, rotary = head_size(dim, heads, head_dim), Rotary(head_size(dim, heads, head_dim), base)
    return _normed(dim, heads, groups, D, lambda: (RMSNorm(D), rotary))


@variant(
    family="softmax",
    equation="q_h = norm(rotary(W_q x)_h), k_g = norm(rotary(W_k x)_g)",
    source="Henry et al. 2020 (arXiv 2010.04245); order: Hunyuan and nanochat",
    groups=2,
)
def qk_norm_after_rotary(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm after rotary: the same parts as `qk_norm` in the other order, which is another function.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Raises:
        ArgumentError: as for `gqa`.

    >>> [type(step).__name__ for step in qk_norm_after_rotary(32, 4, groups=2).project.q.steps]
    ['Rotary', 'RMSNorm']

    Source: Henry et al. 2020 (arXiv 2010.04245).
    """
    D, rotary = head_size(dim, heads, head_dim), Rotary(head_size(dim, heads, head_dim), base)
    return _normed(dim, heads, groups, D, lambda: (rotary, RMSNorm(D)))


@variant(
    family="softmax",
    equation="q = norm(W_q x) over all heads, then split and rotated; k alike",
    source="OLMo 2 (arXiv 2501.00656), section 3.3",
    groups=2,
)
def qk_norm_flat(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """QK-norm over the full width: queries are normed before they are split into heads, as in OLMo 2.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Raises:
        ArgumentError: as for `gqa`.

    >>> qk_norm_flat(32, 4, groups=2).project.k.flat
    RMSNorm(16, eps=1e-06)

    Source: OLMo 2 (arXiv 2501.00656), section 3.3.
    """
    D = head_size(dim, heads, head_dim)
    rotary = Rotary(D, base)
    project = Separate(
        Heads(dim, heads, D, rotary, flat=RMSNorm(heads * D)),
        Heads(dim, groups, D, rotary, flat=RMSNorm(groups * D)),
        Heads(dim, groups, D),
    )
    return Attention(project, join(dim, heads, D), mask=Causal())


def _normed(
    dim: int, heads: int, groups: int, D: int, steps: Callable[[], tuple[nn.Module, ...]]
) -> Attention:
    # norms are trained apart for queries and keys; the rotary is one
    project = Separate(
        Heads(dim, heads, D, *steps()), Heads(dim, groups, D, *steps()), Heads(dim, groups, D)
    )
    return Attention(project, join(dim, heads, D), mask=Causal())
