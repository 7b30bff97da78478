"""Linear recurrences: linear attention, retention, gated linear attention, DeltaNet and Gated
DeltaNet, and feature maps that compute a function of the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Unpack

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.nn.blocks.norms import HeadNorm, L2Norm, RMSNorm
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.projections.steps import Swish
from regard.nn.recurrence.decays import (
    CosineRule,
    GatedLinearRule,
    LinearAttentionRule,
    RetentionRule,
)
from regard.nn.recurrence.delta import DeltaRule, LogDecay
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.variants.options import Option, OptionalGroups, SharedValued, Valued
from regard.nn.variants.projections import Start, ValueHeadStart, set_half_heads
from regard.nn.variants.registry import variant
from regard.ops.linear.feature_maps import PowerFeatures, RandomFeatures, TaylorFeatures
from regard.ops.linear.linear_attention import FeatureMap


class Recurrence(Valued, total=False):
    """Heads with states, of which value heads may have more than key heads."""

    groups: Annotated[
        int | None,
        Option("the key heads G, and value heads by default; G divides H. None is H.", None),
    ]
    value_heads: Annotated[
        int | None,
        Option(
            "the value heads N, each with its own state; G divides N, and of H and N one divides "
            "the other. None is G.",
            None,
        ),
    ]


class Corrected(Recurrence, total=False):
    """States that a delta rule corrects."""

    normalize_keys: Annotated[
        bool,
        Option(
            "whether queries and keys are scaled to length 1, which keeps the state bounded.", True
        ),
    ]
    max_beta: Annotated[
        float, Option("the upper bound of beta, above 0 and at most 2 (`DeltaRule`).", 1.0)
    ]


@variant(
    "sums",
    "z_t = S_t^T phi(q_t) / (n_t . phi(q_t)); S <- S + phi(k) v^T, n <- n + phi(k); phi = elu + 1",
    "Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4",
    users="research models",
    choose="to learn how a state of fixed size replaces the cache",
    avoid="quality matters: without a decay or the delta rule the state fills up",
)
def linear_attention(
    dim: int,
    heads: int,
    *,
    feature_map: FeatureMap = "elu+1",
    normalize: bool = True,
    **options: Unpack[Recurrence],
) -> Recurrent:
    """Linear attention: a product of feature maps, phi(q) . phi(k), replaces exp(q . k) of softmax,
    so that a matrix of fixed size stores the past.

    A cache stores G D (E + 1) values at any length (G D E without the normalizer).

    Args:
        feature_map: phi, a name in `regard.linear.FEATURE_MAPS` or a function.
        normalize: whether the weights are divided by their sum.
    """
    start = ValueHeadStart(dim, heads, **options)
    rule = LinearAttentionRule(feature_map, normalize=normalize)
    return Recurrent(start.separate(), rule, start.output())


@variant(
    "sums",
    "z = norm(S^T q / sqrt(D)) * silu(W_g x); S <- gamma_h S + k v^T; q, k by rotary; gamma_h = 1 "
    "- 2^(-5-h)",
    "Sun et al. 2023 (arXiv 2307.08621), section 2.1 and equation 8",
    users="RetNet; the lightning attention of MiniMax-01 has a fixed decay for each head too",
    choose="a state of fixed size, with a training as simple as that of attention",
    avoid="tokens must be forgotten by their content: take gated_linear or gated_delta_net",
    where="gamma: decay of a head, fixed; norm: group norm of a head",
)
def retention(
    dim: int,
    heads: int,
    *,
    base: float | None = 10000.0,
    decay: Sequence[float] | None = None,
    **options: Unpack[Recurrence],
) -> Recurrent:
    """Multi-scale retention: each head's state decays at a fixed rate, followed by a norm per head
    and an output gate.

    A cache stores G D E values at any length.

    Args:
        base: the base of the rotary positions on q and k; None applies none.
        decay: gamma, one number from 0 to 1 per value head; None is 1 - 2^(-5-g).
        value_dim: the value dim E; None is 2 D, as in the paper.
    """
    if options["value_dim"] is None:
        options["value_dim"] = 2 * resolve_head_dim(dim, heads, options["head_dim"])
    start = ValueHeadStart(dim, heads, base=base, **options)
    project, rule = start.separate(*start.rotary), RetentionRule(start.value_heads, decay)
    norm = HeadNorm(start.outputs, start.E)
    return Recurrent(project, rule, start.output(), norm=norm, gate=start.gate())


@variant(
    "sums",
    "z = norm(S^T q / sqrt(D)) * silu(W_g x + b_g); S <- diag(a) S + k v^T; a = sigmoid(W_2 W_1 x "
    "+ b)^(1/16)",
    "Yang et al. 2023 (arXiv 2312.06635), section 4.4",
    users="research models of up to 7B parameters",
    choose="the state must decide by content how fast each channel forgets",
    avoid="exact recall matters: take gated_delta_net, with some layers of full attention",
    where=(
        "a: decay of each channel; b_g: learned bias of the output gate; norm: layer norm of a head"
    ),
    example={"rank": 3},
)
def gated_linear(
    dim: int,
    heads: int,
    *,
    rank: int = 16,
    temperature: float = 16.0,
    **options: Unpack[Recurrence],
) -> Recurrent:
    """Gated linear attention: each token computes a gate that decays every channel of the state.

    A cache stores G D E values at any length.

    Args:
        rank: the rank of the map to the gates.
        temperature: a larger temperature keeps gates closer to 1
            (`regard.nn.recurrence.decays.GatedLinearRule`).
        head_dim: the head dim D; None is M / 2H, as in the paper.
        value_dim: the value dim E; None is 2 D.
    """
    set_half_heads(dim, heads, options)
    start = ValueHeadStart(dim, heads, **options)
    project = start.separate()
    rule = GatedLinearRule(dim, start.value_heads, start.D, rank=rank, temperature=temperature)
    gate, norm = start.gate(bias=True), nn.LayerNorm(start.E)
    return Recurrent(project, rule, start.output(), norm=norm, gate=gate)


@variant(
    "sums",
    "S <- S + beta k (v - S^T k)^T; z = norm(S^T q / sqrt(D)); beta = sigmoid(W x), |q| = |k| = 1",
    "Yang et al. 2024 (arXiv 2406.06484), section 3",
    users="research models",
    choose="the same key gets new values: the delta rule replaces the old one",
    avoid="long texts in which old content must fade: take gated_delta_net",
)
def delta_net(dim: int, heads: int, **options: Unpack[Corrected]) -> Recurrent:
    """DeltaNet: linear attention that replaces the value stored under a key, by the delta rule.

    A cache stores G D E values at any length. A swish activation is applied to queries, keys and
    values. Unlike the paper's model, it has no short convolution and no output gate.
    """
    normalize_keys, max_beta = options.pop("normalize_keys"), options.pop("max_beta")
    start = ValueHeadStart(dim, heads, **options)
    steps = (Swish(), L2Norm()) if normalize_keys else (Swish(),)
    project = start.separate(*steps, value_steps=[Swish()])
    rule = DeltaRule(dim, start.value_heads, max_beta=max_beta)
    return Recurrent(project, rule, start.output(), norm=RMSNorm(start.E))


@variant(
    "sums",
    "S' = exp(g) S; S <- S' + beta k (v - S'^T k)^T; z = norm(S^T q / sqrt(D)) * silu(W_g x); g = "
    "-exp(A) softplus(W x + b)",
    "Yang et al. 2024 (arXiv 2412.06464), section 3",
    users="Qwen3-Next and Qwen3.5, in three of four layers",
    choose="long contexts with a cache of fixed size, beside some layers of full attention",
    avoid="as the only mechanism, where exact recall matters",
    where="A: learned rate of the decay, one for each head; g: logarithm of the decay",
)
def gated_delta_net(
    dim: int, heads: int, *, kernel: int | None = None, **options: Unpack[Corrected]
) -> Recurrent:
    """Gated DeltaNet: the delta rule on a state that decays with each token, and an output gate.

    A cache stores G D E values at any length, and with a convolution its last inputs.

    Args:
        kernel: the tokens of a short causal convolution over queries, keys and values; 4 in the
            paper and in Qwen3-Next. None applies none.
    """
    normalize_keys, max_beta = options.pop("normalize_keys"), options.pop("max_beta")
    start = ValueHeadStart(dim, heads, **options)
    steps = (L2Norm(),) if normalize_keys else ()
    if kernel is None:
        project = start.separate(Swish(), *steps, value_steps=[Swish()])
    else:
        project = start.convolved(kernel, *steps)
    N = start.value_heads
    rule = DeltaRule(dim, N, decay=LogDecay(dim, N), max_beta=max_beta)
    gate = start.gate()
    return Recurrent(project, rule, start.output(), norm=RMSNorm(start.E), gate=gate)


@variant(
    "feature_maps",
    "p_ij = (1 + s_ij + s_ij^2 / 2) / sum_j; z_i = sum_j p_ij v_j; s_ij = q_i . k_j / sqrt(D)",
    "Arora et al. 2024 (arXiv 2402.18668), section 4.1",
    users="Based, research models of up to 1.3B parameters",
    choose="recall must be traded against the size of the state, beside sliding windows",
    avoid="heads are wide: the state grows with the square of the head dim",
    example={"head_dim": 4},
)
def based(
    dim: int,
    heads: int,
    *,
    groups: OptionalGroups = None,
    head_dim: int | None = 16,
    value_dim: int | None = None,
) -> Recurrent:
    """Based: linear attention with the first terms of the Taylor series of exp, which replace the
    exponential function of softmax.

    A cache stores G F (E + 1) values at any length, with F = 1 + D + D (D + 1) / 2 features. The
    paper's models mix it with layers of sliding windows and convolutions.

    Args:
        head_dim: the head dim D of queries and keys, small because F grows as D^2; None is M / H.
        value_dim: the value dim E; None is M / H.
    """
    E = resolve_head_dim(dim, heads, value_dim)
    start = Start(dim, heads, groups=groups, head_dim=head_dim, value_dim=E)
    return Recurrent(start.qkv(), LinearAttentionRule(TaylorFeatures()), start.output())


@variant(
    "feature_maps",
    "p_ij = s_ij^2 / sum_j s_ij^2; z_i = sum_j p_ij v_j; s_ij = norm(q_i) . norm(k_j)",
    "Aksenov et al. 2024 (arXiv 2402.10644), section 4",
    users="research models of up to 0.4B parameters",
    choose="weights must be able to reach 0, which the Taylor series of Based cannot",
    avoid="heads are wide: the state grows with the square of the head dim",
    where="norm: group norm of a head",
    example={"head_dim": 4},
)
def rebased(
    dim: int, heads: int, *, head_dim: int | None = 16, value_dim: int | None = None
) -> Recurrent:
    """ReBased: linear attention with the square of the score, after a layer norm with learned
    weight and bias on each query and key head.

    A cache stores H F (E + 1) values at any length, with F = D (D + 1) / 2 features.

    Args:
        head_dim: the head dim D of queries and keys, small because F grows as D^2; None is M / H.
        value_dim: the value dim E; None is M / H.
    """
    E = resolve_head_dim(dim, heads, value_dim)
    start = Start(dim, heads, head_dim=head_dim, value_dim=E)
    q, k = (start.q(HeadNorm(heads, start.D)) for _ in "qk")
    project = SeparateQKV(q, k, HeadProjection(dim, heads, E))
    return Recurrent(project, LinearAttentionRule(PowerFeatures(2)), start.output())


@variant(
    "feature_maps",
    "p_ij = s_ij^m / sum_j s_ij^m; z_i = sum_j p_ij v_j; s_ij = q_i . k_j; m = 2, 4, ...",
    "Gelada et al. 2025 (arXiv 2507.04239)",
    users="research models, and PowerCoder 3B",
    choose="the size of the state should be chosen apart from the number of parameters",
    avoid="memory of the state is the limit: a wide head with power 4 has millions of values",
    where="m: the power, an even number",
)
def power_attention(
    dim: int, heads: int, *, power: int = 2, **options: Unpack[SharedValued]
) -> Recurrent:
    """Power attention: linear attention with an even power of the score, so that the size of the
    state can be chosen by the power.

    A cache stores G F (E + 1) values at any length, with F = C(D + power - 1, power) features.

    Args:
        power: the power of the score, an even number of at least 2.
    """
    start = Start(dim, heads, **options)
    return Recurrent(start.qkv(), LinearAttentionRule(PowerFeatures(power)), start.output())


@variant(
    "feature_maps",
    "p_ij = phi(q_i) . phi(k_j) / sum_j; z_i = sum_j p_ij v_j; phi(x) = exp(w x - x^2 / 2), w "
    "random",
    "Choromanski et al. 2021 (arXiv 2009.14794), section 2",
    users="research models of 2020 to 2022, for proteins, images and speech",
    choose="a softmax model is approximated without training it again, and its scores are small",
    avoid=(
        "scores are large, as in most language models: the variance grows exponentially with them"
    ),
    where="phi: random features of a query or key; w: random directions",
    example={"features": 12},
)
def performer(
    dim: int, heads: int, *, features: int = 256, seed: int = 0, **options: Unpack[SharedValued]
) -> Recurrent:
    """Performer: linear attention with positive random features, whose weights are on average those
    of softmax attention.

    A cache stores G F (E + 1) values at any length. The random directions follow from the seed;
    they are not learned and not stored in a checkpoint.

    Args:
        features: the random features F of a head.
        seed: the seed of the random directions.
    """
    start = Start(dim, heads, **options)
    rule = LinearAttentionRule(RandomFeatures(start.D, features, seed))
    return Recurrent(start.qkv(), rule, start.output())


@variant(
    "feature_maps",
    "p_ij = relu(q_i) . relu(k_j) cos(pi (i - j) / (2 m)) / sum_j; z_i = sum_j p_ij v_j",
    "Qin et al. 2022 (arXiv 2202.08791), section 3",
    users="research models of 2022",
    choose="near tokens should weigh more without a decay to learn, in texts of a known length",
    avoid="texts may be longer than the period: weights become negative there",
    where="m: the period; pi: 3.14159",
    example={"period": 64},
)
def cosformer(
    dim: int, heads: int, *, period: int = 4096, **options: Unpack[SharedValued]
) -> Recurrent:
    """cosFormer: linear attention with relu features, whose weights fall with the distance as a
    cosine.

    A cache stores 2 G D (E + 1) values at any length.

    Args:
        period: the distance at which a weight reaches 0; the longest text of the model.
    """
    start = Start(dim, heads, **options)
    return Recurrent(start.qkv(), CosineRule(period), start.output())
