"""Recurrences with decayed sums: lightning attention, HGRN2, LightNet, Mamba, Mamba-2, RWKV-4,
RWKV-6, the matrix memory of xLSTM, gated slots and ABC.
"""

from __future__ import annotations

import math
from typing import Annotated, Unpack

from regard.errors import ArgumentError
from regard.nn.blocks.norms import HeadNorm, JoinedHeadsRMSNorm, RMSNorm
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.projections.steps import Swish
from regard.nn.recurrence.decays import (
    HGRN2Rule,
    LightNetRule,
    LogLinearRule,
    Mamba2Rule,
    MLSTMRule,
    RetentionRule,
    RWKV4Rule,
    RWKV6Rule,
    SelectiveQKV,
    SelectiveScanRule,
    SlotRule,
)
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV, TokenShiftQKV
from regard.nn.recurrence.recurrent import Recurrent
from regard.nn.variants.options import HeadSize, Option, SharedHeads, Valued
from regard.nn.variants.projections import Start, ValueHeadStart, output_projection, set_half_heads
from regard.nn.variants.registry import variant


class Slots(SharedHeads, total=False):
    """Key/value heads with a few slots each."""

    slots: Annotated[int, Option("the slots m of each key/value head.", 64)]


def lightning_rates(heads: int, layer: int, layers: int) -> list[float]:
    """Return the rates r of lightning attention, whose heads decay by exp(-r) per token.

    r_h = 2^(-8 h / H) (1 - l / (L - 1 + 1e-5) + 1e-5), h = 1 ... H

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
    "decays",
    "z = norm(S^T q) * sigmoid(W_g x); S <- exp(-r_h) S + k v^T; q, k, v = silu(W x); r_h = 2^(-8 "
    "h / H) (1 - l / L)",
    "Qin et al. 2024 (arXiv 2401.04658); MiniMax 2025 (arXiv 2501.08313), section 2.2",
    users="MiniMax-Text-01 and MiniMax-M1, in seven of eight layers",
    choose="very long contexts with fixed decays, beside some layers of full attention",
    avoid="tokens must be forgotten by their content: take gated_linear or gated_delta_net",
    where=(
        "L: number of layers; l: index of the layer; norm: RMS norm of all heads together; r_h: "
        "rate at which the state of head h decays"
    ),
)
def lightning(
    dim: int, heads: int, *, layer: int = 0, layers: int = 80, **options: Unpack[HeadSize]
) -> Recurrent:
    """Lightning attention: each head's state decays at a fixed rate, more slowly in upper layers,
    followed by one norm over all heads and a sigmoid gate.

    A cache stores H D D values at any length. A swish activation is applied to queries, keys and
    values.

    Args:
        layer: the index of the layer, from 0.
        layers: the number of layers L of the model.
    """
    start = ValueHeadStart(dim, heads, **options)
    rates = lightning_rates(heads, layer, layers)
    return Recurrent(
        SeparateQKV(*(start.q(Swish()) for _ in "qkv")),
        RetentionRule(heads, [math.exp(-rate) for rate in rates], scale=1.0),
        start.output(),
        norm=JoinedHeadsRMSNorm(heads, start.D),
        gate=start.gate(),
        gate_activation="sigmoid",
    )


@variant(
    "decays",
    "z = norm(S^T q / sqrt(D)); S <- diag(f) S + (1 - f) v^T; f = b + (1 - b) sigmoid(W_f x); q = "
    "silu(W_q x)",
    "Qin et al. 2024 (arXiv 2404.07904), equation 5",
    users="research models of up to 3B parameters",
    choose="forget gates and keys should share their parameters",
    avoid="exact recall matters: take gated_delta_net, with some layers of full attention",
    where=(
        "W_f: learned matrix of the forget gates; b: lower bound of the forget gates; f: forget "
        "gate of each channel; norm: RMS norm of all heads together"
    ),
)
def hgrn2(
    dim: int, heads: int, *, lower_bound: float = 0.0, **options: Unpack[Valued]
) -> Recurrent:
    """HGRN2: gated linear attention whose keys are what the forget gates leave free, followed by
    one norm over all heads.

    A cache stores H D E values at any length. The projection of the keys computes the logits of the
    forget gates.

    Args:
        lower_bound: the smallest forget gate, at least 0 and below 1.
    """
    start = ValueHeadStart(dim, heads, **options)
    project = SeparateQKV(start.q(Swish()), start.kv(), start.values())
    norm = JoinedHeadsRMSNorm(heads, start.E)
    return Recurrent(project, HGRN2Rule(lower_bound), start.output(), norm=norm)


@variant(
    "decays",
    "z = norm(S^T q / sqrt(D)) * silu(W_g x); S <- diag(exp(L' - L)) S + exp(k - L) v^T; L = "
    "ln(exp(L') + exp(k))",
    "Qin et al. 2024 (arXiv 2405.21022), section 3",
    users="research models of up to 1B parameters",
    choose="the weights of the past should be a softmax in each key channel, with a fixed state",
    avoid="recent tokens matter more than old ones: only larger keys make the state forget",
    where="L: running log-sum-exp of the keys; L': its value before the token",
)
def lightnet(dim: int, heads: int, **options: Unpack[Valued]) -> Recurrent:
    """LightNet: gated linear attention whose decays come from a running log-sum-exp of the keys, so
    that the weights of each key channel are a softmax over the past.

    A cache stores H D (E + 1) values at any length.
    """
    start = ValueHeadStart(dim, heads, **options)
    project = SeparateQKV(start.q(Swish()), start.kv(), start.values())
    norm, output = RMSNorm(start.E), start.output()
    return Recurrent(project, LightNetRule(), output, norm=norm, gate=start.gate())


@variant(
    "decays",
    "z = norm((S^T q + d v) * silu(W_g x)); S <- exp(-A s) S + k (s v)^T; s = softplus(W x + b); "
    "q, k, v = silu(conv(W x))",
    "Dao and Gu 2024 (arXiv 2405.21060), section 7",
    users="Mamba-2, Codestral Mamba, Bamba, Granite 4, Nemotron-H, Zamba2, Falcon-H1",
    choose="long contexts at the speed of a state of fixed size, beside some layers of attention",
    avoid="as the only mechanism, where exact recall matters",
    where=(
        "A: learned rate of the decay, one for each head; conv: short causal convolution; d: "
        "learned weight of the skip, one for each head; norm: RMS norm of all heads together; s: "
        "step size of a head and token"
    ),
    example={"head_dim": 8},
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

    A cache stores H D E values of the state, and kernel - 1 past inputs of the convolution. Each
    group has one query head and one key head.

    Args:
        heads: the value heads H, each with a state.
        groups: the query and key heads G; G divides H.
        head_dim: the dim D of queries and keys, called the state dim.
        value_dim: the value dim E, called the head dim; None is 2 M / H.
        kernel: the number of tokens of the convolution, the present one included.
    """
    rule = Mamba2Rule(dim, heads)
    return _state_space_layer(rule, dim, heads, groups, head_dim, value_dim, kernel)


