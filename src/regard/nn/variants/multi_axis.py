"""Constructors of mechanisms whose rotary positions have several axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from regard.argument_checks import resolve_head_dim
from regard.masks import Causal, Mask
from regard.nn.multi_axis_attention import MultiAxisAttention, MultiAxisProjection
from regard.nn.projections import HeadProjection
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.positions.multi_axis import MultiAxisRotary


def _with_axes(
    dim: int, heads: int, groups: int, rotary: MultiAxisRotary, mask: Mask | None
) -> MultiAxisAttention:
    """Build grouped-query attention with rotary positions of several axes."""
    D = rotary.dim
    project = MultiAxisProjection(
        HeadProjection(dim, heads, D, rotary),
        HeadProjection(dim, groups, D, rotary),
        HeadProjection(dim, groups, D),
    )
    return MultiAxisAttention(project, output_projection(dim, heads, D), mask=mask)


@variant(
    family="softmax",
    equation="z_h = softmax(q_h R^T R k_g^T / sqrt(D) + causal) v_g, R rotates each pair by one of "
    "t, h, w",
    source="Wang et al. 2024 (arXiv 2409.12191), section 2.1, Qwen2-VL; Qwen3-VL 2025",
    groups=2,
)
def mrope(
    dim: int,
    heads: int,
    *,
    groups: int,
    sections: Sequence[int] | None = None,
    order: Literal["chunks", "interleaved"] = "chunks",
    head_dim: int | None = None,
    base: float = 10000.0,
) -> MultiAxisAttention:
    """Multimodal rotary positions (M-RoPE): each pair of dims is rotated by one of the three
    coordinates of a token in time, height and width. For text, this is `gqa`.

    x [B,T,M] -> [B,T,M]; positions are [4,B,T] (`regard.positions.multi_axis_positions`), or those
    of text. A cache also stores one number per token, from which the next text token gets its
    coordinate.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        sections: the number of pairs for time, height and width, D/2 together; None has the shares
            of the models: 16, 24, 24 of 64 in chunks, 24, 20, 20 interleaved.
        order: "chunks" as in Qwen2-VL, or "interleaved" as in Qwen3-VL.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or the sections do not fit the head dim.

    >>> mrope(512, 4, groups=2).project.rotary.sections
    (16, 24, 24)

    Source: Wang et al. 2024 (arXiv 2409.12191), section 2.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    if sections is None:
        n = D // 2
        side = 5 * n // 16 if order == "interleaved" else 3 * n // 8
        sections = (n - 2 * side, side, side)
    rotary = MultiAxisRotary(D, base, sections=sections, order=order)
    return _with_axes(dim, heads, groups, rotary, Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(q_h R^T R k_g^T / sqrt(D)) v_g, R rotates half of the pairs by h, and "
    "the others by w",
    source="Agrawal et al. 2024, Pixtral (arXiv 2410.07073), section 2.1; the image encoders of "
    "Qwen2-VL and Kimi-VL",
    causal=False,
    groups=2,
)
def rope_2d(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> MultiAxisAttention:
    """Rotary positions in two dimensions: half of the pairs are rotated by the row of an image, and
    half by its column, each with frequencies of its own.

    x [B,T,M] -> [B,T,M]; every patch sees every other. Positions are [3,B,T]: the order of the
    patches, their rows and columns, as `multi_axis_positions(...)[[0, 2, 3]]` of one image; without
    coordinates, patch i is at row i and column i.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`; D is a multiple of 4.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or D is not a multiple of 4.

    >>> rope_2d(32, 4, groups=2).project.rotary.inv_freq.tolist()
    [1.0, 0.01, 1.0, 0.01]

    Source: Agrawal et al. 2024 (arXiv 2410.07073), section 2.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = MultiAxisRotary(D, base, sections=(D // 4, D // 4), own_frequencies=True)
    return _with_axes(dim, heads, groups, rotary, None)
