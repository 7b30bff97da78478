"""Constructors of recurrences with decayed sums: lightning attention, HGRN2, LightNet, Mamba,
Mamba-2, RWKV-4, RWKV-6, the matrix memory of xLSTM, gated slots and ABC.
"""

from __future__ import annotations

import math

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.nn.decay_rules import (
    HGRN2Rule,
    LightNetRule,
    Mamba2Rule,
    MLSTMRule,
    RetentionRule,
    RWKV4Rule,
    RWKV6Rule,
    SlotRule,
)
from regard.nn.head_steps import Swish
from regard.nn.norms import HeadNorm, JoinedHeadsRMSNorm, RMSNorm
from regard.nn.projections import HeadProjection, SeparateQKV
from regard.nn.recurrent import Recurrent
from regard.nn.recurrent_projections import (
    CausalConvolution,
    ConvolvedQKV,
    GroupedValueQKV,
    TokenShiftQKV,
)
from regard.nn.selective_scan import SelectiveQKV, SelectiveScanRule
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant


def lightning_rates(heads: int, layer: int, layers: int) -> list[float]:
    """Return the rates r of lightning attention, whose heads decay by exp(-r) per token.

    r_h = 2^(-8 h / H) (1 - l / (L - 1 + 1e-5) + 1e-5), h = 1 ... H

    Args:
        heads: the heads H.
        layer: the index l of the layer, from 0.
        layers: the number of layers L.

    Returns:
        The rate of each head.

    Raises:
        ArgumentError: a size is less than 1, or layer is not from 0 to layers - 1.

    >>> [round(rate, 6) for rate in lightning_rates(2, 0, 4)]
    [0.062501, 0.003906]

    Source: MiniMax 2025 (arXiv 2501.08313), section 2.2, and its released code.
    """
    if min(heads, layers) < 1 or not 0 <= layer < layers:
        raise ArgumentError(
            f"lightning_rates(heads={heads}, layer={layer}, layers={layers}): heads and layers "
            "must be at least 1, and layer must be from 0 to layers - 1"
        )
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return [2 ** (-8 * h / heads) * factor for h in range(1, heads + 1)]


@variant(
    family="linear",
    equation="z = norm(S^T q) * sigmoid(W_g x); S <- exp(-r_h) S + k v^T; q, k, v = silu(W x); "
    "r_h = 2^(-8 h / H) (1 - l / L)",
    source="Qin et al. 2024 (arXiv 2401.04658); MiniMax 2025 (arXiv 2501.08313), section 2.2",
)
def lightning(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    layer: int = 0,
    layers: int = 80,
) -> Recurrent:
    """Lightning attention: each head's state decays at a fixed rate, more slowly in upper layers,
    followed by one norm over all heads and a sigmoid gate.

    x [B,T,M] -> [B,T,M]; a cache stores H D D values at any length. A swish activation is applied
    to queries, keys and values.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        layer: the index of the layer, from 0.
        layers: the number of layers L of the model.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, layer is not from 0 to layers - 1, or head_dim is None
            and M / H is not whole.

    >>> lightning(32, 4).describe().state.formula
    'G D E = 4 x 8 x 8'

    Source: Qin et al. 2024 (arXiv 2401.04658); MiniMax 2025 (arXiv 2501.08313), section 2.2.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rates = lightning_rates(heads, layer, layers)
    return Recurrent(
        SeparateQKV(*(HeadProjection(dim, heads, D, Swish()) for _ in "qkv")),
        RetentionRule(heads, [math.exp(-rate) for rate in rates], scale=1.0),
        output_projection(dim, heads, D),
        norm=JoinedHeadsRMSNorm(heads, D),
        gate=HeadProjection(dim, heads, D),
        gate_activation="sigmoid",
    )


@variant(
    family="linear",
    equation="z = norm(S^T q / sqrt(D)); S <- diag(f) S + (1 - f) v^T; f = b + (1 - b) "
    "sigmoid(W_f x); q = silu(W_q x)",
    source="Qin et al. 2024 (arXiv 2404.07904), equation 5",
)
def hgrn2(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    lower_bound: float = 0.0,
) -> Recurrent:
    """HGRN2: gated linear attention whose keys are what the forget gates leave free, followed by
    one norm over all heads.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values at any length. The projection of the keys
    computes the logits of the forget gates.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.
        lower_bound: the smallest forget gate, at least 0 and below 1.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, lower_bound is out of range, or head_dim is None and M
            / H is not whole.

    >>> hgrn2(32, 4).describe().state.formula
    'G D E = 4 x 8 x 8'

    Source: Qin et al. 2024 (arXiv 2404.07904), equation 5.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = SeparateQKV(
        HeadProjection(dim, heads, D, Swish()),
        HeadProjection(dim, heads, D),
        HeadProjection(dim, heads, E),
    )
    return Recurrent(
        project,
        HGRN2Rule(lower_bound),
        output_projection(dim, heads, E),
        norm=JoinedHeadsRMSNorm(heads, E),
    )