@variant(
    "decays",
    "z = norm((sum_l w[l] S[l]^T q + d v) * silu(W_g x)); S <- exp(-A s) S, S[b+1] <- S[0] + ... + "
    "S[b], S[1] ... S[b] <- 0, S[0] <- k (s v)^T; w = softplus(c W_w x); s = softplus(W x + b_s); "
    "q, k, v = silu(conv(W x))",
    "Guo et al. 2025 (arXiv 2506.04761), section 3",
    users="none that is released; the paper trained language models",
    choose="mamba2 forgets too much: here each doubling of the age of a token has its own state",
    avoid="the cache must be small: there is a state of the size of mamba2 for each level",
    where=(
        "A: learned rate of the decay, one for each head; S: states of a head: level l sums over "
        "2^(l-1) neighbouring tokens, level 0 has the present one; W_w: learned matrix of the "
        "weights of the levels; b: lowest bit that is set in the number of earlier tokens; b_s: "
        "learned bias of the step sizes; c: learned scale, one for each head and level; conv: "
        "short causal convolution; d: learned weight of the skip, one for each head; l: index of "
        "a level; norm: RMS norm of all heads together; s: step size of a head and token; w: "
        "weight of each level for a head and token"
    ),
    example={"head_dim": 8, "levels": 4},
)
def log_linear(
    dim: int,
    heads: int,
    *,
    levels: int = 16,
    groups: int = 1,
    head_dim: int = 128,
    value_dim: int | None = None,
    kernel: int = 4,
) -> Recurrent:
    """Log-linear attention (log-linear Mamba-2): the past is divided into buckets of 1, 2, 4, ...
    tokens, each with a state of its own, and each token weights the states.

    A cache stores H L D E values of the states, the number of tokens, and kernel - 1 past inputs of
    the convolution, at any length. The last level also holds all that is older than its bucket, in
    texts of more than 2^(L-1) tokens. With weights of 1 it is `mamba2`.

    Args:
        heads: the value heads H, each with a state for each level.
        levels: the number of levels L, from 1 to 24; log2(T) + 1 have a bucket for all of T tokens.
        groups: the query and key heads G; G divides H.
        head_dim: the dim D of queries and keys, called the state dim.
        value_dim: the value dim E, called the head dim; None is 2 M / H.
        kernel: the number of tokens of the convolution, the present one included.
    """
    rule = LogLinearRule(dim, heads, levels)
    return _state_space_layer(rule, dim, heads, groups, head_dim, value_dim, kernel)


