"""Constructors of linear attention with feature maps that compute a function of the score: Based,
ReBased, power attention, Performer and cosFormer.
"""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.nn.decay_rules import CosineRule, LinearAttentionRule
from regard.nn.norms import HeadNorm
from regard.nn.projections import HeadProjection, SeparateQKV
from regard.nn.recurrent import Recurrent
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.ops.linear.feature_maps import PowerFeatures, RandomFeatures, TaylorFeatures


@variant(
    family="linear",
    equation="p_ij = (1 + s_ij + s_ij^2 / 2) / sum_j; z_i = sum_j p_ij v_j; s_ij = q_i . k_j / "
    "sqrt(D)",
    source="Arora et al. 2024 (arXiv 2402.18668), section 4.1",
    head_dim=4,
)
def based(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = 16,
    value_dim: int | None = None,
) -> Recurrent:
    """Based: linear attention with the first terms of the Taylor series of exp, which replace the
    exponential function of softmax.

    x [B,T,M] -> [B,T,M]; a cache stores G F (E + 1) values at any length, with F = 1 + D + D (D +
    1) / 2 features. The paper's models mix it with layers of sliding windows and convolutions.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D of queries and keys, small because F grows as D^2; None is M / H.
        value_dim: the value dim E; None is M / H.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or M / H is needed and
            not whole.

    >>> based(32, 4, head_dim=4).describe().state.formula
    'G F (E + 1) = 4 x 15 x (8 + 1)'

    Source: Arora et al. 2024 (arXiv 2402.18668), section 4.1.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = resolve_head_dim(dim, heads, None) if value_dim is None else value_dim
    G = heads if groups is None else groups
    project = separate_qkv(dim, heads, G, D, value_dim=E)
    rule = LinearAttentionRule(TaylorFeatures())
    return Recurrent(project, rule, output_projection(dim, heads, E))


@variant(
    family="linear",
    equation="p_ij = s_ij^2 / sum_j s_ij^2; z_i = sum_j p_ij v_j; s_ij = norm(q_i) . norm(k_j)",
    source="Aksenov et al. 2024 (arXiv 2402.10644), section 4",
    head_dim=4,
)
def rebased(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = 16,
    value_dim: int | None = None,
) -> Recurrent:
    """ReBased: linear attention with the square of the score, after a layer norm with learned
    weight and bias on each query and key head.

    x [B,T,M] -> [B,T,M]; a cache stores H F (E + 1) values at any length, with F = D (D + 1) / 2
    features.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D of queries and keys, small because F grows as D^2; None is M / H.
        value_dim: the value dim E; None is M / H.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or M / H is needed and not whole.

    >>> rebased(32, 4, head_dim=4).describe().state.formula
    'G F (E + 1) = 4 x 10 x (8 + 1)'

    Source: Aksenov et al. 2024 (arXiv 2402.10644), section 4.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = resolve_head_dim(dim, heads, None) if value_dim is None else value_dim
    project = SeparateQKV(
        HeadProjection(dim, heads, D, HeadNorm(heads, D)),
        HeadProjection(dim, heads, D, HeadNorm(heads, D)),
        HeadProjection(dim, heads, E),
    )
    rule = LinearAttentionRule(PowerFeatures(2))
    return Recurrent(project, rule, output_projection(dim, heads, E))


@variant(
    family="linear",
    equation="p_ij = s_ij^m / sum_j s_ij^m; z_i = sum_j p_ij v_j; s_ij = q_i . k_j; m = 2, 4, ...",
    source="Gelada et al. 2025 (arXiv 2507.04239)",
)
def power_attention(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    power: int = 2,
) -> Recurrent:
    """Power attention: linear attention with an even power of the score, so that the size of the
    state can be chosen by the power.

    x [B,T,M] -> [B,T,M]; a cache stores G F (E + 1) values at any length, with F = C(D + power - 1,
    power) features.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        power: the power of the score, an even number of at least 2.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads, power
            is not an even int of at least 2, or head_dim is None and M / H is not whole.

    >>> power_attention(32, 4).describe().state.formula
    'G F (E + 1) = 4 x 36 x (8 + 1)'

    Source: Gelada et al. 2025 (arXiv 2507.04239).
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    rule = LinearAttentionRule(PowerFeatures(power))
    project = separate_qkv(dim, heads, G, D, value_dim=E)
    return Recurrent(project, rule, output_projection(dim, heads, E))


@variant(
    family="linear",
    equation="p_ij = phi(q_i) . phi(k_j) / sum_j; z_i = sum_j p_ij v_j; phi(x) = exp(w x - x^2 / "
    "2), w random",
    source="Choromanski et al. 2021 (arXiv 2009.14794), section 2",
    features=12,
)
def performer(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    features: int = 256,
    seed: int = 0,
) -> Recurrent:
    """Performer: linear attention with positive random features, whose weights are on average those
    of softmax attention.

    x [B,T,M] -> [B,T,M]; a cache stores G F (E + 1) values at any length. The random directions
    follow from the seed; they are not learned and not stored in a checkpoint.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        features: the random features F of a head.
        seed: the seed of the random directions.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> performer(32, 4, features=12).describe().state.formula
    'G F (E + 1) = 4 x 12 x (8 + 1)'

    Source: Choromanski et al. 2021 (arXiv 2009.14794), section 2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    rule = LinearAttentionRule(RandomFeatures(D, features, seed))
    project = separate_qkv(dim, heads, G, D, value_dim=E)
    return Recurrent(project, rule, output_projection(dim, heads, E))


@variant(
    family="linear",
    equation="p_ij = relu(q_i) . relu(k_j) cos(pi (i - j) / (2 m)) / sum_j; z_i = sum_j p_ij v_j",
    source="Qin et al. 2022 (arXiv 2202.08791), section 3",
    period=64,
)
def cosformer(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    period: int = 4096,
) -> Recurrent:
    """cosFormer: linear attention with relu features, whose weights fall with the distance as a
    cosine.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D (E + 1) values at any length.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        period: the distance at which a weight reaches 0; the longest text of the model.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> cosformer(32, 4).describe().state.formula
    'G F (E + 1) = 4 x 16 x (8 + 1)'

    Source: Qin et al. 2022 (arXiv 2202.08791), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    project = separate_qkv(dim, heads, G, D, value_dim=E)
    return Recurrent(project, CosineRule(period), output_projection(dim, heads, E))
