"""Conversion to another number of key/value heads: fewer by pooling neighbours, more by repeating,
since query heads g H/G to (g+1) H/G - 1 share key/value head g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.language import Phrase
from regard.models.convert.attention_maps import (
    PROJECT,
    AttentionMaps,
    Checkpoint,
    ConversionStep,
    LayerErrors,
    head_parameters,
    input_roots,
    layers_of,
    matrix_sqrt,
    rebuild,
    separate_attention,
)
from regard.models.families import model_type_of
from regard.nn import HeadProjection
from regard.positions import Rotary

HeadPooling: TypeAlias = Literal["mean", "svd"]
"""How one key/value head is computed from several."""
OnInputs: TypeAlias = Callable[[Tensor], Tensor]
"""Maps times the root of their inputs' moments; see `AttentionMaps.on_inputs`."""


def to_groups(
    checkpoint: Checkpoint,
    groups: int,
    pooling: HeadPooling = "mean",
    ids: Int[Tensor, "N T"] | None = None,
) -> tuple[Checkpoint, ConversionStep]:
    """Change the number G of key/value heads; the number of query heads stays.

    More heads: each is repeated, k_h = k_{h // (G'/G)}, exactly. Fewer, "mean": the maps of
    neighbours are averaged. Fewer, "svd": k_j ~ C_j k and v_j ~ C_j v, with C_j moved into query
    and output maps, minimize sum_h |W_q,h^T W_k - W_q,h'^T W_k'|^2 and sum_h |W_o,h W_v - W_o,h'
    W_v'|^2; for keys C_j commutes with the rotation: one complex number for each rotary pair, and
    any matrix where dims are not rotated. With `ids`, |A| is the root mean square of A x over what
    the layers read in these texts; without, the inputs x are taken to be independent, and those of
    trained models are not.

    Args:
        checkpoint: a decoder whose attention has separate maps.
        groups: the new number of key/value heads: a divisor of the present one, or a multiple of it
            that divides the number of query heads.
        pooling: how fewer heads are computed, "mean" or "svd".
        ids: rows of token ids on which the inputs of each layer are measured, or None.

    Returns:
        The converted checkpoint, and its errors.

    Raises:
        ArgumentError: the number is not possible or not new, a norm makes "svd" impossible, or the
            family has no such heads.

    >>> import regard
    >>> tiny = regard.load("tiny")
    >>> after, step = to_groups(Checkpoint(tiny.decoder, tiny.config), 8)
    >>> after.config.num_key_value_heads, step.layers[0]
    (8, LayerErrors(keys=0.0, values=0.0))

    Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2.1; "svd": Eckart and Young 1936.
    """
    if pooling not in get_args(HeadPooling):
        raise ArgumentError(
            f"groups are pooled by {pooling!r}; it is mean or svd", argument="groups"
        )
    before = separate_attention(checkpoint.network.layers[0]).project.shape
    _check(before.H, before.G, groups)
    config = _regrouped(checkpoint.config, groups)
    weights, layer_errors = checkpoint.weights(), []
    factors = input_roots(checkpoint.network, ids if groups < before.G else None)
    for (prefix, block), root in zip(layers_of(checkpoint.network), factors, strict=True):
        project = separate_attention(block).project
        layer = AttentionMaps.of(block, root)
        if groups > before.G:
            after, errors = repeat_heads(layer, groups), LayerErrors(0.0, 0.0)
        elif pooling == "mean":
            after, errors = pool_by_mean(layer, groups)
        else:
            _check_plain(project.q, project.k)
            after, errors = pool_by_svd(layer, groups)
        weights |= _attention_parameters(prefix, block, after) | _pooled_norm(
            prefix, project.k, groups
        )
        layer_errors.append(errors)
    how = (
        Phrase("repeated") if groups > before.G else Phrase("pooled by {pooling}", pooling=pooling)
    )
    return rebuild(config, weights), ConversionStep(
        Phrase(
            "{G} key/value heads {how} to {groups}, for {H} query heads",
            G=before.G,
            how=how,
            groups=groups,
            H=before.H,
        ),
        tuple(layer_errors),
    )


