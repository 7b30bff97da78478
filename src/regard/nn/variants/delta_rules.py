"""Constructors of delta rules with a short convolution and gates of their own: Kimi Delta
Attention, Gated DeltaNet-2, Comba and preconditioned Kimi Delta Attention.
"""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.nn.delta_rules import (
    BottleneckProjection,
    ChannelLogDecay,
    CombaRule,
    DeltaProductRule,
    DeltaRule,
    EraseRule,
    PreconditionedDeltaRule,
    SeveralKeysQKV,
)
from regard.nn.norms import L2Norm, RMSNorm
from regard.nn.projections import HeadProjection
from regard.nn.recurrent import RecurrenceRule, Recurrent
from regard.nn.recurrent_projections import CausalConvolution, ConvolvedQKV
from regard.nn.rwkv import RWKV7
from regard.nn.variants.carried_values import is_first_layer
from regard.nn.variants.linear_recurrence import convolved_qkv
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant


@variant(
    family="linear",
    equation="S' = diag(exp(g)) S; S <- S' + beta k (v - S'^T k)^T; z = norm(S^T q / sqrt(D)) * "
    "sigmoid(W_g x); g = -exp(A) softplus(W_2 W_1 x + b); q, k, v after a convolution",
    source="Kimi Team 2025 (arXiv 2510.26692), section 3",
)
def kimi_delta(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    kernel: int = 4,
    rank: int | None = None,
    lower_bound: float | None = None,
) -> Recurrent:
    """Kimi Delta Attention: the delta rule on a state in which each key channel decays by a gate of
    its own.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values at any length, and the last inputs of the
    convolution.

    Args:
        dim: the model dim M.
        heads: the query and key heads H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        value_heads: the value heads N, each with its own state; H divides N. None is H.
        kernel: the tokens of the short causal convolution over queries, keys and values.
        rank: the size of the bottlenecks of the decay and of the output gate; None is D.
        lower_bound: the least logarithm of a decay, below 0, as in GLM-5: g = lower_bound
            sigmoid(exp(A) (W_2 W_1 x + b)). None is the form of Kimi Linear, without a bound.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, H does not divide the value heads,
            lower_bound is not below 0, or head_dim is None and M / H is not whole.

    >>> kimi_delta(32, 4).describe().state.formula
    'G D E = 4 x 8 x 8 + c (k - 1) = 96 x 3'

    Source: Kimi Team 2025 (arXiv 2510.26692), section 3; the bound: the published code of GLM-5.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = convolved_qkv(dim, heads, heads, value_heads, D, E, kernel, L2Norm())
    N = project.value_heads
    decay = ChannelLogDecay(dim, N, D, rank or D, lower_bound=lower_bound)
    return _with_sigmoid_gate(dim, project, DeltaRule(dim, N, decay=decay), rank or D)


@variant(
    family="linear",
    equation="S' = diag(exp(g)) S; S <- S' + k (w * v - S'^T (e * k))^T; z = norm(S^T q / sqrt(D)) "
    "* sigmoid(W_g x); e = sigmoid(W_e x), w = sigmoid(W_w x); q, k, v after a convolution",
    source="Gated DeltaNet-2, 2026 (arXiv 2605.22791)",
)
def gated_delta_2(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    kernel: int = 4,
    rank: int | None = None,
) -> Recurrent:
    """Gated DeltaNet-2: the delta rule with one gate for each channel that is erased and another
    one for each channel that is written.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values at any length, and the last inputs of the
    convolution.

    Args:
        dim, heads, head_dim, value_dim, value_heads, kernel, rank: as for `kimi_delta`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `kimi_delta`.

    >>> gated_delta_2(32, 4, value_heads=8).describe().state.formula
    'N D E = 8 x 8 x 8 + c (k - 1) = 128 x 3'

    Source: Gated DeltaNet-2, 2026 (arXiv 2605.22791); the code of flash-linear-attention.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    plain = convolved_qkv(dim, heads, heads, value_heads, D, E, kernel, L2Norm())
    N = plain.value_heads
    write = HeadProjection(dim, N, E)
    project = ConvolvedQKV(plain.q, plain.k, plain.v, plain.convolution, value_gate=write)
    rule = EraseRule(dim, N, D, decay=ChannelLogDecay(dim, N, D, rank or D))
    return _with_sigmoid_gate(dim, project, rule, rank or D)


