"""Masks, biases and score rules of a recording: copies that later changes do not affect, and plain
data for files.

Nothing in a file is executed: each is stored as the name of a class, its numbers and its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import BIASES, Bias
from regard.errors import ArgumentError
from regard.inspect.record.recorded_place import RecordedStep
from regard.masks import MASKS, Mask
from regard.ops.softmax.call import Call
from regard.registry import is_builtin
from regard.scores import SCORES, ScoreBlock, ScoreRule
from regard.serialization import NotSerializable, StoreTensor, from_data, to_data
from regard.span import as_tensor
from regard.untrusted_text import error_text

_MAX_DEPTH = 50
"""How deep masks and biases in a file may be nested."""


def copy_rule(rule: Any) -> Any:
    """Return a mask, a bias or a score rule with copies of its tensors on the CPU."""
    if isinstance(rule, (Bias, ScoreRule)):
        own = rule.tensors()
        return rule.with_tensors([x.detach().to("cpu", copy=True) for x in own]) if own else rule
    return rule.with_tensors(lambda x: x.detach().to("cpu", copy=True))


def depends_on_slots(*rules: Mask | Bias | None) -> bool:
    """Return whether a mask or bias depends on the slot of a key, not its position only."""
    return any(rule is not None and rule.by_slot for rule in rules)


def to_dense_rules(
    call: Call, mask: Mask, bias: Bias | None, slots: Tensor
) -> tuple[Mask, Bias | None]:
    """Evaluate a mask and a bias for some slots of a call, and return them as dense tables."""
    positions = as_tensor(call.q_positions).cpu(), as_tensor(call.k_positions).cpu()

    def gather_slots(x: Tensor) -> Tensor:
        rows = max(x.shape[0], slots.shape[0])
        return x.expand(rows, -1, -1, -1).gather(3, slots.expand(rows, *x.shape[1:3], -1))

    dense_bias = (
        None
        if bias is None
        else biases.DenseBias(gather_slots(bias.block(*positions, dtype=torch.float64)))
    )
    return masks.Dense(gather_slots(mask.block(*positions))), dense_bias


def mask_data(mask: Mask, step: RecordedStep, keep: StoreTensor) -> dict[str, object]:
    """Return a mask as JSON data: its text if `masks.parse` reads it, else its fields.

    A function, or a class from outside the package, becomes a dense table.
    """

    def dense_table() -> dict[str, object]:
        table = mask.block(step.q_positions, step.k_positions)
        return {"dense": keep(table.contiguous()), "was": str(mask)}

    if _has_text(mask):
        return {"text": str(mask)} if _is_ours(mask) else {"text": str(mask), **dense_table()}
    try:
        data = to_data(mask, keep, lambda x: mask_data(x, step, keep))
    except NotSerializable:
        return dense_table()
    return data if is_builtin(type(mask)) else {**data, **dense_table()}


def _has_text(mask: Mask) -> bool:
    """Return whether `masks.parse` reads the text of a mask back as an equal mask."""
    try:
        return masks.parse(str(mask)) == mask
    except ArgumentError:
        return False


def _is_ours(rule: Mask) -> bool:
    """Return whether a mask and all its members are classes of this package."""
    return is_builtin(type(rule)) and all(map(_is_ours, rule.members()))


def mask_from(data: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Mask:
    """Build the mask that `mask_data` described; a dense mask where its class is unknown here."""
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


def bias_data(bias: Bias | None, step: RecordedStep, keep: StoreTensor) -> dict[str, object] | None:
    """Return a bias as JSON data; one without plain data, such as a function, as a dense table."""
    if bias is None:
        return None

    def dense_table() -> dict[str, object]:
        table = bias.block(step.q_positions, step.k_positions, dtype=torch.float64)
        return {"dense": keep(table.contiguous()), "was": str(bias)}

    try:
        data = to_data(bias, keep, lambda x: bias_data(x, step, keep) or {})
    except NotSerializable:
        return dense_table()
    return data if is_builtin(type(bias)) else {**data, **dense_table()}


def bias_from(data: object, tensors: Mapping[str, Tensor], depth: int = 0) -> Bias | None:
    """Build the bias that `bias_data` described; a dense bias where its class is unknown here."""
    if data is None:
        return None
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"a bias is nested deeper than {_MAX_DEPTH}")
    return from_data(BIASES, data, tensors, lambda x: bias_from(x, tensors, depth + 1))


def score_data(rule: ScoreRule | None, keep: StoreTensor) -> dict[str, Any] | None:
    """Return a score rule as JSON data, or as its text if it has none or is from outside.

    The text suffices, because a recording contains the scores and weights that the rule gave.
    """
    if rule is None:
        return None
    text = {RecordedRule.kind: {"word": str(rule)}}
    try:
        data = to_data(rule, keep, lambda x: score_data(x, keep) or {})
    except NotSerializable:
        return text
    return data if is_builtin(type(rule)) else {**data, **text}


def score_from(data: object, tensors: Mapping[str, Tensor], depth: int = 0) -> ScoreRule | None:
    """Build the score rule that `score_data` described; a `RecordedRule` where only its text is
    stored, or its class is unknown here.

    >>> score_from({"temperature": 2.0}, {}), score_from({"recorded": {"word": "fn(near)"}}, {})
    (temperature(2), fn(near))
    """
    if data is None:
        return None
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"a score rule is nested deeper than {_MAX_DEPTH}")
    text = RecordedRule.kind
    if isinstance(data, Mapping) and text in data:
        others = {name: x for name, x in data.items() if name != text}
        known = any(SCORES.get(str(name)) is not None for name in others)
        data = others if known else {text: data[text]}
    return from_data(SCORES, data, tensors, lambda x: score_from(x, tensors, depth + 1))


@dataclass(frozen=True, eq=False, repr=False)
class RecordedRule(ScoreRule):
    """The text of a rule that a file could not store, such as a function."""

    kind: ClassVar[str] = "recorded"

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", error_text(str(self.text), 200))

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Raise, because the rule is not known."""
        raise ArgumentError(
            f"the score rule {self.text} was recorded as text only; pass the rule itself"
        )

    def __str__(self) -> str:
        return self.text
