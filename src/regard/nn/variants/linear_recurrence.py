"""Constructors of linear recurrences: linear attention, retention, gated linear attention, DeltaNet
and Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.nn.decay_rules import GatedLinearRule, LinearAttentionRule, RetentionRule
from regard.nn.delta_rules import DeltaRule, LogDecay
from regard.nn.head_steps import Swish
from regard.nn.norms import HeadNorm, L2Norm, RMSNorm
from regard.nn.projections import HeadProjection
from regard.nn.recurrent import Recurrent
from regard.nn.recurrent_projections import CausalConvolution, ConvolvedQKV, GroupedValueQKV
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.ops.linear.linear_attention import FeatureMap
from regard.positions import Rotary


@variant(
    family="linear",
    equation="z_t = S_t^T phi(q_t) / (n_t . phi(q_t)); S <- S + phi(k) v^T, n <- n + phi(k); phi "
    "= elu + 1",
    source="Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4",
)
def linear_attention(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    feature_map: FeatureMap = "elu+1",
    normalise: bool = True,
) -> Recurrent:
    """Linear attention: a product of feature maps, phi(q) . phi(k), replaces exp(q . k) of softmax,
    so that a matrix of fixed size stores the past.

    x [B,T,M] -> [B,T,M]; a cache stores G D (E + 1) values at any length (G D E without the
    normaliser).

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key heads G, and value heads by default; G divides H. None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        value_heads: the value heads N, each with its own state; G divides N, and of H and N one
            divides the other. None is G.
        feature_map: phi, a name in `regard.linear.FEATURE_MAPS` or a function.
        normalise: whether the weights are divided by their sum.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads, the
            feature map is unknown, or head_dim is None and M / H is not whole.

    >>> import torch
    >>> linear_attention(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    project = _grouped_value_qkv(dim, heads, G, value_heads, D, E)
    return Recurrent(
        project,
        LinearAttentionRule(feature_map, normalise=normalise),
        output_projection(dim, max(heads, project.value_heads), E),
    )


@variant(
    family="linear",
    equation="z = norm(S^T q / sqrt(D)) * silu(W_g x); S <- gamma_h S + k v^T; q, k by rotary; "
    "gamma_h = 1 - 2^(-5-h)",
    source="Sun et al. 2023 (arXiv 2307.08621), section 2.1 and equation 8",
)
def retention(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    base: float | None = 10000.0,
    decay: Sequence[float] | None = None,
) -> Recurrent:
    """Multi-scale retention: each head's state decays at a fixed rate, followed by a norm per head
    and an output gate.

    x [B,T,M] -> [B,T,M]; a cache stores G D E values at any length.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key heads G, and value heads by default; G divides H. None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is 2 D, as in the paper.
        value_heads: the value heads N, each with its own state; G divides N, and of H and N one
            divides the other. None is G.
        base: the base of the rotary positions on q and k; None applies none.
        decay: gamma, one number from 0 to 1 per value head; None is 1 - 2^(-5-g).

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, decay is not one number
            from 0 to 1 per key/value head, D is odd and base is given, or head_dim is None and M /
            H is not whole.

    >>> retention(32, 4).describe().state.formula
    'G D E = 4 x 8 x 16'

    Source: Sun et al. 2023 (arXiv 2307.08621), section 2.1 and equation 8.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, 2 * D if value_dim is None else value_dim
    steps = () if base is None else (Rotary(D, base),)
    project = _grouped_value_qkv(dim, heads, G, value_heads, D, E, *steps)
    outputs = max(heads, project.value_heads)
    return Recurrent(
        project,
        RetentionRule(project.value_heads, decay),
        output_projection(dim, outputs, E),
        norm=HeadNorm(outputs, E),
        gate=HeadProjection(dim, outputs, E),
    )


@variant(
    family="linear",
    equation="z = norm(S^T q / sqrt(D)) * silu(W_g x + b_g); S <- diag(a) S + k v^T; a = "
    "sigmoid(W_2 W_1 x + b)^(1/16)",
    source="Yang et al. 2023 (arXiv 2312.06635), section 4.4",
    rank=3,
)
def gated_linear(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    rank: int = 16,
    temperature: float = 16.0,
) -> Recurrent:
    """Gated linear attention: each token computes a gate that decays every channel of the state.

    x [B,T,M] -> [B,T,M]; a cache stores G D E values at any length.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key heads G, and value heads by default; G divides H. None is H.
        head_dim: the head dim D; None is M / 2H, as in the paper.
        value_dim: the value dim E; None is 2 D.
        value_heads: the value heads N, each with its own state; G divides N, and of H and N one
            divides the other. None is G.
        rank: the rank of the map to the gates.
        temperature: a larger temperature keeps gates closer to 1
            (`regard.nn.decay_rules.GatedLinearRule`).

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads,
            temperature is not above 0, or head_dim is None and M / 2H is not whole.

    >>> gated_linear(32, 4).describe().state.formula
    'G D E = 4 x 4 x 8'

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.4.
    """
    if head_dim is None and (heads < 1 or dim % (2 * heads)):
        raise ArgumentError(
            f"dim is {dim}; it must be divisible by 2 * heads = {2 * heads}, or give head_dim, "
            "which is dim / (2 heads) in the paper",
            argument="dim",
        )
    D = dim // (2 * heads) if head_dim is None else head_dim
    G, E = heads if groups is None else groups, 2 * D if value_dim is None else value_dim
    project = _grouped_value_qkv(dim, heads, G, value_heads, D, E)
    outputs = max(heads, project.value_heads)
    rule = GatedLinearRule(dim, project.value_heads, D, rank=rank, temperature=temperature)
    gate = HeadProjection(dim, outputs, E, bias=True)
    return Recurrent(
        project, rule, output_projection(dim, outputs, E), norm=nn.LayerNorm(E), gate=gate
    )


@variant(
    family="linear",
    equation="S <- S + beta k (v - S^T k)^T; z = norm(S^T q / sqrt(D)); beta = sigmoid(W x), |q| "
    "= |k| = 1",
    source="Yang et al. 2024 (arXiv 2406.06484), section 3",
)
def delta_net(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    normalise_keys: bool = True,
    max_beta: float = 1.0,
) -> Recurrent:
    """DeltaNet: linear attention that replaces the value stored under a key, by the delta rule.

    x [B,T,M] -> [B,T,M]; a cache stores G D E values at any length. A swish activation is applied
    to queries, keys and values. Unlike the paper's model, it has no short convolution and no output
    gate.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key heads G, and value heads by default; G divides H. None is H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        value_heads: the value heads N, each with its own state; G divides N, and of H and N one
            divides the other. None is G.
        normalise_keys: whether queries and keys are scaled to length 1, which keeps the state
            bounded.
        max_beta: the upper bound of beta, above 0 and at most 2
            (`regard.nn.delta_rules.DeltaRule`).

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, max_beta is out of
            range, or head_dim is None and M / H is not whole.

    >>> import torch
    >>> delta_net(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    project = _swish_qkv(dim, heads, G, value_heads, D, E, normalise=normalise_keys)
    outputs = max(heads, project.value_heads)
    rule = DeltaRule(dim, project.value_heads, max_beta=max_beta)
    return Recurrent(project, rule, output_projection(dim, outputs, E), norm=RMSNorm(E))


@variant(
    family="linear",
    equation="S' = exp(g) S; S <- S' + beta k (v - S'^T k)^T; z = norm(S^T q / sqrt(D)) * "
    "silu(W_g x); g = -exp(A) softplus(W x + b)",
    source="Yang et al. 2024 (arXiv 2412.06464), section 3",
)
def gated_delta_net(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    normalise_keys: bool = True,
    max_beta: float = 1.0,
    kernel: int | None = None,
) -> Recurrent:
    """Gated DeltaNet: the delta rule on a state that decays with each token, and an output gate.

    x [B,T,M] -> [B,T,M]; a cache stores G D E values at any length, and with a convolution its last
    inputs.

    Args:
        dim, heads, groups, head_dim, value_dim, value_heads, normalise_keys, max_beta: as for
            `delta_net`.
        kernel: the tokens of a short causal convolution over queries, keys and values; 4 in the
            paper and in Qwen3-Next. None applies none.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `delta_net`.

    >>> gated_delta_net(32, 4, groups=2, value_dim=16).describe().state.formula
    'G D E = 2 x 8 x 16'
    >>> gated_delta_net(32, 4, value_heads=8).describe().state.formula  # 2 per key head
    'N D E = 8 x 8 x 8'

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    G, E = heads if groups is None else groups, D if value_dim is None else value_dim
    if kernel is None:
        project = _swish_qkv(dim, heads, G, value_heads, D, E, normalise=normalise_keys)
    else:
        steps = (L2Norm(),) if normalise_keys else ()
        project = convolved_qkv(dim, heads, G, value_heads, D, E, kernel, *steps)
    N, outputs = project.value_heads, max(heads, project.value_heads)
    rule = DeltaRule(dim, N, decay=LogDecay(dim, N), max_beta=max_beta)
    gate = HeadProjection(dim, outputs, E)
    return Recurrent(project, rule, output_projection(dim, outputs, E), norm=RMSNorm(E), gate=gate)


def _grouped_value_qkv(
    dim: int,
    heads: int,
    groups: int,
    value_heads: int | None,
    D: int,
    E: int,
    *steps: nn.Module,
) -> GroupedValueQKV:
    """Build separate projections to query, key and value heads, with steps on queries and keys."""
    return GroupedValueQKV(
        HeadProjection(dim, heads, D, *steps),
        HeadProjection(dim, groups, D, *steps),
        HeadProjection(dim, groups if value_heads is None else value_heads, E),
    )


def convolved_qkv(
    dim: int,
    heads: int,
    groups: int,
    value_heads: int | None,
    D: int,
    E: int,
    kernel: int,
    *steps: nn.Module,
) -> ConvolvedQKV:
    """Build projections to query, key and value heads with a short convolution and a swish
    activation, then steps on queries and keys.
    """
    N = groups if value_heads is None else value_heads
    plain = _grouped_value_qkv(dim, heads, groups, N, D, E, *steps)
    channels = (heads + groups) * D + N * E
    convolution = CausalConvolution(channels, kernel)
    return ConvolvedQKV(plain.q, plain.k, plain.v, convolution)


def _swish_qkv(
    dim: int,
    heads: int,
    groups: int,
    value_heads: int | None,
    D: int,
    E: int,
    *,
    normalise: bool,
) -> GroupedValueQKV:
    """Build separate projections with a swish activation; queries and keys are normalised if
    asked.
    """
    steps = (Swish(), L2Norm()) if normalise else (Swish(),)
    project = _grouped_value_qkv(dim, heads, groups, value_heads, D, E, *steps)
    project.v.steps.append(Swish())
    return project