def _state_space_layer(
    rule: Mamba2Rule,
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    value_dim: int | None,
    kernel: int,
) -> Recurrent:
    """Return the layer of Mamba-2 around a rule."""
    if value_dim is None:
        if heads < 1 or 2 * dim % heads:
            raise ArgumentError(
                f"2 dim is {2 * dim}; it must be divisible by heads = {heads}, or give value_dim"
            )
        value_dim = 2 * dim // heads
    q, k = (HeadProjection(dim, groups, head_dim) for _ in "qk")
    v = HeadProjection(dim, heads, value_dim)
    channels = 2 * groups * head_dim + heads * value_dim
    return Recurrent(
        ConvolvedQKV(q, k, v, CausalConvolution(channels, kernel, bias=True)),
        rule,
        output_projection(dim, heads, value_dim),
        norm=JoinedHeadsRMSNorm(heads, value_dim, groups=groups),
        gate=HeadProjection(dim, heads, value_dim),
        gate_before_norm=True,
    )


@variant(
    "decays",
    "S[n] <- diag(exp(-s[n] exp(A[n]))) S[n] + k (s[n] v[n]); z = (S[n]^T q + d[n] v[n]) * "
    "silu(W_g x); q, k = W v, s = softplus(W_2 W_1 v + b); v = W_v x after a convolution",
    "Gu and Dao 2023 (arXiv 2312.00752), section 3 and algorithm 2",
    users="Mamba of up to 2.8B parameters, Falcon Mamba 7B, Jamba, Zamba",
    choose="to load or study Mamba-1, or Jamba's layers: a small state for every channel",
    avoid="a new model: mamba2 has one decay for a head, and larger states for the same work",
    where=(
        "A: learned rate of the decay, one for each value of the state of a channel; S: state of "
        "a channel, a vector; W_1: first matrix of the step sizes; W_2: second matrix of the step "
        "sizes; d: learned weight of the skip, one for each channel; k: keys, shared by all "
        "channels; n: index of a channel; q: queries, shared by all channels; s: step size of a "
        "channel and token; v: value of a channel"
    ),
    example={"inner": 12, "state": 4, "rank": 3},
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

    A cache stores state values for each of the inner channels, and kernel - 1 past inputs of the
    convolution.

    Args:
        heads: the heads H of the attention layers beside it; Mamba has none, because each channel
            has a state of its own.
        inner: the number of channels N; None is 2 M.
        state: the number of values D of the state of a channel.
        kernel: the number of tokens of the convolution, the present one included.
        rank: the rank of the map to the step sizes; None is M / 16, rounded up.
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
    "decays",
    "z = sigmoid(q) (a + exp(u + k) v) / (b + exp(u + k)); a <- exp(-r) a + exp(k) v, b <- "
    "exp(-r) b + exp(k); q, k, v = W (c x + (1 - c) x')",
    "Peng et al. 2023 (arXiv 2305.13048), equations 11 to 19",
    users="RWKV-4 Pile and Raven, of up to 14B parameters",
    choose="to load or study RWKV-4: its state is the smallest of all",
    avoid="a new model: a state with a matrix for each head, as in rwkv6, recalls far more",
    where=(
        "a: decayed sum of the values of a channel; b: decayed sum of the weights of a channel; "
        "c: learned share of the present token; r: learned rate of the decay of a channel; u: "
        "learned bonus of the present token"
    ),
)
def rwkv4(dim: int, heads: int, **options: Unpack[HeadSize]) -> Recurrent:
    """RWKV-4: in each channel a mean of the values, weighted by exp(k) and by a learned decay, and
    gated by the receptance q.

    A cache stores 3 values per channel and the last token, at any length. Channels do not interact,
    so that heads only give their number, H D.
    """
    start = Start(dim, heads, **options)
    project = TokenShiftQKV(*start.maps())
    return Recurrent(project, RWKV4Rule(heads, start.D), start.output())