def repeat_heads(layer: AttentionMaps, groups: int) -> AttentionMaps:
    """Repeat each key/value head, copies next to one another."""
    times = groups // len(layer.k)
    return replace(
        layer, k=layer.k.repeat_interleave(times, 0), v=layer.v.repeat_interleave(times, 0)
    )


def pool_by_mean(layer: AttentionMaps, groups: int) -> tuple[AttentionMaps, LayerErrors]:
    """Replace neighbouring key/value heads by the mean of their maps."""
    k, v = (torch.unflatten(x, 0, (groups, -1)).mean(1) for x in (layer.k, layer.v))
    after = replace(layer, k=k, v=v)
    back = repeat_heads(after, len(layer.k))
    return after, layer.errors(layer.k - back.k, layer.v - back.v)


def pool_by_svd(layer: AttentionMaps, groups: int) -> tuple[AttentionMaps, LayerErrors]:
    """Replace neighbouring key/value heads by their best map; queries and outputs get factors."""
    q, rest_q = layer.split(layer.q)
    k, rest_k = layer.split(layer.k)
    z, c = common_pairs(k, layer.pair_weights(), layer.on_inputs, groups)
    rest, C = common_rows(rest_k, layer.rest_gram(), layer.on_inputs, groups)
    v, V = common_rows(layer.v, layer.value_gram(), layer.on_inputs, groups)
    times, share = len(layer.k) // groups, layer.share
    copy = [x.repeat_interleave(times, 0) for x in (z, rest, v)]
    residual_k = layer.join(k - c[..., None] * copy[0], rest_k - C @ copy[1])
    own = [x.repeat_interleave(share, 0) for x in (c, C, V)]
    after = replace(
        layer,
        q=layer.join(own[0].conj()[..., None] * q, own[1].mT @ rest_q),
        k=layer.join(z, rest),
        v=v,
        o=layer.o @ own[2],
    )
    return after, layer.errors(residual_k, layer.v - V @ copy[2])


def common_pairs(
    k: Complex[Tensor, "G p m"],
    weight: Float[Tensor, "G p"],
    on_inputs: OnInputs,
    groups: int,
) -> tuple[Complex[Tensor, "g p m"], Complex[Tensor, "G p"]]:
    """Compute a complex row for each pair of each group, and a factor per head, with the least
    sum_j |w_j (k_j - c_j k)|^2: the first singular vector, scaled so that the c_j have mean square
    1.
    """
    heads = torch.unflatten(weight[..., None] * k, 0, (groups, -1)).movedim(1, 2)  # [g, p, n, m]
    u = torch.linalg.svd(on_inputs(heads), full_matrices=False).U[..., 0]  # [g, p, n]
    w = torch.unflatten(weight, 0, (groups, -1)).movedim(1, 2)
    c = torch.where(w > 0, u / torch.where(w > 0, w, 1), 0)
    size = c.abs().square().mean(-1).sqrt()
    turn = u.sum(-1)
    scale = size * torch.where(turn.abs() > 1e-6, turn / turn.abs().clamp(min=1e-6), 1)
    scale = torch.where(size > 0, scale, 1)
    row = (u.conj()[..., None] * heads).sum(-2) * scale[..., None]
    return row, (c / scale[..., None]).movedim(2, 1).flatten(0, 1)


def common_rows(
    x: Float[Tensor, "G d m"], gram: Float[Tensor, "G d d"], on_inputs: OnInputs, groups: int
) -> tuple[Float[Tensor, "g d m"], Float[Tensor, "G d d"]]:
    """Compute d rows for each group and a matrix per head with the least sum_j |S_j (x_j - C_j
    x)|^2, S_j^2 = gram_j.
    """
    root, inverse = matrix_sqrt(gram)
    times, d = len(x) // groups, x.shape[1]
    if not d:
        return x[:groups], gram
    heads = torch.unflatten(root @ x, 0, (groups, times)).flatten(1, 2)  # [g, n d, m]
    u = torch.linalg.svd(on_inputs(heads), full_matrices=False).U[..., :d]
    rows = u.mT @ heads
    lacking = d - rows.shape[1]  # with fewer columns than d, the other rows are 0
    rows = nn.functional.pad(rows, (0, 0, 0, lacking))
    u = nn.functional.pad(u, (0, lacking))
    return rows, inverse @ torch.unflatten(u, 1, (times, d)).flatten(0, 1)