@variant(
    family="linear",
    equation="S' = exp(g) S; S <- S' + beta k (v - S'^T p)^T; z = norm(S^T (q - c p) / sqrt(D)) * "
    "sigmoid(W_g x); p = sigmoid(d) k; q, k, v after a convolution",
    source="Hu et al. 2025 (arXiv 2506.02475), section 3",
)
def comba(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    kernel: int = 4,
) -> Recurrent:
    """Comba: the gated delta rule whose erased key is a learned share of the key, and whose queries
    are corrected by it.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values at any length, and the last inputs of the
    convolution.

    Args:
        dim, heads, head_dim, value_dim, value_heads, kernel: as for `kimi_delta`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `kimi_delta`.

    >>> import torch
    >>> comba(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Hu et al. 2025 (arXiv 2506.02475), section 3; the code of flash-linear-attention.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = convolved_qkv(dim, heads, heads, value_heads, D, E, kernel, L2Norm())
    rule = CombaRule(dim, heads, project.value_heads)
    outputs = max(heads, project.value_heads)
    return Recurrent(
        project,
        rule,
        output_projection(dim, outputs, E),
        norm=RMSNorm(E),
        gate=HeadProjection(dim, outputs, E),
        gate_activation="sigmoid",
    )


@variant(
    family="linear",
    equation="S' = exp(g) S; S' <- S' + beta_i k_i (v_i - S'^T k_i)^T for i = 1..n; S = S'; z = "
    "norm(S^T q / sqrt(D)) * silu(W_g x); q, k, v after a convolution",
    source="Siems et al. 2025 (arXiv 2502.10297), section 3",
)
def delta_product(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    value_heads: int | None = None,
    kernel: int = 4,
    writes: int = 2,
    max_beta: float = 2.0,
) -> Recurrent:
    """DeltaProduct: the gated delta rule with several corrections of the state per token, so that a
    token can rotate what is stored.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values at any length, and the last inputs of the
    convolution.

    Args:
        dim, heads, head_dim, value_dim, value_heads, kernel: as for `kimi_delta`.
        writes: the keys and values of a token, each with a beta of its own.
        max_beta: the upper bound of beta, above 0 and at most 2; at 2 a correction can be a
            reflection.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `kimi_delta`, or max_beta is out of range.

    >>> delta_product(32, 4, writes=3).describe().state.formula
    'G D E, G = 4, D = 8, E = 8 + c (k - 1) = 224 x 3'

    Source: Siems et al. 2025 (arXiv 2502.10297), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E, N = D if value_dim is None else value_dim, heads if value_heads is None else value_heads
    rule = DeltaProductRule(dim, N, writes=writes, max_beta=max_beta)
    project = SeveralKeysQKV(
        HeadProjection(dim, heads, D, L2Norm()),
        HeadProjection(dim, heads, writes * D),
        HeadProjection(dim, N, writes * E),
        CausalConvolution(heads * D + writes * (heads * D + N * E), kernel),
        writes=writes,
    )
    outputs = max(heads, N)
    return Recurrent(
        project,
        rule,
        output_projection(dim, outputs, E),
        norm=RMSNorm(E),
        gate=HeadProjection(dim, outputs, E),
    )


@variant(
    family="linear",
    equation="A <- exp(h) A + a k^2; S' = diag(exp(g)) S; S <- S' + beta (mu * k) (v - S'^T k)^T; "
    "z = norm(S^T q / sqrt(D)) * sigmoid(W_g x); mu = 1.5^(-r / (1 + abs(r))), r = ln(A) - c; q, "
    "k, v after a convolution",
    source="Preconditioned DeltaNet, 2026 (arXiv 2604.21100)",
)
def preconditioned_delta(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    kernel: int = 4,
    rank: int | None = None,
    lower_bound: float | None = None,
) -> Recurrent:
    """Preconditioned Kimi Delta Attention: key channels in which past keys were large are written
    with smaller steps.

    x [B,T,M] -> [B,T,M]; a cache stores H D (E + 1) values at any length, and the last inputs of
    the convolution.

    Args:
        dim, heads, head_dim, value_dim, kernel, rank, lower_bound: as for `kimi_delta`.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: as for `kimi_delta`.

    >>> import torch
    >>> preconditioned_delta(32, 4)(torch.zeros(1, 5, 32)).shape
    torch.Size([1, 5, 32])

    Source: Preconditioned DeltaNet, 2026 (arXiv 2604.21100); the code of flash-linear-attention.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = convolved_qkv(dim, heads, heads, None, D, E, kernel, L2Norm())
    decay = ChannelLogDecay(dim, heads, D, rank or D, lower_bound=lower_bound)
    rule = PreconditionedDeltaRule(dim, heads, decay=decay)
    return _with_sigmoid_gate(dim, project, rule, rank or D)


def _with_sigmoid_gate(
    dim: int, project: ConvolvedQKV, rule: RecurrenceRule, rank: int
) -> Recurrent:
    """Build a recurrence with a norm and an output gate through a bottleneck, after a sigmoid."""
    E = project.v.head_dim
    outputs = max(project.q.heads, project.value_heads)
    return Recurrent(
        project,
        rule,
        output_projection(dim, outputs, E),
        norm=RMSNorm(E),
        gate=BottleneckProjection(dim, rank, outputs, E),
        gate_activation="sigmoid",
    )


@variant(
    family="linear",
    equation="S <- diag(w) S - (a * r) (S^T r)^T + k v^T; z = (norm(S^T q) + (q . (u * k)) v) * g; "
    "w = exp(-exp(-1/2) sigmoid(b + W_2 tanh(W_1 y))), a = sigmoid(c + W_2 W_1 y), r = k' / |k'|; "
    "v mixed with v1 of the first layer",
    source="Peng et al. 2025 (arXiv 2503.14456), section 4",
    rank=3,
    gate_rank=5,
)
def rwkv7(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    layer: int = 0,
    rank: int = 64,
    value_rank: int = 32,
    gate_rank: int = 128,
) -> RWKV7:
    """RWKV-7 (Goose): a generalised delta rule, which removes what the state holds for one key at a
    rate per channel, and writes another key; layers behind the first one mix in its values.

    x [B,T,M] -> [B,T,M]; this is the time mixing of one layer. A cache stores H D D values and the
    last token, at any length. A layer behind the first one runs in a `Decoder`, which passes the
    values of the first layer.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        layer: the index of the layer, from 0; layer 0 gives its values, and the others read them.
        rank: the rank of the maps to the decays and to the rates.
        value_rank: the rank of the map to the share of the first layer's values.
        gate_rank: the rank of the map to the output gate.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, layer is negative, or head_dim is None and M / H is
            not whole.

    >>> rwkv7(32, 4).describe().state.formula
    'G D E = 4 x 8 x 8 + c (k - 1) = 32 x 1'

    Source: Peng et al. 2025 (arXiv 2503.14456), section 4.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    return RWKV7(
        dim,
        heads,
        D,
        is_first=is_first_layer(layer),
        rank=rank,
        value_rank=value_rank,
        gate_rank=gate_rank,
    )