@variant(
    "decays",
    "z = norm(S^T q + (q . (u k)) v) * silu(W_g x); S <- diag(exp(-exp(r))) S + k v^T; r = b + "
    "W_2 tanh(W_1 x); q, k, v = W (c x + (1 - c) x')",
    "Peng et al. 2024 (arXiv 2404.05892), section 4",
    users="RWKV-6 Finch, of up to 14B parameters",
    choose="the state must decide by content how fast each channel forgets",
    avoid="exact recall matters: take gated_delta_net, with some layers of full attention",
    where=(
        "c: learned share of the present token; norm: group norm of a head; r: logarithm of the "
        "rate of the decay; u: learned weight of the present token, one for each key channel"
    ),
    example={"rank": 3},
)
def rwkv6(dim: int, heads: int, *, rank: int = 64, **options: Unpack[HeadSize]) -> Recurrent:
    """RWKV-6 (Finch): each token computes a decay for every channel, and reads itself with a
    learned weight instead of that of the state.

    A cache stores H D D values and the last token, at any length. Unlike the paper's model, the mix
    of a token with the one before it does not depend on the token, and decays and gate read the
    token alone.

    Args:
        rank: the rank of the map to the decays.
    """
    start = ValueHeadStart(dim, heads, **options)
    project, rule = TokenShiftQKV(*start.maps()), RWKV6Rule(dim, heads, start.D, rank=rank)
    norm, output = HeadNorm(heads, start.D), start.output()
    return Recurrent(project, rule, output, norm=norm, gate=start.gate())


