"""A checked call as tensors, integers and text (`PackedCall`), which the schema of an operator can
hold: a mask and a bias are Python objects, and a graph that is stored or cached must not refer to
them.

`pack` runs while a graph is traced, so it reads no tensor, and dynamo must be able to trace it.
`unpack` runs when the operator is executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.biases import BIASES, Bias
from regard.masks import MASKS, Mask
from regard.ops.softmax.call import Call
from regard.process_state import constant_in_graphs
from regard.registry import Registry
from regard.span import Positions, Span


class PackedCall(NamedTuple):
    """The arguments of an attention operator, in the order of its schema.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, S, D]`.
        v: values `[B, G, S, E]`.
        tensors: the tensors of the positions and of the mask.
        bias_tensors: the tensors of the bias, which may require gradients.
        numbers: the integers in the positions, the mask and the bias. A graph may treat them as
            variables, so that one graph serves every length.
        rules: JSON text of positions, mask and bias, which refers to the tensors and numbers by
            index, and of whether each tensor of the bias requires a gradient.
        scale: the factor on q . k.
        softcap: the bound on the scores, or None.
        wants_lse: whether the lse is needed.
        backend: the name of the kernel, or "auto".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: list[Tensor]
    bias_tensors: list[Tensor]
    numbers: list[int]
    rules: str
    scale: float
    softcap: float | None
    wants_lse: bool
    backend: str


_FIELDS = frozenset(
    [
        "q",
        "k",
        "v",
        "mask",
        "bias",
        "scale",
        "softcap",
        "sink",
        "dropout",
        "q_positions",
        "k_positions",
        "wants_lse",
        "needs",
    ]
)
"""The fields of a call that are packed, or that `operators` handles beside the operator."""

_OTHER_FIELDS = tuple(x.name for x in fields(Call) if x.init and x.name not in _FIELDS)
"""Fields that `pack` does not know: a call that uses one is refused, so that none is lost."""


def unpackable_parts(call: Call, others: Sequence[str] = _OTHER_FIELDS) -> list[str]:
    """Return why a call cannot be packed; an empty list if it can."""
    rules: tuple[Mask | Bias | None, ...] = (call.mask, call.bias)
    reasons = [reason for rule in rules if rule is not None for reason in _reasons(rule)]
    return reasons + [
        f"a graph cannot hold {name} of a call"
        for name in others
        if getattr(call, name) is not None
    ]


def _reasons(rule: Mask | Bias) -> list[str]:
    """Return why a mask or bias cannot be packed."""
    if not _can_be_found(type(rule)):
        return [f"a graph cannot hold {rule}: its class is no dataclass, or not known by its name"]
    reasons: list[str] = []
    for x in fields(rule):
        if x.init:
            reasons += _value_reasons(getattr(rule, x.name), rule)
    return reasons


@constant_in_graphs
def _can_be_found(kind: type[Mask | Bias]) -> bool:
    """Return whether a class has fields of its own, and its name in the registry leads to it."""
    known: Registry[Any] = MASKS if issubclass(kind, Mask) else BIASES
    return known.get(kind.kind) is kind and "__dataclass_fields__" in kind.__dict__


def _value_reasons(value: object, rule: Mask | Bias) -> list[str]:
    """Return why the value of a field cannot be packed."""
    if isinstance(value, Mask | Bias):
        return _reasons(value)
    if isinstance(value, tuple):
        return [reason for x in value for reason in _value_reasons(x, rule)]
    if value is None or isinstance(value, bool | int | torch.SymInt | float | Tensor):
        return []
    if isinstance(value, str) and value.isidentifier():  # needs no quoting in JSON
        return []
    return [f"a graph cannot hold the {type(value).__name__} in {rule}"]


def pack(call: Call, backend: str) -> PackedCall:
    """Return a call without reasons (`unpackable_parts`) as the arguments of an operator. The sink
    and the dropout are left out.
    """
    tensors: list[Tensor] = []
    bias_tensors: list[Tensor] = []
    numbers: list[int] = []
    positions = ",".join(
        _position_text(x, tensors, numbers) for x in (call.q_positions, call.k_positions)
    )
    mask = _text(call.mask, tensors, numbers)
    bias = _text(call.bias, bias_tensors, numbers)
    trained = tuple([x.requires_grad for x in bias_tensors])
    return PackedCall(
        call.q,
        call.k,
        call.v,
        tensors,
        bias_tensors,
        numbers,
        f"[{positions},{mask},{bias},{_text(trained, [], [])}]",
        call.scale,
        call.softcap,
        call.wants_lse,
        backend,
    )


def _position_text(positions: Positions, tensors: list[Tensor], numbers: list[int]) -> str:
    """Return the text of positions: a tensor, or the start of a span and whether all its slots hold
    tokens.
    """
    if isinstance(positions, Span):
        tokens = "true" if positions.tokens else "false"
        return f"[{_text(positions.start, tensors, numbers)},{tokens}]"
    return _text(positions, tensors, numbers)


def _text(value: object, tensors: list[Tensor], numbers: list[int]) -> str:
    """Return the JSON text of a value; its tensors and integers are appended to the lists."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Tensor):
        tensors.append(value)
        return f'{{"tensor":{len(tensors) - 1}}}'
    if isinstance(value, int | torch.SymInt):
        numbers.append(cast("int", value))  # torch's sizes stand for ints in a graph
        return f'{{"number":{len(numbers) - 1}}}'
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ",".join([_text(x, tensors, numbers) for x in value]) + "]"
    assert isinstance(value, Mask | Bias), "unpackable_parts reports every other value"
    named = [
        f'"{x.name}":{_text(getattr(value, x.name), tensors, numbers)}'
        for x in fields(value)
        if x.init
    ]
    known = "mask" if isinstance(value, Mask) else "bias"
    return f'{{"{known}":"{value.kind}","fields":{{{",".join(named)}}}}}'


def trained_bias_tensors(packed: PackedCall) -> list[int]:
    """Return the indices of the tensors of the bias that require a gradient."""
    return [i for i, trained in enumerate(_parse(packed.rules)[4]) if trained]


def unpack(packed: PackedCall) -> Call:
    """Return the call that `pack` packed; its tensors hold values, or are fake."""
    q_positions, k_positions, mask, bias, _ = _parse(packed.rules)
    T, S = packed.q.shape[2], packed.k.shape[2]
    values = _Values(packed.tensors, packed.numbers)
    others: dict[str, Any] = dict.fromkeys(_OTHER_FIELDS)
    return Call(
        q=packed.q,
        k=packed.k,
        v=packed.v,
        mask=_rule(mask, values),
        bias=_rule(bias, _Values(packed.bias_tensors, packed.numbers)),
        scale=packed.scale,
        softcap=packed.softcap,
        sink=None,
        dropout=0.0,
        q_positions=_positions(q_positions, T, values),
        k_positions=_positions(k_positions, S, values),
        wants_lse=packed.wants_lse,
        **others,
    )


class _Values(NamedTuple):
    """The tensors and the integers to which the text refers."""

    tensors: Sequence[Tensor]
    numbers: Sequence[int]


@dataclass(frozen=True, eq=False)
class _Rule:
    """A mask or bias in the text.

    Args:
        kind: the class.
        fields: the values of its fields by name.
        holds_tensors: whether one of them is a tensor.
        numbers: the indices of its integers.
    """

    kind: type
    fields: tuple[tuple[str, object], ...]
    holds_tensors: bool
    numbers: tuple[int, ...]


class _TensorIndex(int):
    """The index of a tensor in the text."""


class _NumberIndex(int):
    """The index of an integer in the text."""


@lru_cache(maxsize=256)
def _parse(rules: str) -> tuple[Any, ...]:
    """Parse the text of an operator. A program has a few such texts, and runs each many times."""
    return tuple(_tree(x) for x in json.loads(rules))


def _tree(data: object) -> object:
    """Return a part of the JSON data with its references as `_TensorIndex` and `_NumberIndex`, and
    its masks and biases as `_Rule`.
    """
    if isinstance(data, list):
        return tuple(map(_tree, data))
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return _TensorIndex(data["tensor"])
    if "number" in data:
        return _NumberIndex(data["number"])
    kind: type = MASKS.find(data["mask"]) if "mask" in data else BIASES.find(data["bias"])
    values = tuple((name, _tree(x)) for name, x in data["fields"].items())
    leaves = [y for _, x in values for y in _leaves(x)]
    return _Rule(
        kind,
        values,
        any(isinstance(x, _TensorIndex) for x in leaves),
        tuple(int(x) for x in leaves if isinstance(x, _NumberIndex)),
    )


def _leaves(tree: object) -> list[object]:
    """Return the values in a part of the text that are neither tuples nor rules."""
    if isinstance(tree, tuple):
        return [y for x in tree for y in _leaves(x)]
    if isinstance(tree, _Rule):
        return [y for _, x in tree.fields for y in _leaves(x)]
    return [tree]


def _positions(tree: object, length: int, values: _Values) -> Positions:
    """Return the positions of one side of a call."""
    if isinstance(tree, _TensorIndex):
        return values.tensors[tree]
    assert isinstance(tree, tuple)
    start, tokens = tree
    return Span(values.numbers[start], length, tokens)


def _rule(tree: Any, values: _Values) -> Any:
    """Return the mask or bias of a part of the text, or None."""
    if tree is None or tree.holds_tensors:
        return _build(tree, values)
    numbers = values.numbers
    return _rule_without_tensors(tree, tuple([(i, numbers[i]) for i in tree.numbers]))


@lru_cache(maxsize=256)
def _rule_without_tensors(tree: _Rule, numbers: tuple[tuple[int, int], ...]) -> object:
    """Build a rule without tensors. The same object serves every layer and step, because kernels
    keep what they compute from a mask.
    """
    return _build(tree, _Values((), dict(numbers)))  # type: ignore[arg-type]


def _build(tree: object, values: _Values) -> object:
    """Build the value of a part of the text."""
    if isinstance(tree, _TensorIndex):
        return values.tensors[tree]
    if isinstance(tree, _NumberIndex):
        return values.numbers[tree]
    if isinstance(tree, tuple):
        return tuple(_build(x, values) for x in tree)
    if isinstance(tree, _Rule):
        return tree.kind(**{name: _build(x, values) for name, x in tree.fields})
    return tree
