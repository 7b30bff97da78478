"""The masks and biases of a recording: copies that stay as they were, and plain data for files.

Nothing in a file is executed: a rule is the name of a class, its numbers, and tensors beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import BIASES, Bias
from regard.errors import ArgumentError
from regard.inspect.record.recorded_place import RecordedStep
from regard.masks import MASKS, Mask
from regard.ops.softmax.call import Call
from regard.plain_data import Keep, NotPlain, from_data, to_data
from regard.registry import is_own
from regard.span import as_tensor

_MAX_DEPTH = 50


def copy_rule(rule: Any) -> Any:
    """A mask or bias over copies of its tensors, on the CPU: what the caller does with its own
    changes no recording.
    """
    if isinstance(rule, Bias):
        own = rule.tensors()
        return rule.with_tensors([x.detach().to("cpu", copy=True) for x in own]) if own else rule
    return rule.with_tensors(lambda x: x.detach().to("cpu", copy=True))


def depends_on_slots(*rules: Mask | Bias | None) -> bool:
    """Whether a mask or bias has a number for each slot of a call, whatever its position."""
    return any(rule is not None and rule.by_slot for rule in rules)


def to_dense_rules(
    call: Call, mask: Mask, bias: Bias | None, slots: Tensor
) -> tuple[Mask, Bias | None]:
    """Mask and bias written out, for slots [b or 1,1,1,n] of the call."""
    where = as_tensor(call.q_positions).cpu(), as_tensor(call.k_positions).cpu()

    def taken(x: Tensor) -> Tensor:
        rows = max(x.shape[0], slots.shape[0])
        return x.expand(rows, -1, -1, -1).gather(3, slots.expand(rows, *x.shape[1:3], -1))

    made = None if bias is None else biases.Dense(taken(bias.block(*where, dtype=torch.float64)))
    return masks.Dense(taken(mask.block(*where))), made


def mask_data(mask: Mask, step: RecordedStep, keep: Keep) -> dict[str, Any]:
    """A mask as data: its text where `masks.parse` reads that back, or the fields of its class.

    A mask that is no plain data, such as a function, is written out for the step. So is one of a
    class from elsewhere, beside its data, because who reads the file may not have the class.
    """

    def written_out() -> dict[str, Any]:
        table = mask.block(step.q_positions, step.k_positions)
        return {"dense": keep(table.contiguous()), "was": str(mask)}

    if _has_text(mask):
        return {"text": str(mask)} if _is_ours(mask) else {"text": str(mask), **to_dense_rules()}
    try:
        found = to_data(mask, keep, lambda x: mask_data(x, step, keep))
    except NotPlain:
        return to_dense_rules()
    return found if is_own(type(mask)) else {**found, **to_dense_rules()}


def _has_text(mask: Mask) -> bool:
    try:
        return masks.parse(str(mask)) == mask
    except ArgumentError:
        return False


def _is_ours(rule: Mask) -> bool:
    return is_own(type(rule)) and all(map(_is_ours, rule.members()))


def mask_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Mask:
    """The mask that `mask_data` told of; the one written out where its class is not known here.

    Raises:
        ArgumentError, KeyError, TypeError: the data tells of none.

    >>> str(mask_from({"all": [{"text": "causal"}, {"not": {"text": "window(3)"}}]}, {}))
    'causal & ~window(3)'
    """
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"a mask is nested deeper than {_MAX_DEPTH}")
    if "text" in data:
        try:
            return masks.parse(data["text"])
        except ArgumentError:
            if "dense" not in data:
                raise
            return masks.Dense(tensors[data["dense"]])
    return from_data(MASKS, data, tensors, lambda x: mask_from(x, tensors, depth + 1))


def bias_data(bias: Bias | None, step: RecordedStep, keep: Keep) -> dict[str, Any] | None:
    """A bias as data; one that is no plain data, such as a function, is written out."""
    if bias is None:
        return None

    def written_out() -> dict[str, Any]:
        table = bias.block(step.q_positions, step.k_positions, dtype=torch.float64)
        return {"dense": keep(table.contiguous()), "was": str(bias)}

    try:
        found = to_data(bias, keep, lambda x: bias_data(x, step, keep) or {})
    except NotPlain:
        return to_dense_rules()
    return found if is_own(type(bias)) else {**found, **to_dense_rules()}


def bias_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Bias | None:
    """The bias that `bias_data` told of; the one written out where its class is not known here.

    Raises:
        ArgumentError, KeyError, TypeError: the data tells of none.

    >>> bias_from({"alibi": "a", "symmetric": False}, {"a": torch.tensor([0.5, 0.25])})
    alibi(2 slopes)
    """
    if data is None:
        return None
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"a bias is nested deeper than {_MAX_DEPTH}")
    return from_data(BIASES, data, tensors, lambda x: bias_from(x, tensors, depth + 1))