@variant(
    "decays",
    "z = norm(C^T q / max(abs(n . q), 1)) * sigmoid(W_g x); C <- f C + i k v^T, n <- f n + i k; i "
    "= exp(W_i x + b), f = sigmoid(W_f x + b)",
    "Beck et al. 2024 (arXiv 2405.04517), section 2.3; Beck et al. 2025 (arXiv 2503.13427)",
    users="xLSTM 7B",
    choose="single tokens must be able to overwrite the memory by a large input gate",
    avoid="existing kernels must serve the model: the running maximum of its gates needs its own",
    where=(
        "C: memory of a head, a matrix with a row for each channel of a key; W_f: learned matrix "
        "of the forget gate; W_i: learned matrix of the input gate; f: forget gate; i: input "
        "gate; n: sum of the keys in the memory; norm: group norm of a head"
    ),
)
def mlstm(
    dim: int, heads: int, *, gate_cap: float | None = 15.0, **options: Unpack[Valued]
) -> Recurrent:
    """The matrix memory of xLSTM (mLSTM): a matrix with an exponential input gate and a forget
    gate, divided by a running sum of the keys.

    A cache stores H (D E + D + 1) values at any length. This is the layer of xLSTM 7B, which has no
    convolution.

    Args:
        gate_cap: the bound of the gates' logits; None applies none.
        head_dim: the head dim D; None is M / 2H, as in the paper.
        value_dim: the value dim E; None is 2 D.
    """
    set_half_heads(dim, heads, options)
    start = ValueHeadStart(dim, heads, **options)
    return Recurrent(
        SeparateQKV(start.q(), start.kv(), start.values()),
        MLSTMRule(dim, heads, gate_cap=gate_cap),
        start.output(),
        norm=HeadNorm(heads, start.E, eps=1e-6),
        gate=start.gate(),
        gate_activation="sigmoid",
    )


@variant(
    "decays",
    "z = norm(V^T softmax(K^T q / sqrt(D))); K <- K diag(a) + k (1 - a)^T, V <- diag(a) V + (1 - "
    "a) v^T; a = sigmoid(W x)^(1/8)",
    "Zhang et al. 2024 (arXiv 2409.07146), section 3",
    users="research models of up to 7B parameters, some converted from Mistral 7B",
    choose="a trained softmax model is converted to a state of fixed size",
    avoid="many different tokens must be recalled: there are only as many slots",
    where=(
        "K: keys of the slots, one for each column; V: values of the slots, one for each row; a: "
        "decay of each slot"
    ),
    example={"slots": 5},
)
def gsa(dim: int, heads: int, *, temperature: float = 8.0, **options: Unpack[Slots]) -> Recurrent:
    """Gated slot attention: a softmax over a few slots, into each of which every token is written
    with a gate of its own.

    A cache stores G m (D + E) values at any length. A swish activation is applied to queries, keys
    and values.

    Args:
        temperature: a larger temperature keeps gates closer to 1, so that slots forget more slowly.
    """
    slots = options.pop("slots")
    start = ValueHeadStart(dim, heads, **options)
    rule = SlotRule(dim, start.groups, slots, temperature=temperature)
    project = start.separate(Swish(), value_steps=[Swish()])
    return Recurrent(project, rule, start.output(), norm=RMSNorm(start.D))


@variant(
    "decays",
    "z = V^T softmax(K^T q / sqrt(D)); K <- K diag(a) + k (1 - a)^T, V <- diag(a) V + (1 - a) "
    "v^T; 1 - a = exp(W x) / sum exp(W x)",
    "Peng et al. 2021 (arXiv 2110.02488), section 3",
    users="none that is released; translation and language models of the paper",
    choose="to see softmax attention over a memory of fixed size",
    avoid="a new model: take gsa, whose slots forget",
    where=(
        "K: keys of the slots, one for each column; V: values of the slots, one for each row; a: "
        "decay of each slot"
    ),
    example={"slots": 5},
)
def abc(dim: int, heads: int, **options: Unpack[Slots]) -> Recurrent:
    """Attention with bounded memory control (ABC): a softmax over a few slots, each of which is a
    mean of all keys and values so far with learned weights.

    A cache stores G m (D + E + 1) values at any length.
    """
    slots = options.pop("slots")
    start = ValueHeadStart(dim, heads, **options)
    rule = SlotRule(dim, start.groups, slots, gates="softmax")
    return Recurrent(start.separate(), rule, start.output())
