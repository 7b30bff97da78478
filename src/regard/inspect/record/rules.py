"""The masks and biases of a recording: copies that stay as they were, and plain data for files.

Nothing in a file is executed: a rule is the name of a class, its numbers, and tensors beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import Bias
from regard.errors import ArgumentError
from regard.inspect.record.place import Step
from regard.masks import Mask
from regard.ops.softmax.call import Call
from regard.span import as_tensor

_DEEPEST = 50
_KINDS = {
    masks.All: "all",
    masks.Any: "any",
    masks.Heads: "heads",
    masks.Selected: "selected",
    masks.Blocks: "blocks",
}


def copied(rule: Any) -> Any:
    """A mask or bias over copies of its tensors, on the CPU: what the caller does with its own
    changes no recording.
    """
    if isinstance(rule, Bias):
        own = rule.tensors()
        return rule.with_tensors([x.detach().to("cpu", copy=True) for x in own]) if own else rule
    if isinstance(rule, masks.Dense):
        return masks.Dense(rule.table.detach().to("cpu", copy=True))
    if isinstance(rule, masks.Blocks):
        return masks.Blocks(rule.table.detach().to("cpu", copy=True), rule.size)
    if isinstance(rule, masks.Selected):
        first = None if rule.first is None else rule.first.to("cpu", copy=True)
        return masks.Selected(rule.table.detach().to("cpu", copy=True), rule.size, first)
    if isinstance(rule, (masks.All, masks.Any, masks.Heads)):
        return type(rule)(tuple(copied(x) for x in rule.masks))
    return masks.Not(copied(rule.mask)) if isinstance(rule, masks.Not) else rule


def speaks_of_slots(rule: Mask | Bias | None, *others: Mask | Bias | None) -> bool:
    """Whether a mask or bias has a number for each slot of a call, whatever its position."""
    if others:
        return any(speaks_of_slots(x) for x in (rule, *others))
    inside = getattr(rule, "masks", None) or getattr(rule, "terms", ())
    several = inside if isinstance(inside, tuple) else (getattr(rule, "mask", None),)
    known = isinstance(rule, masks.Dense | biases.Dense)
    return known or any(speaks_of_slots(x) for x in several if x is not None)


def written_out(
    call: Call, mask: Mask, bias: Bias | None, slots: Tensor
) -> tuple[Mask, Bias | None]:
    """Mask and bias written out, for slots [b or 1,1,1,n] of the call."""
    where = as_tensor(call.q_positions).cpu(), as_tensor(call.k_positions).cpu()

    def taken(x: Tensor) -> Tensor:
        rows = max(x.shape[0], slots.shape[0])
        return x.expand(rows, -1, -1, -1).gather(3, slots.expand(rows, *x.shape[1:3], -1))

    made = None if bias is None else biases.Dense(taken(bias.block(*where, dtype=torch.float64)))
    return masks.Dense(taken(mask.block(*where))), made


Keep = Callable[[Tensor], str]
"""Keeps a tensor, and says under which name."""


def mask_data(mask: Mask, step: Step, keep: Keep) -> dict[str, Any]:
    """A mask as data: its text where `masks.parse` reads that back; tensors under names; any other
    one written out.
    """
    try:
        if masks.parse(str(mask)) == mask:
            return {"text": str(mask)}
    except ArgumentError:
        pass
    if isinstance(mask, (masks.All, masks.Any, masks.Heads)):
        return {_KINDS[type(mask)]: [mask_data(x, step, keep) for x in mask.masks]}
    if isinstance(mask, masks.Not):
        return {"not": mask_data(mask.mask, step, keep)}
    if isinstance(mask, (masks.Selected, masks.Blocks)):
        made = {_KINDS[type(mask)]: keep(mask.table), "size": mask.size}
        first = getattr(mask, "first", None)
        return made if first is None else {**made, "first": keep(first)}
    if isinstance(mask, masks.Dense):
        return {"dense": keep(mask.table)}
    table = mask.block(step.q_positions, step.k_positions)
    return {"dense": keep(table.contiguous()), "was": str(mask)}


def mask_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Mask:
    """The mask that `mask_data` told of.

    Raises:
        ArgumentError, KeyError, TypeError: the data tells of none.

    >>> str(mask_from({"all": [{"text": "causal"}, {"not": {"text": "window(3)"}}]}, {}))
    'causal & ~window(3)'
    """
    if depth > _DEEPEST:
        raise ArgumentError(f"a mask is nested deeper than {_DEEPEST}")
    for name, kind in (("all", masks.All), ("any", masks.Any), ("heads", masks.Heads)):
        if name in data:
            return kind(tuple(mask_from(x, tensors, depth + 1) for x in data[name]))
    if "text" in data:
        return masks.parse(data["text"])
    if "not" in data:
        return masks.Not(mask_from(data["not"], tensors, depth + 1))
    if "selected" in data:
        first = None if "first" not in data else tensors[data["first"]]
        return masks.Selected(tensors[data["selected"]], data["size"], first)
    if "blocks" in data:
        return masks.Blocks(tensors[data["blocks"]], data["size"])
    return masks.Dense(tensors[data["dense"]])


def bias_data(bias: Bias | None, step: Step, keep: Keep) -> dict[str, Any] | None:
    """A bias as data; a function is written out."""
    if bias is None:
        return None
    if isinstance(bias, biases.Sum):
        return {"sum": [bias_data(term, step, keep) for term in bias.terms]}
    if isinstance(bias, biases.ALiBi):
        slopes = bias.slopes_on(torch.device("cpu"), torch.float64)
        return {"alibi": keep(slopes.detach()), "symmetric": bias.symmetric}
    if isinstance(bias, biases.T5Relative):
        return {
            "t5": keep(bias.table),
            "bidirectional": bias.bidirectional,
            "max_distance": bias.max_distance,
        }
    if isinstance(bias, biases.Dense):
        return {"dense": keep(bias.tensor)}
    table = bias.block(step.q_positions, step.k_positions, dtype=torch.float64)
    return {"dense": keep(table.contiguous()), "was": str(bias)}


def bias_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Bias | None:
    """The bias that `bias_data` told of.

    Raises:
        ArgumentError, KeyError, TypeError: the data tells of none.

    >>> bias_from({"alibi": "a", "symmetric": False}, {"a": torch.tensor([0.5, 0.25])})
    alibi(2 slopes)
    """
    if data is None:
        return None
    if depth > _DEEPEST:
        raise ArgumentError(f"a bias is nested deeper than {_DEEPEST}")
    if "sum" in data:
        terms = [bias_from(x, tensors, depth + 1) for x in data["sum"]]
        found = [term for term in terms if term is not None]
        if len(found) != len(terms) or not found:
            raise ArgumentError("a sum of biases has a term that is none")
        return biases.Sum(tuple(found))
    if "alibi" in data:
        return biases.ALiBi(slopes=tensors[data["alibi"]], symmetric=bool(data["symmetric"]))
    if "t5" in data:
        return biases.T5Relative(
            tensors[data["t5"]], bool(data["bidirectional"]), int(data["max_distance"])
        )
    return biases.Dense(tensors[data["dense"]])
