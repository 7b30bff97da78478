"""Constructors of softmax mechanisms whose cache stores few values per token: tensor products,
one wide head, tied keys, and several latents.
"""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.cost.latent import Form
from regard.errors import ArgumentError
from regard.masks import Causal
from regard.nn.attention import Attention
from regard.nn.factored_projections import (
    LowRankHeads,
    TensorProductHeads,
    TensorProductProjection,
    TiedProjection,
)
from regard.nn.latent_projection import GroupedLatentProjection
from regard.nn.projections import HeadProjection, SeparateQKV
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.positions import Rotary


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_h^T / sqrt(D) + causal) v_h, k_h = sum_r a_rh rotary(b_r) / R, "
    "a = W_a x, b = W_b x; the same for q and v",
    source="Zhang et al. 2025 (arXiv 2501.06425), section 3",
    rank=2,
    q_rank=3,
)
def tpa(
    dim: int,
    heads: int,
    *,
    rank: int = 2,
    q_rank: int | None = 6,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Tensor product attention: keys and values of all heads are sums of a few products of two
    small factors, and a cache stores the factors.

    x [B,T,M] -> [B,T,M]; a cache stores 2 R (H + D) values per token.

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        rank: the number of products R of keys and of values.
        q_rank: the number of products of queries; None computes queries by one matrix.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions, which rotate the second factor.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or M / H is not whole and head_dim is None.

    >>> tpa(4096, 32, rank=2).describe(100).kv_per_token.value
    640

    Source: Zhang et al. 2025 (arXiv 2501.06425), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    project = TensorProductProjection(
        HeadProjection(dim, heads, D, rotary)
        if q_rank is None
        else TensorProductHeads(dim, heads, D, q_rank, rotary),
        TensorProductHeads(dim, heads, D, rank, rotary),
        TensorProductHeads(dim, heads, D, rank),
    )
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k^T / sqrt(D) + causal) v, q_h = rotary(W_q,h norm(W_c x)), k = "
    "rotary(W_k x), v = W_v x",
    source="Hu et al. 2024 (arXiv 2412.19255), section 3.2",
    q_rank=24,
    head_dim=16,
)
def mfa(
    dim: int,
    heads: int,
    *,
    q_rank: int,
    head_dim: int,
    base: float = 10000.0,
) -> Attention:
    """Multi-matrix factorization attention: many wide query heads through one low-rank map, and one
    key/value head, as in Step-3.

    x [B,T,M] -> [B,T,M]; a cache stores 2 D values per token.

    Args:
        dim: the model dim M.
        heads: the query heads H; H D may be larger than M.
        q_rank: the size of the latent of queries.
        head_dim: the head dim D, usually 256.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or head_dim is odd.

    >>> mfa(32, 4, q_rank=24, head_dim=16).describe(100).kv_per_token.value
    32

    Source: Hu et al. 2024 (arXiv 2412.19255), section 3.2.
    """
    rotary = Rotary(head_dim, base)
    project = SeparateQKV(
        LowRankHeads(dim, heads, head_dim, rotary, rank=q_rank),
        HeadProjection(dim, 1, head_dim, rotary),
        HeadProjection(dim, 1, head_dim),
    )
    return Attention(project, output_projection(dim, heads, head_dim), mask=Causal())


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, k_g = concat(v_g[0 : D / 2], "
    "rotary(W_r x)), v_g = W_v x, g = h / (H / G)",
    source="Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.1",
    groups=2,
)
def gta(
    dim: int,
    heads: int,
    *,
    groups: int,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Grouped-tied attention: the first half of a key is the first half of its value, and one
    rotated half serves all key heads.

    x [B,T,M] -> [B,T,M]; a cache stores G D + D/2 values per token.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H.
        head_dim: the head dim D, a multiple of 4; None is M / H.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is no
            multiple of 4.

    >>> gta(4096, 32, groups=8).describe(100).kv_per_token.value
    1088

    Source: Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    if D % 4:
        raise ArgumentError(
            f"head_dim is {D}; it must be a multiple of 4, because half of it has rotary positions",
            argument="head_dim",
        )
    project = TiedProjection(
        HeadProjection(dim, heads, D),
        HeadProjection(dim, groups, D),
        HeadProjection(dim, 1, D // 2),
        Rotary(D // 2, base),
    )
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="latent",
    equation="c_i = norm(W_c,i x), k_r = rotary(W_kr x); z_h = softmax(concat(W_uk,h^T q_h, q_r)^T "
    "concat(c_i, k_r) scale + causal) c_i W_uv,h^T, i = h / (H / n)",
    source="Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.2",
    latents=2,
    q_rank=24,
    kv_rank=8,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
)
def grouped_latent(
    dim: int,
    heads: int,
    *,
    latents: int = 2,
    q_rank: int | None = None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    base: float = 10000.0,
    form: Form = "auto",
) -> Attention:
    """Grouped latent attention: several small latents per token, each of which serves some of the
    heads, so that tensor parallelism can split them.

    x [B,T,M] -> [B,T,M]; a cache stores n r + d_rope values per token.

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        latents: the number of latents n, which divides H; 1 is MLA.
        q_rank: the size of the latent of queries; None computes queries directly from x.
        kv_rank: the size r of one latent.
        nope_dim: the dims of a query and key head without rotary positions, d_nope.
        rope_dim: the dims of a query and key head with rotary positions, d_rope; even.
        value_dim: the value dim E.
        base: the base of the rotary positions.
        form: "expand", "absorb" or "auto", as for `mla`.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, latents does not divide heads, rope_dim is odd, or
            form is unknown.

    >>> grouped_latent(32, 4, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8).project.shape.memory
    (16, 4)

    Source: Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.2.
    """
    sizes = (latents, 1, kv_rank, nope_dim, rope_dim, value_dim)
    return _grouped(dim, heads, sizes, q_rank, base, form)


@variant(
    family="latent",
    equation="c_i = norm(W_c,i x), k_r = rotary(W_kr x); z_h = sum_j softmax(q_h concat(W_uk,j,h "
    "c_i, k_r)^T scale + causal) W_uv,j,h c_i / sqrt(m)",
    source="Liu et al. 2026 (arXiv 2603.02188), and its published code",
    latents=4,
    branches=2,
    q_rank=24,
    kv_rank=8,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
)
def mlra(
    dim: int,
    heads: int,
    *,
    latents: int = 4,
    branches: int = 4,
    q_rank: int | None = None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    base: float = 10000.0,
    form: Form = "auto",
) -> Attention:
    """Multi-head low-rank attention: every head attends once in each of several branches, which
    read different latents, and adds the results.

    x [B,T,M] -> [B,T,M]; a cache stores n r + d_rope values per token. With n latents and m
    branches, a latent serves m H / n heads; MLRA-4 has 4 of both, MLRA-2 has 4 latents and 2
    branches.

    Args:
        dim, heads: as for `grouped_latent`.
        latents: the number of latents n, which divides m H.
        branches: the number of branches m, which divides n.
        q_rank, kv_rank, nope_dim, rope_dim, value_dim, base, form: as for `grouped_latent`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `grouped_latent`, or branches does not divide latents.

    >>> sizes = {"kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    >>> mlra(32, 4, **sizes).project.select_form(1, 100).shape[:2]
    (16, 4)

    Source: Liu et al. 2026 (arXiv 2603.02188).
    """
    sizes = (latents, branches, kv_rank, nope_dim, rope_dim, value_dim)
    return _grouped(dim, heads, sizes, q_rank, base, form)


def _grouped(
    dim: int,
    heads: int,
    sizes: tuple[int, int, int, int, int, int],
    q_rank: int | None,
    base: float,
    form: Form,
) -> Attention:
    """Build attention with several latents; sizes are n, m, r, d_nope, d_rope and E."""
    latents, branches, kv_rank, nope_dim, rope_dim, value_dim = sizes
    if rope_dim < 2 or rope_dim % 2:
        raise ArgumentError(
            f"rope_dim is {rope_dim}; it must be even and at least 2, since rotary positions "
            f"rotate pairs; use for example {max(2, rope_dim + 1)}"
        )
    project = GroupedLatentProjection(
        dim,
        heads,
        Rotary(rope_dim, base, layout="interleaved"),
        latents=latents,
        branches=branches,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        value_dim=value_dim,
        q_rank=q_rank,
        form=form,
    )
    output = output_projection(dim, heads, value_dim)
    return Attention(project, output, mask=Causal(), scale=project.scale)
