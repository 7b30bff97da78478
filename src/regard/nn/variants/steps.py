"""Softmax attention with other steps on queries, keys, values and results of heads: positions in
some layers only, temperatures, norms and limits, values made from keys, gates, and values of the
first layer.
"""

from __future__ import annotations

from typing import Unpack

from regard.argument_checks import check_groups, resolve_head_dim
from regard.masks import Causal, Window
from regard.nn.attention.attention import Attention
from regard.nn.attention.cross import ValueResidualQKV
from regard.nn.blocks.norms import RMSNorm
from regard.nn.projections.factored import KeysAsValues, SharedKeyValue
from regard.nn.projections.fused import ClippedQKV
from regard.nn.projections.heads import SeparateQKV
from regard.nn.projections.steps import (
    FinishedProjection,
    HeadFinish,
    HeadGate,
    InverseRotary,
    L2Clip,
    OwnValueRemoval,
    PairDifference,
    QueryTemperature,
    TemperatureForm,
    UnitNorm,
    WeightlessRMSNorm,
)
from regard.nn.variants.options import Base, Grouped, HeadSize, Rotated
from regard.nn.variants.projections import (
    Start,
    is_first_layer,
    is_last_of_period,
    output_projection,
)
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _finished(start: Start, finish: HeadFinish) -> Attention:
    """Build causal grouped-query attention with a step on its result."""
    project = FinishedProjection(start.qkv(), finish)
    output = output_projection(start.dim, finish.heads(start.heads), start.D)
    return Attention(project, output, mask=Causal())


@variant(
    "head_steps",
    "z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, without positions",
    "Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466)",
    users="every fourth layer of SmolLM 3, Command A and Llama 4",
    choose="as some layers of a model, whose other layers have positions",
    avoid="as the only layers: they learn order from the mask alone, and longer texts break it",
)
def nope(dim: int, heads: int, **options: Unpack[Grouped]) -> Attention:
    """No positions (NoPE): grouped-query attention in which only the causal mask tells the order of
    tokens.
    """
    return Start(dim, heads, **options).attention()


@variant(
    "head_steps",
    "q_h = tau(i) rotary(W_q x)_h, k_g = rotary(W_k x)_g",
    "Meta 2025, Llama 4; Mistral AI 2025, Ministral 3; Nakanishi 2025 (arXiv 2501.19399)",
    users="Ministral 3, Mistral Large 4, Inkling; the global layers of Llama 4 and Beam",
    choose="contexts far beyond the training length, where the softmax becomes flat",
    avoid="texts stay shorter than the length from which the factor grows: it is then 1",
    where="tau: factor of a query, which grows with its position",
    example={"length": 4.0},
)
def position_temperature(
    dim: int,
    heads: int,
    *,
    form: TemperatureForm = "ministral3",
    scale: float = 0.1,
    length: float = 16384.0,
    base: float | None = 10000.0,
    **options: Unpack[Grouped],
) -> Attention:
    """Query temperature by position: queries are multiplied by a factor that grows with their
    position, so that the softmax stays sharp over longer contexts.

    The position is that of the token, also behind padding.

    Args:
        form: how the factor grows: "llama4", "ministral3", "inkling", "beam" or "mistral_large4"
            (`regard.nn.projections.steps.QueryTemperature`).
        scale: the factor on the logarithm.
        length: the number of tokens from which on the factor grows.
        base: the base of the rotary positions on q and k; None applies none.
    """
    start = Start(dim, heads, base=base, **options)
    step = QueryTemperature(form, scale=scale, length=length, heads=heads)
    q, k = start.q(*start.rotary, step), start.kv(*start.rotary)
    return start.attention(SeparateQKV(q, k, start.kv()))


