"""Constructors of mechanisms that differ from grouped-query attention by the steps on queries, keys
and values: no positions in some layers, a temperature by position, norms and limits, and values
that are made from keys.
"""

from __future__ import annotations

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Window
from regard.nn.attention import Attention
from regard.nn.factored_projections import KeysAsValues, SharedKeyValue
from regard.nn.head_finishes import FinishedProjection, InverseRotary
from regard.nn.head_steps import (
    L2Clip,
    QueryTemperature,
    TemperatureForm,
    UnitNorm,
    WeightlessRMSNorm,
)
from regard.nn.norms import RMSNorm
from regard.nn.projections import ClippedQKV, HeadProjection, SeparateQKV
from regard.nn.variants.projections import output_projection
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _attention(
    dim: int,
    heads: int,
    groups: int,
    D: int,
    *,
    q_steps: tuple[nn.Module, ...] = (),
    k_steps: tuple[nn.Module, ...] = (),
    v_steps: tuple[nn.Module, ...] = (),
    mask: Mask | None = None,
    scale: float | None = None,
) -> Attention:
    """Build causal grouped-query attention with these steps."""
    project = SeparateQKV(
        HeadProjection(dim, heads, D, *q_steps),
        HeadProjection(dim, groups, D, *k_steps),
        HeadProjection(dim, groups, D, *v_steps),
    )
    output = output_projection(dim, heads, D)
    return Attention(project, output, mask=mask or Causal(), scale=scale)


@variant(
    family="softmax",
    equation="z_h = softmax(q_h k_g^T / sqrt(D) + causal) v_g, without positions",
    source="Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466)",
    groups=2,
)
def nope(dim: int, heads: int, *, groups: int, head_dim: int | None = None) -> Attention:
    """No positions (NoPE): grouped-query attention in which only the causal mask tells the order
    of tokens.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> len(nope(32, 4, groups=2).project.q.steps)
    0

    Source: Haviv et al. 2022 (arXiv 2203.16634).
    """
    return _attention(dim, heads, groups, resolve_head_dim(dim, heads, head_dim))


@variant(
    family="softmax",
    equation="q_h = tau(i) rotary(W_q x)_h, k_g = rotary(W_k x)_g",
    source="Meta 2025, Llama 4; Mistral AI 2025, Ministral 3; Nakanishi 2025 (arXiv 2501.19399)",
    groups=2,
    length=4.0,
)
def position_temperature(
    dim: int,
    heads: int,
    *,
    groups: int,
    form: TemperatureForm = "ministral3",
    scale: float = 0.1,
    length: float = 16384.0,
    head_dim: int | None = None,
    base: float | None = 10000.0,
) -> Attention:
    """Query temperature by position: queries are multiplied by a factor that grows with their
    position, so that the softmax stays sharp over longer contexts.

    x [B,T,M] -> [B,T,M]; the position is that of the token, also behind padding.

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        form: how the factor grows: "llama4", "ministral3", "inkling", "beam" or "mistral_large4"
            (`regard.nn.head_steps.QueryTemperature`).
        scale: the factor on the logarithm.
        length: the number of tokens from which on the factor grows.
        base: the base of the rotary positions on q and k; None applies none.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or the form or its numbers are out of range.

    >>> position_temperature(32, 4, groups=2, form="llama4", base=None).project.q.steps[0]
    QueryTemperature('llama4', scale=0.1, length=16384)

    Source: the code of Llama 4 and Ministral 3 in transformers, 2025.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    step = QueryTemperature(form, scale=scale, length=length, heads=heads)
    rotary = () if base is None else (Rotary(D, base),)
    return _attention(dim, heads, groups, D, q_steps=(*rotary, step), k_steps=rotary)


@variant(
    family="softmax",
    equation="z_i = softmax(q_i k_j^T / sqrt(D) over i - W < j <= i) v_j, rotated; in every n-th "
    "layer over j <= i, without positions",
    source="Yang et al. 2025 (arXiv 2501.18795), section 4; Cohere 2025, Command A (arXiv "
    "2504.00698), section 2.1",
    groups=2,
    window=5,
)
def irope(
    dim: int,
    heads: int,
    *,
    groups: int,
    window: int | None = None,
    layer: int = 0,
    every: int = 4,
    temperature: TemperatureForm | None = None,
    scale: float = 0.1,
    length: float = 8192.0,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Rotary positions in most layers and none in every n-th (iRoPE, RNoPE): the layers without
    positions see all past tokens, the others may have a window.

    x [B,T,M] -> [B,T,M]; this is the attention of one layer. Cohere 2 and Command A have n = 4 and
    a window; SmolLM 3 has n = 4 and no window; Llama 4 adds the temperature "llama4".

    Args:
        dim, heads, groups, head_dim: as for `gqa`.
        window: the window W of the layers with positions; None is none.
        layer: the index of the layer, from 0; layers n - 1, 2 n - 1, ... have no positions.
        every: the period n of the layers without positions.
        temperature: the form of the query temperature in layers without positions, or None.
        scale, length: as for `position_temperature`.
        base: the base of the rotary positions.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or layer is negative, or every or window is less than 1.

    >>> layers = [irope(32, 4, groups=2, window=3, layer=i, every=2) for i in range(2)]
    >>> [(str(layer.mask), len(layer.project.q.steps)) for layer in layers]
    [('causal & window(3)', 1), ('causal', 0)]

    Source: Yang et al. 2025 (arXiv 2501.18795), section 4.
    """
    if layer < 0 or every < 1:
        raise ArgumentError(
            f"layer is {layer} and every is {every}; layer must be at least 0, and every at "
            "least 1",
            argument="layer",
        )
    D = resolve_head_dim(dim, heads, head_dim)
    mask = Causal() if window is None else Causal() & Window(window)
    # the step is built for every layer, so that a wrong form is refused in each
    form = (
        None
        if temperature is None
        else QueryTemperature(temperature, scale=scale, length=length, heads=heads)
    )
    if (layer + 1) % every == 0:
        return _attention(dim, heads, groups, D, q_steps=() if form is None else (form,))
    rotary = (Rotary(D, base),)
    return _attention(dim, heads, groups, D, q_steps=rotary, k_steps=rotary, mask=mask)


