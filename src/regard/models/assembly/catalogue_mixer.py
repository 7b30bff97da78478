"""A mechanism of the catalogue `regard.nn.variants` as the attention of a decoder layer, with other
positions or a window where it supports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, cast, get_args

from torch import nn

from regard.biases import ALiBi, Bias
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.masks import Mask, Window
from regard.nn.attention.attention import Attention
from regard.nn.mixer import Mixer
from regard.nn.projections.fused import FusedQKV
from regard.nn.projections.heads import HeadProjection, Projection, SeparateQKV
from regard.nn.projections.steps import (
    DifferentialProjection,
    FinishedProjection,
    GatedProjection,
    HeadFinish,
    PairDifference,
)
from regard.nn.variants import VARIANTS, Variant
from regard.nn.variants.registry import check_options, find_variant, option_names
from regard.positions import Rotary

PositionScheme: TypeAlias = Literal["rope", "alibi", "none"]
"""How scores depend on positions: "rope" rotates queries and keys, "alibi" subtracts a penalty that
grows with the distance, and "none" uses no positions.
"""


def with_positions(mixer: Mixer, scheme: PositionScheme, *, base: float = 10000.0) -> Mixer:
    """Return a mechanism with other positions: "rope" rotates q and k after all other steps,
    "alibi" subtracts m_h (i - j), "none" does neither. Source: arXiv 2104.09864; arXiv 2108.12409;
    arXiv 2203.16634.
    """
    if scheme not in get_args(PositionScheme):
        raise ArgumentError(
            f"scheme is {scheme!r}; it is one of {', '.join(get_args(PositionScheme))}"
        )
    if reason := _scheme_refusal(mixer, scheme):
        raise ArgumentError(f"{reason}; leave its positions unchanged")
    heads = _plain_projections(mixer)
    if heads is None:
        return mixer
    assert isinstance(mixer, Attention)
    H, _, D, _, _ = mixer.project.shape
    rotary_steps = [step for part in heads for step in part.steps if isinstance(step, Rotary)]
    if scheme == "rope" and not rotary_steps:
        rotary = Rotary(D, base)
        for part in heads:
            part.steps.append(rotary)
    elif scheme != "rope":
        for part in heads:
            part.steps = nn.ModuleList(step for step in part.steps if not isinstance(step, Rotary))
    return _with_mask_and_bias(mixer, mixer.mask, ALiBi(H) if scheme == "alibi" else None)


def supported_schemes(mixer: Mixer) -> tuple[PositionScheme, ...]:
    """Return the position schemes that `with_positions` can give a mechanism."""
    return tuple(
        scheme for scheme in get_args(PositionScheme) if _scheme_refusal(mixer, scheme) is None
    )


def with_window(mixer: Mixer, size: int) -> Mixer:
    """Return a mechanism with an additional window: a query sees at most the last W keys. Source:
    Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    window = Window(size)
    if type(mixer) is not Attention:  # subclasses define their own rule
        raise ArgumentError(f"{type(mixer).__name__} does not support an additional window")
    return _with_mask_and_bias(
        mixer, window if mixer.mask is None else mixer.mask & window, mixer.bias
    )


def _scheme_refusal(mixer: Mixer, scheme: PositionScheme) -> str | None:
    """Return the reason why a mechanism cannot have these positions, or None."""
    name = type(mixer).__name__
    if _plain_projections(mixer) is None:
        if any(isinstance(module, Rotary) for module in mixer.modules()):
            return f"rotary positions are part of this {name}"
        return None if scheme == "none" else f"queries and keys of this {name} are not plain heads"
    assert isinstance(mixer, Attention)
    if mixer.bias is not None and not isinstance(mixer.bias, ALiBi):
        return f"this {name} gets its positions from the bias {mixer.bias}"
    if scheme == "alibi" and _subtracts_patterns(mixer.project):
        return (
            "the two patterns of differential attention need one slope, and ALiBi has one for each"
        )
    return None


def _subtracts_patterns(project: Projection) -> bool:
    """Return whether each head is the difference of two attention patterns."""
    if isinstance(project, DifferentialProjection):
        return True
    return isinstance(project, FinishedProjection) and any(
        isinstance(step, PairDifference) for step in project.finishes
    )


def _plain_projections(mixer: Mixer) -> Sequence[HeadProjection | FusedQKV] | None:
    """Return the projections of queries and keys; None if they are not plain softmax heads."""
    if type(mixer) is not Attention:
        return None
    project = _without_finishes(mixer.project)
    if isinstance(project, SeparateQKV) and project.key_transform is None:
        return project.q, project.k
    return (project,) if isinstance(project, FusedQKV) else None


def _without_finishes(project: Projection) -> Projection:
    """Return the projection inside gates and other steps that are not bound to positions."""
    if isinstance(project, GatedProjection):
        return project.project
    if isinstance(project, FinishedProjection) and not any(
        isinstance(step, HeadFinish) and step.is_positional for step in project.finishes
    ):
        return project.project
    return project


