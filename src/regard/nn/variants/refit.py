"""A mechanism of the catalogue with other positions, or under a window: ingredients that its constructor does not vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from torch import nn

from regard.biases import ALiBi, Bias
from regard.errors import ArgumentError
from regard.masks import Mask, Window
from regard.nn.attention import Attention
from regard.nn.finish import Differential, Gated
from regard.nn.fused import Fused
from regard.nn.mixer import Mixer
from regard.nn.project import Heads, Separate
from regard.positions import Rotary

Scheme: TypeAlias = Literal["rope", "alibi", "none"]
"""Where the scores of a mechanism know positions from: turned queries and keys, a penalty on distance, or not at all."""


def positioned(mixer: Mixer, scheme: Scheme, *, base: float = 10000.0) -> Mixer:
    """A mechanism with other positions: its own rotary and ALiBi are taken off, and those of the scheme put on.

    "rope": q, k turn by their positions, behind all other steps; "alibi": s_ij - m_h (i - j); "none": neither

    Args:
        mixer: softmax attention whose queries and keys are plain heads; anything else is left as it is, if it has no
            positions and is to have none. What it is made of goes over to the result.
        scheme: which; a rotary that is there already stays as it is under "rope".
        base: of a new rotary.

    Raises:
        ArgumentError: the scheme is unknown, or positions are part of what the mechanism is.

    >>> from regard.nn.variants import gqa
    >>> layer = positioned(gqa(32, 4, groups=2), "alibi")
    >>> layer.bias, len(layer.project.q.steps)
    (alibi(4), 0)

    Source: rope: Su et al. 2021 (arXiv 2104.09864); alibi: Press et al. 2021 (arXiv 2108.12409); none: Haviv et al. 2022
    (arXiv 2203.16634).
    """
    if scheme not in get_args(Scheme):
        raise ArgumentError(f"scheme is {scheme!r}; it is one of {', '.join(get_args(Scheme))}")
    if reason := _fixed(mixer, scheme):
        raise ArgumentError(f"{reason}; leave its positions as the catalogue has them")
    heads = _heads(mixer)
    if heads is None:
        return mixer
    assert isinstance(mixer, Attention)
    H, _, D, _, _ = mixer.project.shape
    turned = [step for part in heads for step in part.steps if isinstance(step, Rotary)]
    if scheme == "rope" and not turned:
        rotary = Rotary(D, base)
        for part in heads:
            part.steps.append(rotary)
    elif scheme != "rope":
        for part in heads:
            part.steps = nn.ModuleList(step for step in part.steps if not isinstance(step, Rotary))
    return _remade(mixer, mixer.mask, ALiBi(H) if scheme == "alibi" else None)


def schemes(mixer: Mixer) -> tuple[Scheme, ...]:
    """The schemes that `positioned` can give a mechanism.

    >>> from regard.nn.variants import delta_net, gqa, moba
    >>> schemes(gqa(32, 4, groups=2)), schemes(delta_net(32, 4)), schemes(moba(32, 4, groups=2))
    (('rope', 'alibi', 'none'), ('none',), ())
    """
    return tuple(scheme for scheme in get_args(Scheme) if _fixed(mixer, scheme) is None)


def windowed(mixer: Mixer, size: int) -> Mixer:
    """A mechanism under a window, too: a query sees the last W keys of those that it saw before, its own included.

    Args:
        mixer: softmax attention under a mask. What it is made of goes over to the result.
        size: W.

    Raises:
        ArgumentError: the mechanism is no softmax attention under a mask, or size is less than 1.

    >>> from regard.nn.variants import qk_norm
    >>> print(windowed(qk_norm(32, 4, groups=2), 3).mask)
    causal & window(3)

    Source: Beltagy et al. 2020 (arXiv 2004.05150), section 3.1.
    """
    window = Window(size)
    if type(mixer) is not Attention:  # others see what their own rule says
        raise ArgumentError(f"{type(mixer).__name__} takes no window beside what it keeps itself")
    return _remade(mixer, window if mixer.mask is None else mixer.mask & window, mixer.bias)


def _fixed(mixer: Mixer, scheme: Scheme) -> str | None:
    """Why a mechanism cannot have these positions, or None."""
    name = type(mixer).__name__
    if _heads(mixer) is None:
        if any(isinstance(module, Rotary) for module in mixer.modules()):
            return f"rotary positions are part of this {name}"
        return None if scheme == "none" else f"queries and keys of this {name} are no plain heads"
    assert isinstance(mixer, Attention)
    if mixer.bias is not None and not isinstance(mixer.bias, ALiBi):
        return f"the bias {mixer.bias} tells this {name} its positions"
    if scheme == "alibi" and isinstance(mixer.project, Differential):
        return (
            "the two patterns of differential attention need one slope, and ALiBi has one for each"
        )
    return None


def _heads(mixer: Mixer) -> Sequence[Heads | Fused] | None:
    """What makes queries and keys, with their steps; None where they are no plain heads of a softmax attention."""
    if type(mixer) is not Attention:
        return None
    project = mixer.project.project if isinstance(mixer.project, Gated) else mixer.project
    if isinstance(project, Separate) and project.late is None:
        return project.q, project.k
    return (project,) if isinstance(project, Fused) else None


def _remade(attention: Attention, mask: Mask | None, bias: Bias | None) -> Attention:
    """The parts of an attention under another mask and bias."""
    return Attention(
        attention.project, attention.output, mask=mask, bias=bias, scale=attention.scale,
        softcap=attention.softcap, sink=attention.sink, dropout=attention.dropout,
    )  # fmt: skip
