"""Rotary modules for the settings of a config.json, and projections of heads that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from regard.configs.rope import ORIGINAL, RopeSettings, check_rope
from regard.errors import ArgumentError
from regard.nn import HeadProjection, SeparateQKV
from regard.nn.dynamic_rotary import PerRowRotary, RecomputedQKV
from regard.positions import DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, Scaling, YaRN
from regard.units import plural


def rotary_module(settings: RopeSettings) -> Rotary:
    """Build the `Rotary` of a config, with the formulas of transformers' `modeling_rope_utils`.

    int(head_dim * partial) dims are rotated, and the exponents divide by that number; for
    "proportional" they divide by the head dim. "dynamic" and "longrope" depend on the length of the
    text, so that a cache of rotated keys needs `rotary_heads`.

    "dynamic" counts from max_positions; "longrope" and "yarn" from the length before the extension
    (max_positions if it is not given). The factor of LongRoPE, if it is absent, is max_positions
    divided by that length. `mscale` and `mscale_all_dim` are read as in DeepSeek's code, 1 and 0
    when absent, whereas transformers ignores one without the other. The effect of `mscale_all_dim`
    on the softmax is in `Rotary.softmax_factor`, for families that apply it.

    Args:
        settings: the `rope` of a config.

    Raises:
        ArgumentError: a number is out of range, the type or a key of the scaling is wrong, or the
            list of a LongRoPE has not one number per pair.

    >>> rotary_module(RopeSettings(64, 150000.0, {"rope_type": "linear", "factor": 8.0}, 4096))
    Rotary(64, base=150000.0, scaling=LinearScaling(factor=8.0), layout='half')

    Source: see `regard.positions` for each scaling.
    """
    checked, D, partial = check_rope(settings), settings.head_dim, settings.partial
    proportional = checked["rope_type"] == "proportional"
    rotated = 2 * int(partial * D // 2) if proportional else int(D * partial)
    scaling = rope_scaling(checked, rotated // 2, settings.max_positions, settings.original)
    return Rotary(
        D,
        settings.theta,
        scaling=scaling,
        rotary_dim=rotated,
        proportional=proportional,
        layout=settings.layout,
        length="current" if scaling is not None and scaling.needs_length else None,
    )


def rotary_heads(
    dim: int,
    H: int,
    G: int,
    head_dim: int,
    rotary: Rotary,
    *,
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    q_flat: nn.Module | None = None,
    k_flat: nn.Module | None = None,
    bias: bool = False,
) -> SeparateQKV:
    """Build the projection of queries, keys and values with rotary positions on queries and
    keys.

    Where the frequencies depend on the length, cached keys that were rotated with other frequencies
    raise when they are read, and the prefix has to be computed again
    (`regard.nn.PrefixRecomputer`). So decoding with a cache equals one pass. Parameters have the
    same names in both cases.

    Args:
        dim, H, G, head_dim: the model dim, query heads, key/value heads, and D.
        rotary: from `rotary_module`.
        q_steps, k_steps: steps on heads before the rotation, such as a norm per head.
        q_flat, k_flat: a norm over all heads together (OLMo 2); None is no norm.
        bias: whether the three linear maps have a bias.

    Raises:
        ArgumentError: rotary is for another head dim; or as in the projection's constructor.

    >>> plain = RopeSettings(8, 1e4, None, 64)
    >>> rotary_heads(32, 4, 2, 8, rotary_module(plain)).shape.memory
    (16, 16)
    >>> dynamic = plain._replace(scaling={"rope_type": "dynamic", "factor": 2.0})
    >>> rotary_heads(32, 4, 2, 8, rotary_module(dynamic)).shape.memory
    (16, 16, 1)
    """
    if rotary.dim != head_dim:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and head_dim is {head_dim}")
    last = () if rotary.follows_length else (rotary,)
    q = HeadProjection(dim, H, head_dim, *q_steps, *last, flat=q_flat, bias=bias)
    k = HeadProjection(dim, G, head_dim, *k_steps, *last, flat=k_flat, bias=bias)
    v = HeadProjection(dim, G, head_dim, bias=bias)
    return (
        RecomputedQKV(q, k, v, PerRowRotary(rotary))
        if rotary.follows_length
        else SeparateQKV(q, k, v)
    )


def rope_scaling(
    settings: Mapping[str, Any], pairs: int, max_positions: int, original: int | None
) -> Scaling | None:
    """Return the scaling of a checked rope_scaling; None for default, or proportional without
    factor.

    Args:
        settings: the rope_scaling, from `normalize_scaling`.
        pairs: the number of rotary pairs, which the lists of LongRoPE must match.
        max_positions: max_position_embeddings.
        original: original_max_position_embeddings at the top level of the config, where Phi-3 has
            it.

    Raises:
        ArgumentError: a number is out of range, the trained length is missing (llama3) or given
            twice with different values, or a list of factors has another length.

    >>> rope_scaling({"rope_type": "dynamic", "factor": 2.0}, 32, 4096, None)
    DynamicNTK(factor=2.0, original_length=4096)
    """
    kind = settings["rope_type"]
    if kind == "default":
        return None
    rest = {k: v for k, v in settings.items() if k not in ("rope_type", "finetuned", ORIGINAL)}
    if kind in ("linear", "proportional"):
        return LinearScaling(**rest) if rest else None
    if kind == "dynamic":
        return DynamicNTK(original_length=max_positions, **rest)
    length = _original_length(settings, kind, max_positions, original)
    if kind == "llama3":
        return Llama3(original_length=length, **rest)
    if rest.get("factor") is None:
        rest["factor"] = max_positions / length
    if kind == "yarn":
        return YaRN(original_length=length, **rest)
    for name in ("short_factor", "long_factor"):
        if len(rest[name]) != pairs:
            raise ArgumentError(
                f"rope_scaling.{name} has {plural(len(rest[name]), 'number')} and a head has "
                f"{plural(pairs, 'rotary pair')}; give one number per pair"
            )
    return LongRoPE(original_length=length, **rest)


def _original_length(
    settings: Mapping[str, Any], kind: str, max_positions: int, original: int | None
) -> int:
    """Return the length with which the frequencies were trained."""
    inner = settings.get(ORIGINAL)
    if original is not None and inner is not None and original != inner:
        raise ArgumentError(
            f"{ORIGINAL} is {original} at the top level and {inner} in rope_scaling; remove the "
            "wrong one"
        )
    length = inner if original is None else original
    if length is not None:
        return length
    if kind == "llama3":
        raise ArgumentError(
            f"rope_scaling of rope_type 'llama3' lacks {ORIGINAL}, the length before the extension"
        )
    return max_positions