@variant(
    family="linear",
    equation="z = norm(S^T q / sqrt(D)) * silu(W_g x); S <- diag(exp(L' - L)) S + exp(k - L) v^T; "
    "L = ln(exp(L') + exp(k))",
    source="Qin et al. 2024 (arXiv 2405.21022), section 3",
)
def lightnet(
    dim: int, heads: int, *, head_dim: int | None = None, value_dim: int | None = None
) -> Recurrent:
    """LightNet: gated linear attention whose decays come from a running log-sum-exp of the keys, so
    that the weights of each key channel are a softmax over the past.

    x [B,T,M] -> [B,T,M]; a cache stores H D (E + 1) values at any length.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        value_dim: the value dim E; None is D.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or head_dim is None and M / H is not whole.

    >>> lightnet(32, 4).describe().state.formula
    'G D (E + 1) = 4 x 8 x (8 + 1)'

    Source: Qin et al. 2024 (arXiv 2405.21022), section 3.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    E = D if value_dim is None else value_dim
    project = SeparateQKV(
        HeadProjection(dim, heads, D, Swish()),
        HeadProjection(dim, heads, D),
        HeadProjection(dim, heads, E),
    )
    return Recurrent(
        project,
        LightNetRule(),
        output_projection(dim, heads, E),
        norm=RMSNorm(E),
        gate=HeadProjection(dim, heads, E),
    )


@variant(
    family="linear",
    equation="z = norm((S^T q + d v) * silu(W_g x)); S <- exp(-A s) S + k (s v)^T; "
    "s = softplus(W x + b); q, k, v = silu(conv(W x))",
    source="Dao and Gu 2024 (arXiv 2405.21060), section 7",
    head_dim=8,
)
def mamba2(
    dim: int,
    heads: int,
    *,
    groups: int = 1,
    head_dim: int = 128,
    value_dim: int | None = None,
    kernel: int = 4,
) -> Recurrent:
    """Mamba-2 (SSD): one decay per head from a learned step size, few query and key heads (C and B)
    for many value heads (x), a short convolution before, and a gated norm after.

    x [B,T,M] -> [B,T,M]; a cache stores H D E values of the state, and kernel - 1 past inputs of
    the convolution. Each group has one query head and one key head.

    Args:
        dim: the model dim M.
        heads: the value heads H, each with a state.
        groups: the query and key heads G; G divides H.
        head_dim: the dim D of queries and keys, called the state dim.
        value_dim: the value dim E, called the head dim; None is 2 M / H.
        kernel: the number of tokens of the convolution, the present one included.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or value_dim is None and
            2 M / H is not whole.

    >>> mamba2(32, 4, head_dim=8).describe().state.formula
    'N D E = 4 x 8 x 16 + c (k - 1) = 80 x 3'

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.
    """
    if value_dim is None:
        if heads < 1 or 2 * dim % heads:
            raise ArgumentError(
                f"2 dim is {2 * dim}; it must be divisible by heads = {heads}, or give value_dim"
            )
        value_dim = 2 * dim // heads
    sizes = ((groups, head_dim), (groups, head_dim), (heads, value_dim))
    heads_of = [HeadProjection(dim, count, width) for count, width in sizes]
    channels = sum(count * width for count, width in sizes)
    project = ConvolvedQKV(
        heads_of[0], heads_of[1], heads_of[2], CausalConvolution(channels, kernel, bias=True)
    )
    return Recurrent(
        project,
        Mamba2Rule(dim, heads),
        output_projection(dim, heads, value_dim),
        norm=JoinedHeadsRMSNorm(heads, value_dim, groups=groups),
        gate=HeadProjection(dim, heads, value_dim),
        gate_before_norm=True,
    )


@variant(
    family="linear",
    equation="S[n] <- diag(exp(-s[n] exp(A[n]))) S[n] + k (s[n] v[n]); z = (S[n]^T q + d[n] v[n]) "
    "* silu(W_g x); q, k = W v, s = softplus(W_2 W_1 v + b); v = W_v x after a convolution",
    source="Gu and Dao 2023 (arXiv 2312.00752), section 3 and algorithm 2",
    inner=12,
    state=4,
    rank=3,
)
def mamba(
    dim: int,
    heads: int,
    *,
    inner: int | None = None,
    state: int = 16,
    kernel: int = 4,
    rank: int | None = None,
) -> Recurrent:
    """Mamba (Mamba-1, S6): every channel has a small state of its own, whose decay and input depend
    on the token, behind a short convolution.

    x [B,T,M] -> [B,T,M]; a cache stores state values for each of the inner channels, and kernel - 1
    past inputs of the convolution.

    Args:
        dim: the model dim M.
        heads: the heads H of the attention layers beside it; Mamba has none, because each channel
            has a state of its own.
        inner: the number of channels N; None is 2 M.
        state: the number of values D of the state of a channel.
        kernel: the number of tokens of the convolution, the present one included.
        rank: the rank of the map to the step sizes; None is M / 16, rounded up.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1.

    >>> mamba(32, 4, state=8).describe().state.formula
    'N D E = 64 x 8 x 1 + c (k - 1) = 64 x 3'

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3 and algorithm 2.
    """
    if heads < 1:
        raise ArgumentError(f"heads is {heads}; it must be at least 1", argument="heads")
    N = 2 * dim if inner is None else inner
    q, k = (HeadProjection(N, 1, state) for _ in "qk")
    v, gate = (HeadProjection(dim, N, 1) for _ in "vg")
    project = SelectiveQKV(q, k, v, CausalConvolution(N, kernel, bias=True))
    rule = SelectiveScanRule(N, state, -(-dim // 16) if rank is None else rank)
    return Recurrent(project, rule, output_projection(dim, N, 1), gate=gate)


@variant(
    family="linear",
    equation="z = sigmoid(q) (a + exp(u + k) v) / (b + exp(u + k)); a <- exp(-r) a + exp(k) v, "
    "b <- exp(-r) b + exp(k); q, k, v = W (c x + (1 - c) x')",
    source="Peng et al. 2023 (arXiv 2305.13048), equations 11 to 19",
)
def rwkv4(dim: int, heads: int, *, head_dim: int | None = None) -> Recurrent:
    """RWKV-4: in each channel a mean of the values, weighted by exp(k) and by a learned decay, and
    gated by the receptance q.

    x [B,T,M] -> [B,T,M]; a cache stores 3 values per channel and the last token, at any length.
    Channels do not interact, so that heads only give their number, H D.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or head_dim is None and M / H is not whole.

    >>> rwkv4(32, 4).describe().state.formula
    '3 G D = 3 x 4 x 8 + c (k - 1) = 32 x 1'

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 11 to 19.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = TokenShiftQKV(*(HeadProjection(dim, heads, D) for _ in "qkv"))
    return Recurrent(project, RWKV4Rule(heads, D), output_projection(dim, heads, D))