@variant(
    family="softmax",
    equation="q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g), v_g = norm(W_v x)_g; z_h = "
    "softmax(q_h k_g^T + causal) v_g",
    source="Google 2025, Gemma 3n; Google 2026, Gemma 4 (code in transformers)",
    groups=2,
)
def value_norm(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Value norm: queries, keys and values are normalised head by head, and scores are not scaled,
    as in Gemma 3n and Gemma 4.

    x [B,T,M] -> [B,T,M]; the norm of the values has no learned weight.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> value_norm(32, 4, groups=2).project.v.steps[0]
    WeightlessRMSNorm(eps=1e-06)

    Source: the code of Gemma 3n in transformers, 2025.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    return _attention(
        dim,
        heads,
        groups,
        D,
        q_steps=(RMSNorm(D), rotary),
        k_steps=(RMSNorm(D), rotary),
        v_steps=(WeightlessRMSNorm(),),
        scale=1.0,
    )


@variant(
    family="softmax",
    equation="q_h = rotary(norm(W_q x)_h), k_g = rotary(norm(W_k x)_g), v_g = norm(W_k x)_g; z_h = "
    "softmax(q_h k_g^T + causal) v_g",
    source="Google 2026, Gemma 4 (code in transformers, attention_k_eq_v)",
    groups=2,
)
def keys_as_values(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Keys as values: values are the projected keys before norm and rotation, with a norm of their
    own, as in the global layers of Gemma 4. The matrix of the values is left out.

    x [B,T,M] -> [B,T,M]; a cache stores 2 G D values per token, because the rotation makes keys and
    values differ.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> sorted({n.split(".")[1] for n, _ in keys_as_values(32, 4, groups=2).named_parameters()})
    ['k', 'q', 'weight']

    Source: the code of Gemma 4 in transformers, 2026.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    q, k = (HeadProjection(dim, n, D, RMSNorm(D), rotary) for n in (heads, groups))
    project = KeysAsValues(q, k, value_steps=(WeightlessRMSNorm(),))
    return Attention(project, output_projection(dim, heads, D), mask=Causal(), scale=1.0)


@variant(
    family="softmax",
    equation="k = v = R_j norm(W_k x_j); z_h = R_i^T softmax(q_h k^T / sqrt(D) + causal) v",
    source="DeepSeek-AI 2026, DeepSeek-V4 (code in transformers)",
)
def shared_kv(
    dim: int,
    heads: int,
    *,
    groups: int = 1,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """One vector as key and value: it is normalised and rotated, and a cache stores it once. The
    result is rotated back by the position of the query, as in DeepSeek-V4.

    x [B,T,M] -> [B,T,M]; a cache stores G D values per token. The sparse selection of DeepSeek-V4
    is not part of it.

    Args:
        dim, heads, head_dim, base: as for `gqa`.
        groups: the number G of shared vectors; DeepSeek-V4 has 1.
        rotary_dim: the number of dims that are rotated; None is all.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or rotary_dim is odd or too large.

    >>> shared_kv(32, 4).project.shape.memory
    (8,)

    Source: the code of DeepSeek-V4 in transformers, 2026.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base, rotary_dim=rotary_dim)
    q, kv = (HeadProjection(dim, n, D, RMSNorm(D), rotary) for n in (heads, groups))
    project = FinishedProjection(SharedKeyValue(q, kv), InverseRotary(rotary))
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="q = clip(W_q x), k = clip(W_k x), v = clip(W_v x), clip(x) = max(-c, min(c, x)); q "
    "and k are then rotated",
    source="Groeneveld et al. 2024 (arXiv 2402.00838), OLMo; MosaicML 2023, DBRX and MPT",
    groups=2,
)
def clip_qkv(
    dim: int,
    heads: int,
    *,
    groups: int,
    limit: float = 8.0,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Clipped projections: every number of queries, keys and values is limited before the rotation,
    as in OLMo and DBRX.

    x [B,T,M] -> [B,T,M]

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        limit: the limit c, above 0. DBRX has 8.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or limit is not above 0.

    >>> clip_qkv(32, 4, groups=2).project.limit
    8.0

    Source: the code of OLMo, 2024 (arXiv 2402.00838).
    """
    D = resolve_head_dim(dim, heads, head_dim)
    project = ClippedQKV(dim, heads, groups, D, limit=limit, steps=(Rotary(D, base),), bias=False)
    return Attention(project, output_projection(dim, heads, D), mask=Causal())


@variant(
    family="softmax",
    equation="q_h = clip(s_h (W_q x)_h), k_g = clip(W_k x)_g, v_g = norm(W_v x)_g, clip(x) = x "
    "min(1, c / sqrt(x dot x))",
    source="The code of Inkling 2 in transformers, 2026",
    groups=2,
)
def l2_clip(
    dim: int,
    heads: int,
    *,
    groups: int,
    limit: float = 8.0,
    head_dim: int | None = None,
    base: float = 10000.0,
) -> Attention:
    """Limited lengths of queries and keys: a longer vector is scaled to the limit, and a shorter
    one stays as it is. Values are normalised. Inkling 2 has relative logits in place of rotary
    positions.

    x [B,T,M] -> [B,T,M]; scores are at most c^2 / sqrt(D).

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.
        limit: the limit c of the length, above 0.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`, or limit is not above 0.

    >>> l2_clip(32, 4, groups=2, limit=2.0).project.k.steps[0]
    L2Clip(limit=2)

    Source: the code of Inkling 2 in transformers, 2026.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    return _attention(
        dim,
        heads,
        groups,
        D,
        q_steps=(L2Clip(limit, factors=(heads, D)), rotary),
        k_steps=(L2Clip(limit), rotary),
        v_steps=(WeightlessRMSNorm(),),
    )


@variant(
    family="softmax",
    equation="q_h = s_h unit(rotary(W_q x)_h), k_g = r_g unit(rotary(W_k x)_g); z_h = "
    "softmax(sqrt(D) q_h k_g^T + causal) v_g",
    source="Loshchilov et al. 2024 (arXiv 2410.01131), equations 15 and 16",
    groups=2,
)
def ngpt(
    dim: int, heads: int, *, groups: int, head_dim: int | None = None, base: float = 10000.0
) -> Attention:
    """Unit queries and keys (nGPT): they are rotated, scaled to length 1, and multiplied by a
    learned factor per channel; the scale of the scores is sqrt(D).

    x [B,T,M] -> [B,T,M]; with all factors 1 a score is at most sqrt(D). The normalisation of all
    matrices after each training step is the part of the optimiser, and not done here.

    Args:
        dim, heads, groups, head_dim, base: as for `gqa`.

    Returns:
        The module.

    Raises:
        ArgumentError: as for `gqa`.

    >>> layer = ngpt(32, 4, groups=2)
    >>> [type(step).__name__ for step in layer.project.q.steps], round(layer.scale, 4)
    (['Rotary', 'UnitNorm'], 2.8284)

    Source: Loshchilov et al. 2024 (arXiv 2410.01131), equations 15 and 16. NVIDIA's code has one
    factor for a query channel and its key channel: that is the case of equal factors.
    """
    D = resolve_head_dim(dim, heads, head_dim)
    rotary = Rotary(D, base)
    # the weights start near 1 / sqrt(M), so that they learn at the rate of the matrices
    q_norm, k_norm = (UnitNorm(n, D, stored=dim**-0.5) for n in (heads, groups))
    return _attention(
        dim,
        heads,
        groups,
        D,
        q_steps=(rotary, q_norm),
        k_steps=(rotary, k_norm),
        scale=D**0.5,
    )
