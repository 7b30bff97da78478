"""A mechanism of the catalogue as one layer of a decoder: which can be one, and with which positions and window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from torch import nn

from regard.errors import ArgumentError
from regard.nn.attention import Attention
from regard.nn.mixer import Mixer
from regard.nn.variants import VARIANTS, Variant
from regard.nn.variants.options import checked, names, near
from regard.nn.variants.refit import Scheme, positioned, schemes, windowed
from regard.nn.variants.registry import find

Position: TypeAlias = Literal["catalogue", "rope", "alibi", "learned", "sinusoidal", "none"]
"""Where positions come from: as the mechanism has them, or in the heads, the scores, the embedding, or nowhere."""

EMBEDDED = ("learned", "sinusoidal")
"""Positions that are added to the embedding."""
CAUSAL = {"is_causal": True, "bidirectional": False}
"""Options that say whether a mechanism looks ahead, and what they are in a decoder."""
NUMBERED = ("layer", "depth")
"""Options that say which layer this is, from 0."""


def decoders() -> tuple[str, ...]:
    """The mechanisms of the catalogue that can be a decoder's layers.

    >>> "retention" in decoders(), "bahdanau" in decoders(), "prefix_lm" in decoders()
    (True, False, False)
    """
    return tuple(name for name, entry in VARIANTS.items() if _unfit(entry) is None)


def entry_of(name: str) -> Variant:
    """A mechanism for a decoder, by name.

    Raises:
        ArgumentError: no mechanism has this name, or it cannot be a decoder's layer.

    >>> entry_of("gqa").family
    'softmax'
    """
    entry = find(name)
    if reason := _unfit(entry):
        raise ArgumentError(f"{name} {reason}; a decoder's layers can be {', '.join(decoders())}")
    return entry


def check_position(position: str) -> None:
    """Refuse a word that is no `Position`.

    Raises:
        ArgumentError: with the near one.

    >>> check_position("rope")
    """
    known = get_args(Position)
    if position not in known:
        raise ArgumentError(
            f"position is {position!r}; it is one of {', '.join(known)}{near(position, known)}"
        )


def layer_of(
    name: str,
    dim: int,
    heads: int,
    options: Mapping[str, Any],
    *,
    layer: int = 0,
    position: str = "catalogue",
    window: int | None = None,
) -> Mixer:
    """The attention of one layer of a decoder: causal, x [B,T,M] -> [B,T,M].

    Args:
        name: of a mechanism in the catalogue.
        dim, heads: the model dim M and the query heads H.
        options: its own, as plain values; whether it looks ahead and which layer it is are given here.
        layer: which layer this is, from 0, for mechanisms that differ from layer to layer.
        position: "learned" and "sinusoidal" are the embedding's matter: here they are "none".
        window: None, or W: a query sees at most the last W keys, for mechanisms without a window of their own.

    Raises:
        ArgumentError: the mechanism cannot be one, an option is not as its signature says, or it does not take these
            positions or a window.

    >>> print(layer_of("gqa", 32, 4, {"groups": 2}, window=3).mask)
    causal & window(3)
    """
    entry = entry_of(name)
    check_position(position)
    own = names(entry)
    ours = {**CAUSAL, **dict.fromkeys(NUMBERED, layer)}
    given = {key: value for key, value in ours.items() if key in own}
    for key, value in given.items():
        if options.get(key, value) != value:
            raise ArgumentError(
                f"{key} of {name} is {options[key]!r}; a decoder gives it to each layer: leave it out"
            )
    mixer = entry.build(dim, heads, **checked(entry, {**options, **given}))
    assert isinstance(mixer, Mixer)
    _check_width(mixer, name, dim)
    if window is not None:
        mixer = _windowed(mixer, entry, window)
    return _positioned(mixer, name, position)


def _windowed(mixer: Mixer, entry: Variant, window: int) -> Mixer:
    """The mechanism under a window; a refusal says what it takes in its place."""
    own = names(entry)
    if "window" in own:
        raise ArgumentError(
            f"{entry.name} has a window of its own: give it the option window={window}"
        )
    try:
        return windowed(mixer, window)
    except ArgumentError as error:
        raise ArgumentError(
            f"{entry.name} does not take window {window}: {error}; its options are {', '.join(own) or 'none'}"
        ) from error


def _positioned(mixer: Mixer, name: str, position: str) -> Mixer:
    """The mechanism with other positions; a refusal says which it takes."""
    if position == "catalogue":
        return mixer
    scheme: Scheme = "none" if position in EMBEDDED else cast("Scheme", position)
    possible = schemes(mixer)
    try:
        return positioned(mixer, scheme)
    except ArgumentError as error:
        takes = [p for p in get_args(Position) if ("none" if p in EMBEDDED else p) in possible]
        raise ArgumentError(
            f"{name} does not take position {position!r}: {str(error).partition(';')[0]}; it takes "
            f"{', '.join(['catalogue', *takes])}"
        ) from error


def _unfit(entry: Variant) -> str | None:
    """Why a mechanism cannot be a decoder's layer, or None."""
    if entry.family in ("cross", "additive"):
        return "looks at a second sequence"
    if not entry.causal and not CAUSAL.keys() & set(names(entry)):
        return "sees what comes behind a token"
    return None


def _check_width(mixer: Mixer, name: str, dim: int) -> None:
    """A mechanism without an output map gives its heads as they are: they must be as wide as the model."""
    if isinstance(mixer, Attention) and isinstance(mixer.output, nn.Identity):
        H, _, _, E, _ = mixer.project.shape
        width = H * E
        if width != dim:
            raise ArgumentError(
                f"{name} gives {width} numbers, and the model has dim {dim}; leave head_dim out"
            )