@variant(
    family="linear",
    equation="z = norm(S^T q + (q . (u k)) v) * silu(W_g x); S <- diag(exp(-exp(r))) S + k v^T; "
    "r = b + W_2 tanh(W_1 x); q, k, v = W (c x + (1 - c) x')",
    source="Peng et al. 2024 (arXiv 2404.05892), section 4",
    rank=3,
)
def rwkv6(dim: int, heads: int, *, head_dim: int | None = None, rank: int = 64) -> Recurrent:
    """RWKV-6 (Finch): each token computes a decay for every channel, and reads itself with a
    learned weight instead of that of the state.

    x [B,T,M] -> [B,T,M]; a cache stores H D D values and the last token, at any length. Unlike the
    paper's model, the mix of a token with the one before it does not depend on the token, and
    decays and gate read the token alone.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / H.
        rank: the rank of the map to the decays.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, or head_dim is None and M / H is not whole.

    >>> rwkv6(32, 4).describe().state.formula
    'G D E = 4 x 8 x 8 + c (k - 1) = 32 x 1'

    Source: Peng et al. 2024 (arXiv 2404.05892), section 4.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = TokenShiftQKV(*(HeadProjection(dim, heads, D) for _ in "qkv"))
    return Recurrent(
        project,
        RWKV6Rule(dim, heads, D, rank=rank),
        output_projection(dim, heads, D),
        norm=HeadNorm(heads, D),
        gate=HeadProjection(dim, heads, D),
    )


@variant(
    family="linear",
    equation="z = norm(C^T q / max(abs(n . q), 1)) * sigmoid(W_g x); C <- f C + i k v^T, "
    "n <- f n + i k; i = exp(W_i x + b), f = sigmoid(W_f x + b)",
    source="Beck et al. 2024 (arXiv 2405.04517), section 2.3; Beck et al. 2025 (arXiv 2503.13427)",
)
def mlstm(
    dim: int,
    heads: int,
    *,
    head_dim: int | None = None,
    value_dim: int | None = None,
    gate_cap: float | None = 15.0,
) -> Recurrent:
    """The matrix memory of xLSTM (mLSTM): a matrix with an exponential input gate and a forget
    gate, divided by a running sum of the keys.

    x [B,T,M] -> [B,T,M]; a cache stores H (D E + D + 1) values at any length. This is the layer of
    xLSTM 7B, which has no convolution.

    Args:
        dim: the model dim M.
        heads: the heads H.
        head_dim: the head dim D; None is M / 2H, as in the paper.
        value_dim: the value dim E; None is 2 D.
        gate_cap: the bound of the gates' logits; None applies none.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, gate_cap is not above 0, or
            head_dim is None and M / 2H is not whole.

    >>> mlstm(32, 4).describe().state.formula
    'G (D E + D + 1) = 4 x (4 x 8 + 4 + 1)'

    Source: Beck et al. 2024 (arXiv 2405.04517), section 2.3; Beck et al. 2025 (arXiv 2503.13427).
    """
    if head_dim is None and (heads < 1 or dim % (2 * heads)):
        raise ArgumentError(
            f"dim is {dim}; it must be divisible by 2 * heads = {2 * heads}, or give head_dim, "
            "which is dim / (2 heads) in the paper",
            argument="dim",
        )
    D = dim // (2 * heads) if head_dim is None else head_dim
    E = 2 * D if value_dim is None else value_dim
    project = SeparateQKV(
        HeadProjection(dim, heads, D),
        HeadProjection(dim, heads, D),
        HeadProjection(dim, heads, E),
    )
    return Recurrent(
        project,
        MLSTMRule(dim, heads, gate_cap=gate_cap),
        output_projection(dim, heads, E),
        norm=HeadNorm(heads, E, eps=1e-6),
        gate=HeadProjection(dim, heads, E),
        gate_activation="sigmoid",
    )


@variant(
    family="linear",
    equation="z = norm(V^T softmax(K^T q / sqrt(D))); K <- K diag(a) + k (1 - a)^T, "
    "V <- diag(a) V + (1 - a) v^T; a = sigmoid(W x)^(1/8)",
    source="Zhang et al. 2024 (arXiv 2409.07146), section 3",
    slots=5,
)
def gsa(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    slots: int = 64,
    temperature: float = 8.0,
) -> Recurrent:
    """Gated slot attention: a softmax over a few slots, into each of which every token is written
    with a gate of its own.

    x [B,T,M] -> [B,T,M]; a cache stores G m (D + E) values at any length. A swish activation is
    applied to queries, keys and values.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        slots: the slots m of each key/value head.
        temperature: a larger temperature keeps gates closer to 1, so that slots forget more slowly.

    Returns:
        The module.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, groups does not divide heads,
            temperature is not above 0, or head_dim is None and M / H is not whole.

    >>> gsa(32, 4, slots=5).describe().state.formula
    'G m (D + E) = 4 x 5 x (8 + 8)'

    Source: Zhang et al. 2024 (arXiv 2409.07146), section 3.
    """
    D, G = resolve_head_dim(dim, heads, head_dim), heads if groups is None else groups
    rule = SlotRule(dim, G, slots, temperature=temperature)
    return _with_slots(dim, heads, G, D, rule, norm=RMSNorm(D))


@variant(
    family="linear",
    equation="z = V^T softmax(K^T q / sqrt(D)); K <- K diag(a) + k (1 - a)^T, V <- diag(a) V + "
    "(1 - a) v^T; 1 - a = exp(W x) / sum exp(W x)",
    source="Peng et al. 2021 (arXiv 2110.02488), section 3",
    slots=5,
)
def abc(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    slots: int = 64,
) -> Recurrent:
    """Attention with bounded memory control (ABC): a softmax over a few slots, each of which is a
    mean of all keys and values so far with learned weights.

    x [B,T,M] -> [B,T,M]; a cache stores G m (D + E + 1) values at any length.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        slots: the slots m of each key/value head.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> abc(32, 4, slots=5).describe().state.formula
    'G m (D + E + 1) = 4 x 5 x (8 + 8 + 1)'

    Source: Peng et al. 2021 (arXiv 2110.02488), section 3.
    """
    D, G = resolve_head_dim(dim, heads, head_dim), heads if groups is None else groups
    rule = SlotRule(dim, G, slots, gates="softmax")
    return _with_slots(dim, heads, G, D, rule)


def _with_slots(
    dim: int, heads: int, groups: int, D: int, rule: SlotRule, norm: nn.Module | None = None
) -> Recurrent:
    """Build a recurrence with slots; gated slots have a swish on queries, keys and values."""
    steps = () if rule.gates == "softmax" else (Swish(),)
    project = GroupedValueQKV(
        HeadProjection(dim, heads, D, *steps),
        HeadProjection(dim, groups, D, *steps),
        HeadProjection(dim, groups, D, *steps),
    )
    return Recurrent(project, rule, output_projection(dim, heads, D), norm=norm)