def _check(H: int, before: int, after: int) -> None:
    allowed = [g for g in range(1, H + 1) if H % g == 0 and (before % g == 0 or g % before == 0)]
    if after == before:
        raise ArgumentError(
            f"the model has {before} key/value heads for {H} query heads already; possible numbers "
            f"are {', '.join(str(g) for g in allowed if g != before)}"
        )
    if after not in allowed:
        raise ArgumentError(
            f"{before} key/value heads cannot become {after} for {H} query heads; possible are "
            f"{', '.join(str(g) for g in allowed if g != before)}",
            argument="kv_heads",
        )


def best_pooling(checkpoint: Checkpoint) -> HeadPooling:
    """Return "svd" where factors of keys can be moved into the queries, else "mean"."""
    project = separate_attention(checkpoint.network.layers[0]).project
    return "svd" if _is_plain(project.q) and _is_plain(project.k) else "mean"


def _is_plain(heads: HeadProjection) -> bool:
    """Return whether no more than a rotation follows the map of the heads."""
    rotated = all(isinstance(step, Rotary) for step in heads.steps)
    return rotated and isinstance(heads.flat, nn.Identity)


def _check_plain(*parts: HeadProjection) -> None:
    """Check that only a rotation follows the maps of queries and keys."""
    if not all(_is_plain(heads) for heads in parts):
        raise ArgumentError(
            "a norm follows the maps of queries and keys, and a factor of a key cannot be "
            "moved through it into the queries; use pooling 'mean'"
        )


def _regrouped(config: Any, groups: int) -> object:
    """Return the config with another number of key/value heads."""
    if hasattr(config, "num_key_value_heads"):
        return replace(config, num_key_value_heads=groups)
    if getattr(config, "attention", None) in ("gqa", "mqa"):
        options = {**config.attention_options, "groups": groups}
        return replace(config, attention="gqa", attention_options=options)
    raise ArgumentError(
        f"the config {model_type_of(config)} has no number of key/value heads; heads can be "
        "converted from llama, mistral, qwen2, qwen3, olmo2, phi3, gemma, gpt_oss, and regard's "
        "gqa and mqa"
    )


def _attention_parameters(prefix: str, block: nn.Module, after: AttentionMaps) -> dict[str, Tensor]:
    """Return the parameters of a block's attention, with new maps."""
    attention = separate_attention(block)
    project = attention.project
    o = after.o.permute(1, 0, 2).flatten(1).to(attention.output.weight.dtype)
    parameters = {prefix + "attention.output.weight": o}
    for name, maps in (("q", after.q), ("k", after.k), ("v", after.v)):
        parameters |= head_parameters(f"{prefix}{PROJECT}{name}.", maps, getattr(project, name))
    return parameters


def _pooled_norm(prefix: str, heads: HeadProjection, groups: int) -> dict[str, Tensor]:
    """Return the weight of a norm over all key heads at once (OLMo 2), pooled like the heads."""
    if isinstance(heads.flat, nn.Identity):
        return {}
    own = heads.flat.weight
    assert isinstance(own, Tensor)
    weight = torch.unflatten(own.detach().double(), 0, (heads.heads, -1))
    if groups > heads.heads:
        after = weight.repeat_interleave(groups // heads.heads, 0)
    else:
        after = torch.unflatten(weight, 0, (groups, -1)).mean(1)
    return {f"{prefix}{PROJECT}k.flat.weight": after.flatten().to(own.dtype)}
