"""`describe()` of modules: their sizes, handed to the formulas of `regard.cost`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from regard.cost import Description, Figure, attention_flops
from regard.errors import ArgumentError
from regard.masks import Full, Mask, reach
from regard.nn.project import Forms, facing
from regard.span import Span

if TYPE_CHECKING:
    from regard.nn.attention import Attention
    from regard.nn.longformer import Longformer
    from regard.nn.project import ProjectionShape


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
    project = facing(attention.project, 1, context)
    shape, recall = project.shape, project.recall_flops if isinstance(project, Forms) else 0
    return _softmax(attention, attention.mask, shape, shape.memory, context, recall=recall)


def longformer(layer: Longformer, context: int) -> Description:
    """Two projections remembered; a decoded token that is not global uses one."""
    shape = layer.local.shape
    return _softmax(layer, layer.mask, shape, (*shape.memory, *shape.memory), context, bound=False)


def _softmax(
    module: nn.Module,
    mask: Mask | None,
    shape: ProjectionShape,
    memory: tuple[int, ...],
    context: int,
    *,
    bound: bool = True,
    recall: int = 0,
) -> Description:
    check_context(context)
    maps, mask = matrices(module), mask if mask is not None else Full()
    seen = int(mask.visible(Span(context - 1, 1), Span(0, context)).max())
    most = reach(mask).tokens if bound else None
    kept = context if most is None else min(context, most)
    # the matrices have recalled one token already
    recalled, rest = recall * (kept - 1), f" + {recall} x {kept - 1} (recall)" if recall else ""
    flops = 2 * maps + recalled + attention_flops(shape.H * seen, shape.D, shape.E)
    return Description(
        type(module).__name__, context, parameters(module),
        Figure(sum(memory), " + ".join(str(n) for n in memory)),
        Figure(kept, "S" if most is None else f"min(S, {most})"),
        Figure(0, ""),
        Figure(flops, f"2 x {maps} (matrices) + 2 H n (D + E) = 2 x {shape.H} x {seen} x ({shape.D} + {shape.E}){rest}"),
    )  # fmt: skip