@variant(
    "head_steps",
    "z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j, rotated; in every n-th layer "
    "over j <= i, without positions",
    "Yang et al. 2025 (arXiv 2501.18795), section 4; Cohere 2025, Command A (arXiv 2504.00698), "
    "section 2.1",
    users="Command A and Cohere 2 (with a window), SmolLM 3 (without), Llama 4 (with chunks)",
    choose="contexts become longer than those of training",
    avoid="the context is short, or a checkpoint with rotary positions everywhere is continued",
    where=(
        "W: the window: how many of the last keys a token sees, itself included; n: distance of "
        "two layers without positions"
    ),
    example={"window": 5},
)
def irope(
    dim: int,
    heads: int,
    *,
    window: int | None = None,
    layer: int = 0,
    every: int = 4,
    temperature: TemperatureForm | None = None,
    scale: float = 0.1,
    length: float = 8192.0,
    **options: Unpack[Rotated],
) -> Attention:
    """Rotary positions in most layers and none in every n-th (iRoPE, RNoPE): the layers without
    positions see all past tokens, the others may have a window.

    This is the attention of one layer. Cohere 2 and Command A have n = 4 and a window; SmolLM 3 has
    n = 4 and no window; Llama 4 adds the temperature "llama4".

    Args:
        window: the window W of the layers with positions; None is none.
        layer: the index of the layer, from 0; layers n - 1, 2 n - 1, ... have no positions.
        every: the period n of the layers without positions.
        temperature: the form of the query temperature in layers without positions, or None.
        scale: the factor on the logarithm.
        length: the number of tokens from which on the factor grows.
    """
    without_positions, start = is_last_of_period(layer, every), Start(dim, heads, **options)
    mask = Causal() if window is None else Causal() & Window(window)
    steps = []  # built for every layer, so that a wrong form is refused in each
    if temperature is not None:
        steps = [QueryTemperature(temperature, scale=scale, length=length, heads=heads)]
    if without_positions:
        return start.attention(SeparateQKV(start.q(*steps), start.kv(), start.kv()))
    return start.attention(mask=mask)


