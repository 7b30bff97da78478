"""Masks and biases that a recording keeps: over copies of their tensors, and in the order of its
columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import Bias
from regard.masks import Mask
from regard.ops.softmax.call import Call
from regard.span import as_tensor


def copied(rule: Any) -> Any:
    """A mask or bias over copies of its tensors, on the CPU: what the caller does with its own
    changes no recording.
    """
    if isinstance(rule, Bias):
        own = rule.tensors()
        return rule.with_tensors([x.detach().to("cpu", copy=True) for x in own]) if own else rule
    return rule.with_tensors(lambda x: x.detach().to("cpu", copy=True))


def speaks_of_slots(*rules: Mask | Bias | None) -> bool:
    """Whether a mask or bias has a number for each slot of a call, whatever its position."""
    return any(rule is not None and rule.by_slot for rule in rules)


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