def _with_mask_and_bias(attention: Attention, mask: Mask | None, bias: Bias | None) -> Attention:
    """Return attention with the same parts and another mask and bias."""
    return Attention(
        attention.project,
        attention.output,
        mask=mask,
        bias=bias,
        scale=attention.scale,
        softcap=attention.softcap,
        sink=attention.sink,
        dropout=attention.dropout,
    )


Position: TypeAlias = Literal["catalogue", "rope", "alibi", "learned", "sinusoidal", "none"]
"""The source of positions in a decoder: "catalogue" leaves the mechanism as it is, "rope" and
"alibi" change it, "learned" and "sinusoidal" add vectors to the embedding.
"""

EMBEDDING_POSITIONS = ("learned", "sinusoidal")
"""Positions that are added to the embedding."""
CAUSAL_OPTIONS = {"is_causal": True, "bidirectional": False}
"""Options that make a mechanism causal -> their values in a decoder."""
LAYER_INDEX_OPTIONS = ("layer", "depth")
"""Options for the index of the layer, from 0."""


def decoder_variants() -> tuple[str, ...]:
    """Return the mechanisms of the catalogue that can be the layers of a decoder."""
    return tuple(
        sorted(name for name, entry in VARIANTS.items() if _decoder_refusal(entry) is None)
    )


def find_decoder_variant(name: str) -> Variant:
    """Return the mechanism for a decoder with this name."""
    entry = find_variant(name)
    if reason := _decoder_refusal(entry):
        raise ArgumentError(
            f"{name} {reason}, so it cannot be a layer of a decoder; most mechanisms can, such as "
            "gqa, mla, local_global and gated_delta_net"
        )
    return entry


def check_position(position: str) -> None:
    """Check that a name is a `Position`."""
    known = get_args(Position)
    if position not in known:
        raise ArgumentError(
            f"position is {position!r}; it is one of {', '.join(known)}{suggest(position, known)}"
        )


def build_mixer(
    name: str,
    dim: int,
    heads: int,
    options: Mapping[str, object],
    *,
    layer: int = 0,
    position: str = "catalogue",
    window: int | None = None,
) -> Mixer:
    """Build the attention of one layer of a decoder: causal, x [B, T, M] -> [B, T, M]."""
    entry = find_decoder_variant(name)
    check_position(position)
    names = option_names(entry)
    decoder_values = {**CAUSAL_OPTIONS, **dict.fromkeys(LAYER_INDEX_OPTIONS, layer)}
    decoder_options = {key: value for key, value in decoder_values.items() if key in names}
    for key, value in decoder_options.items():
        if options.get(key, value) != value:
            raise ArgumentError(
                f"{key} of {name} is {options[key]!r}; the decoder sets it for each layer: leave "
                "it out"
            )
    mixer = entry.build(dim, heads, **check_options(entry, {**options, **decoder_options}))
    assert isinstance(mixer, Mixer)
    _check_width(mixer, name, dim)
    if window is not None:
        mixer = _with_window_or_advice(mixer, entry, window)
    return _with_position(mixer, name, position)


def _with_window_or_advice(mixer: Mixer, entry: Variant, window: int) -> Mixer:
    """Return the mechanism with a window; an error lists the options that the mechanism has."""
    names = option_names(entry)
    if "window" in names:
        raise ArgumentError(
            f"{entry.name} has a window of its own: give it the option window={window}"
        )
    try:
        return with_window(mixer, window)
    except ArgumentError as error:
        raise ArgumentError(
            f"{entry.name} does not support window {window}: {error}; its options are "
            f"{', '.join(names) or 'none'}"
        ) from error


def _with_position(mixer: Mixer, name: str, position: str) -> Mixer:
    """Return the mechanism with other positions; an error lists the positions that it supports."""
    if position == "catalogue":
        return mixer
    scheme: PositionScheme = (
        "none" if position in EMBEDDING_POSITIONS else cast("PositionScheme", position)
    )
    possible = supported_schemes(mixer)
    try:
        return with_positions(mixer, scheme)
    except ArgumentError as error:
        supported = [
            p for p in get_args(Position) if ("none" if p in EMBEDDING_POSITIONS else p) in possible
        ]
        raise ArgumentError(
            f"{name} does not support position {position!r}: {str(error).partition(';')[0]}; it "
            f"supports {', '.join(['catalogue', *supported])}"
        ) from error


def _decoder_refusal(entry: Variant) -> str | None:
    """Return the reason why a mechanism cannot be the layer of a decoder, or None."""
    if entry.family in ("cross", "additive"):
        return "attends to a second sequence"
    if not entry.causal and not CAUSAL_OPTIONS.keys() & set(option_names(entry)):
        return "attends to later tokens"
    return None


def _check_width(mixer: Mixer, name: str, dim: int) -> None:
    """Check that a mechanism without an output map returns vectors of the model dim."""
    if isinstance(mixer, Attention) and isinstance(mixer.output, nn.Identity):
        H, _, _, E, _ = mixer.project.shape
        width = H * E
        if width != dim:
            raise ArgumentError(
                f"{name} returns vectors of {width}, and the model has dim {dim}; leave out "
                "head_dim"
            )