@variant(
    "head_steps",
    "q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g), v_g = norm(W_v x)_g; z_h = "
    "softmax(q_h k_g^T + causal) v_g",
    "Google 2025, Gemma 3n; Google 2026, Gemma 4 (code in transformers)",
    users="Gemma 3n and Gemma 4",
    choose="values grow in training, as queries and keys do without a norm",
    avoid="a checkpoint without these norms is continued",
)
def value_norm(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Value norm: queries, keys and values are normalized head by head, and scores are not scaled,
    as in Gemma 3n and Gemma 4.

    The norm of the values has no learned weight.
    """
    start = Start(dim, heads, **options)
    q, k = (each(RMSNorm(start.D), *start.rotary) for each in (start.q, start.kv))
    return start.attention(SeparateQKV(q, k, start.kv(WeightlessRMSNorm())), scale=1.0)


@variant(
    "head_steps",
    "q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g), v_g = norm(W_k x)_g; z_h = "
    "softmax(q_h k_g^T + causal) v_g",
    "Google 2026, Gemma 4 (code in transformers, attention_k_eq_v)",
    users="the global layers of the larger Gemma 4 models",
    choose="parameters are scarce: one matrix less for each layer",
    avoid="the cache is the limit: it is as large as that of gqa",
)
def keys_as_values(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Keys as values: values are the projected keys before norm and rotation, with a norm of their
    own, as in the global layers of Gemma 4. The matrix of the values is left out.

    A cache stores 2 G D values per token, because the rotation makes keys and values differ.
    """
    start = Start(dim, heads, **options)
    q, k = (each(RMSNorm(start.D), *start.rotary) for each in (start.q, start.kv))
    return start.attention(KeysAsValues(q, k, value_steps=(WeightlessRMSNorm(),)), scale=1.0)


@variant(
    "head_steps",
    "k = v = R_j norm(W_k x_j); z_h = R_i^T softmax(q_h k^T / sqrt(D) + causal) v",
    "DeepSeek-AI 2026, DeepSeek-V4 (code in transformers)",
    users="DeepSeek-V4, below its compressed and selected keys",
    choose="the cache decides how many users fit: it is half of that of mqa",
    avoid="a head needs values that differ from its keys, and the cache fits",
    where="R_i: rotation to the query; R_j: rotation to the position of the key",
)
def shared_kv(
    dim: int,
    heads: int,
    *,
    groups: int = 1,
    rotary_dim: int | None = None,
    base: Base = 10000.0,
    **options: Unpack[HeadSize],
) -> Attention:
    """One vector as key and value: it is normalized and rotated, and a cache stores it once. The
    result is rotated back by the position of the query, as in DeepSeek-V4.

    A cache stores G D values per token. The sparse selection of DeepSeek-V4 is not part of it.

    Args:
        groups: the number G of shared vectors; DeepSeek-V4 has 1.
        rotary_dim: the number of dims that are rotated; None is all.
    """
    start = Start(dim, heads, groups=groups, **options)
    rotary = Rotary(start.D, base, rotary_dim=rotary_dim)
    q, kv = (each(RMSNorm(start.D), rotary) for each in (start.q, start.kv))
    return start.attention(FinishedProjection(SharedKeyValue(q, kv), InverseRotary(rotary)))


@variant(
    "head_steps",
    "q = clip(W_q x), k = clip(W_k x), v = clip(W_v x), clip(x) = max(-c, min(c, x)); q and k are "
    "then rotated",
    "Groeneveld et al. 2024 (arXiv 2402.00838), OLMo; MosaicML 2023, DBRX and MPT",
    users="OLMo, DBRX; MPT",
    choose="to load such a checkpoint",
    avoid="a new model: a clipped number has no gradient; take qk_norm",
    where="c: the limit; clip: limits each number to -c .. c",
)
def clip_qkv(dim: int, heads: int, *, limit: float = 8.0, **options: Unpack[Rotated]) -> Attention:
    """Clipped projections: every number of queries, keys and values is limited before the rotation,
    as in OLMo and DBRX.

    Args:
        limit: the limit c, above 0. DBRX has 8.
    """
    start = Start(dim, heads, **options)
    sizes = (dim, heads, start.groups, start.D)
    return start.attention(ClippedQKV(*sizes, limit=limit, steps=start.rotary, bias=False))


@variant(
    "head_steps",
    "q_h = clip(s_h (W_q x)_h), k_g = clip(W_k x)_g, v_g = norm(W_v x)_g, clip(x) = x min(1, c / "
    "sqrt(x dot x))",
    "The code of Inkling 2 in transformers, 2026",
    users="Inkling 2",
    choose="scores must stay bounded, and short vectors should stay short",
    avoid="a new model without reason to differ: qk_norm is better studied",
    where="c: the limit of the length; clip: limits the length of a vector to c",
)
def l2_clip(dim: int, heads: int, *, limit: float = 8.0, **options: Unpack[Rotated]) -> Attention:
    """Limited lengths of queries and keys: a longer vector is scaled to the limit, and a shorter
    one stays as it is. Values are normalized. Inkling 2 has relative logits in place of rotary
    positions.

    Scores are at most c^2 / sqrt(D).

    Args:
        limit: the limit c of the length, above 0.
    """
    start = Start(dim, heads, **options)
    q = start.q(L2Clip(limit, factors=(heads, start.D)), *start.rotary)
    k, v = start.kv(L2Clip(limit), *start.rotary), start.kv(WeightlessRMSNorm())
    return start.attention(SeparateQKV(q, k, v))


@variant(
    "head_steps",
    "q_h = s_h unit(rotary(W_q x)_h), k_g = r_g unit(rotary(W_k x)_g); z_h = softmax(sqrt(D) q_h "
    "k_g^T + causal) v_g",
    "Loshchilov et al. 2024 (arXiv 2410.01131), equations 15 and 16",
    users="none that is released; the paper trained models of 0.5B and 1B parameters",
    choose="the whole model is normalized, as in the paper",
    avoid="the other matrices are not normalized after each step: take qk_norm",
    where="r_g: learned factors of a key head; unit: the vector scaled to length 1",
)
def ngpt(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Unit queries and keys (nGPT): they are rotated, scaled to length 1, and multiplied by a
    learned factor per channel; the scale of the scores is sqrt(D).

    With all factors 1 a score is at most sqrt(D). The normalization of all matrices after each
    training step is the part of the optimizer, and not done here. NVIDIA's code has one factor for
    a query channel and its key channel: that is the case of equal factors.
    """
    start = Start(dim, heads, **options)
    # the weights start near 1 / sqrt(M), so that they learn at the rate of the matrices
    q_norm, k_norm = (UnitNorm(n, start.D, stored=dim**-0.5) for n in (heads, start.groups))
    q, k = start.q(*start.rotary, q_norm), start.kv(*start.rotary, k_norm)
    return start.attention(SeparateQKV(q, k, start.kv()), scale=start.D**0.5)


@variant(
    "head_results",
    "z'_h = z_h * sigmoid(W_g x)_h, one number for each head",
    "Qiu et al. 2025 (arXiv 2505.06708), section 4; code: LFM3",
    users="LFM3",
    choose="as gated, where a gate for each channel costs too many parameters",
    avoid="a checkpoint without the gate is continued",
)
def head_gate(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Gate per head: every head is multiplied by one sigmoid gate, which is computed from the
    hidden state of the query, as in LFM3.
    """
    return _finished(Start(dim, heads, **options), HeadGate(dim, heads))


@variant(
    "head_results",
    "z'_h = z_h * softplus(W_g x)_h, one number for each head",
    "Poolside 2026, code of Laguna in transformers",
    users="Laguna",
    choose="to load such a checkpoint, or where a head must be able to grow",
    avoid="a new model: sigmoid gates are bounded and better studied; take head_gate or gated",
)
def softplus_gate(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Softplus gate per head: every head is multiplied by ln(1 + exp(W_g x)), which has no upper
    bound, as in Laguna.
    """
    finish = HeadGate(dim, heads, activation="softplus")
    return _finished(Start(dim, heads, **options), finish)


@variant(
    "head_results",
    "z'_h = z_h * sigmoid((W_g x)_h + b_h), with one bias for each head",
    "The code of Beam in transformers, 2026",
    users="Beam",
    choose="to load such a checkpoint",
    avoid="a new model: take gated; no published comparison shows a gain of the bias",
    where="b_h: learned bias of the gates of a head",
)
def biased_gate(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Gated output with a bias per head: a sigmoid gate for every channel, and one learned bias for
    all channels of a head, as in Beam.
    """
    start = Start(dim, heads, **options)
    return _finished(start, HeadGate(dim, heads, start.D, bias=True))


@variant(
    "head_results",
    "z_h = softmax(q1 k^T / sqrt(D)) v - l softmax(q2 k^T / sqrt(D)) v, l = sigmoid(W_l x)_h",
    "Microsoft 2026, Differential Transformer V2 (code: microsoft/unilm)",
    users="none that is released; Microsoft trained language models with it",
    choose="noise in long contexts hurts, and decoding must cost what gqa costs",
    avoid="public checkpoints matter, or twice the matrix of the queries is too much",
    where=(
        "W_l: learned matrix of that weight; l: weight of the second head, for each token; q1: "
        "queries of the first head of a pair; q2: queries of the second head of a pair"
    ),
)
def differential_v2(dim: int, heads: int, **options: Unpack[Rotated]) -> Attention:
    """Differential attention V2: the difference of two query heads that share keys and values, with
    a weight for each token and head, and no norm.

    Each of the H heads has two query heads, and the cache is that of `gqa`.

    Args:
        heads: the number of heads H of the result; attention has 2 H query heads.
    """
    options["head_dim"] = resolve_head_dim(dim, heads, options["head_dim"])
    check_groups(heads, options["groups"])  # both heads of a pair have the same keys
    return _finished(Start(dim, 2 * heads, **options), PairDifference(dim, heads))


@variant(
    "head_results",
    "z'_h = z_h - (z_h dot u) u, u = v / sqrt(v dot v) of the same token",
    "XSA 2026 (arXiv 2603.09078)",
    users="NeoMME, with learned weights",
    choose="training from scratch, where heads should add what the token itself does not have",
    avoid="a checkpoint without it is continued, or a method with a longer record is wanted",
    where="u: the token's own value, scaled to length 1",
)
def exclusive(
    dim: int, heads: int, *, learned: bool = False, **options: Unpack[Rotated]
) -> Attention:
    """Exclusive self-attention (XSA): what a head returns along the token's own value is removed,
    because the residual connection has it already.

    Args:
        learned: whether each head learns how much it removes, tanh(alpha) with alpha = 0 at first,
            as in NeoMME.
    """
    return _finished(Start(dim, heads, **options), OwnValueRemoval(heads, learned=learned))


@variant(
    "first_values",
    "z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g; v = s W_v x + (1 - s) v1, v1 = v of the "
    "first layer",
    "Zhou et al. 2024 (arXiv 2410.17897), section 3",
    users="ResFormer; the record runs of modded-nanogpt; with shares by token, RWKV-7",
    choose="training from scratch: deep layers keep what each token was at the start",
    avoid="layers are to run alone or on other ranks: each needs the values of the first",
    where="s: learned share of a layer's own values; v1: values of the first layer",
)
def value_residual(
    dim: int, heads: int, *, layer: int = 0, share: float = 0.5, **options: Unpack[Rotated]
) -> Attention:
    """Value residual learning (ResFormer): each layer mixes its values with those of the first
    layer, so that what a token is reaches every layer directly.

    This is the attention of one layer. A layer behind the first one runs in a `Decoder`, which
    passes the values; a cache stores the mixed values, 2 G D numbers per token.

    Args:
        layer: the index of the layer, from 0; layer 0 gives its values, and the others read them.
        share: the initial value of s, the learned share of a layer's own values; 1 is `gqa`.
    """
    start = Start(dim, heads, **options)
    is_first = is_first_layer(layer)
    return start.attention(ValueResidualQKV(*start.maps(), is_first=is_first, share=share))
