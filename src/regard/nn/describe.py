"""`describe()` of modules: their sizes, handed to the formulas of `regard.cost`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from regard.cost import Description, Figure, attention_flops
from regard.errors import ArgumentError
from regard.masks import Full, reach
from regard.span import Span

if TYPE_CHECKING:
    from regard.nn.attention import Attention


def check_context(context: int) -> None:
    """A context holds at least the token that is decoded."""
    if context < 1:
        raise ArgumentError(f"context is {context}; it must be at least 1")


def parameters(module: nn.Module) -> Figure:
    """How many numbers training changes."""
    return Figure(sum(p.numel() for p in module.parameters()), "")


def matrices(module: nn.Module) -> int:
    """How many numbers of linear maps one token meets once each."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def softmax(attention: Attention, context: int) -> Description:
    """Softmax attention: what the projection remembers, for the tokens that the cache keeps."""
    check_context(context)
    shape, maps = attention.project.shape, matrices(attention)
    mask = attention.mask if attention.mask is not None else Full()
    seen = int(mask.visible(Span(context - 1, 1), Span(0, context)).max())
    flops = 2 * maps + attention_flops(shape.H * seen, shape.D, shape.E)
    most = reach(attention.mask).tokens
    return Description(
        type(attention).__name__, context, parameters(attention),
        Figure(sum(shape.memory), " + ".join(str(n) for n in shape.memory)),
        Figure(context, "S") if most is None else Figure(min(context, most), f"min(S, {most})"),
        Figure(0, ""),
        Figure(flops, f"2 x {maps} + 2 H n (D + E) = ... + 2 x {shape.H} x {seen} x ({shape.D} + {shape.E})"),
    )  # fmt: skip
