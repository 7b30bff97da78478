"""A checked call as tensors, integers and text, which the schema of an operator can hold.

`pack` runs while a graph is traced, so it reads no tensor; `unpack` when it is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

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
        tensors: the tensors of the positions and of the mask.
        bias_tensors: the tensors of the bias, which may require gradients.
        numbers: the integers of positions, mask and bias, which may be variables of a graph.
        rules: JSON text of positions, mask and bias, which refers to both by index.
        scale: the factor on q . k.
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


_PACKED = {"q", "k", "v", "mask", "bias", "scale", "softcap", "q_positions", "k_positions"}
_FIELDS = _PACKED | {"wants_lse", "sink", "dropout", "needs"}
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
    """Return a call as the arguments of an operator, without the sink and the dropout."""
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
    """Return the text of positions: a tensor, or a span's start and whether all are tokens."""
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
    return [i for i, trained in enumerate(_readers(packed.rules)[4]((), ())) if trained]


def unpack(packed: PackedCall) -> Call:
    """Return the call that `pack` packed; its tensors hold values, or are fake."""
    q_positions, k_positions, mask, bias, _ = _readers(packed.rules)
    values = packed.tensors, packed.numbers
    others: dict[str, Any] = dict.fromkeys(_OTHER_FIELDS)
    return Call(
        q=packed.q,
        k=packed.k,
        v=packed.v,
        mask=mask(*values),
        bias=bias(packed.bias_tensors, packed.numbers),
        scale=packed.scale,
        softcap=packed.softcap,
        sink=None,
        dropout=0.0,
        q_positions=_as_positions(q_positions(*values), packed.q.shape[2]),
        k_positions=_as_positions(k_positions(*values), packed.k.shape[2]),
        wants_lse=packed.wants_lse,
        **others,
    )


def _as_positions(value: Any, length: int) -> Positions:
    """Return the positions of one side of a call: a tensor, or (start, tokens) of a span."""
    return value if isinstance(value, Tensor) else Span(value[0], length, value[1])


Reader: TypeAlias = Callable[[Sequence[Tensor], Sequence[int]], Any]
"""A function that makes the value of a part of the text from tensors and integers."""


@lru_cache(maxsize=256)
def _readers(rules: str) -> tuple[Reader, ...]:
    """Parse the text of an operator. A program has a few such texts, and runs each many times."""
    return tuple(_reader(x) for x in json.loads(rules))


def _reader(data: Any) -> Reader:
    """Return the reader of a part of the text."""
    if isinstance(data, list):
        readers = [_reader(x) for x in data]
        return lambda tensors, numbers: tuple([read(tensors, numbers) for read in readers])
    if not isinstance(data, dict):
        return lambda tensors, numbers: data
    if "tensor" in data:
        return lambda tensors, numbers: tensors[data["tensor"]]
    if "number" in data:
        return lambda tensors, numbers: numbers[data["number"]]
    kind: type = MASKS.find(data["mask"]) if "mask" in data else BIASES.find(data["bias"])
    named = {name: _reader(x) for name, x in data["fields"].items()}

    def make(tensors: Sequence[Tensor], numbers: Sequence[int]) -> object:
        return kind(**{name: read(tensors, numbers) for name, read in named.items()})

    text = json.dumps(data)
    return make if '"tensor": ' in text else _cached_reader(make, text)


def _cached_reader(make: Reader, text: str) -> Reader:
    """Return a reader of a rule without tensors that returns one object for equal numbers."""
    used = [int(i) for i in re.findall(r'"number": (\d+)', text)]

    @lru_cache(maxsize=64)
    def of_numbers(values: tuple[int, ...]) -> object:
        numbers: Any = dict(zip(used, values, strict=True))
        return make((), numbers)

    return lambda tensors, numbers: of_numbers(tuple([numbers[i] for i in used]))
