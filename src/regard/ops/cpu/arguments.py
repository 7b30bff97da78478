"""The structs that carry the arguments of a call to a kernel.

`csrc/arguments.h` is the only list of their fields: the kernels are compiled with it, and this
module reads it. A field of any kind takes one or several numbers of 8 bytes. `StructLayout.pack`
fills a struct; `StructLayout.dtype` is the same layout for an array of structs.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from regard.ops.cpu.instruction_sets import SOURCES
from regard.ops.cpu.launch import address, row_address

PackedStruct: TypeAlias = array
"""A struct in memory, as an array of 8-byte integers."""

MAX_RUNS = 14
"""The largest number of runs of neighbouring tasks; see `kMaxRuns`."""

ARRAY_DTYPES = {"float": torch.float32, "int64_t": torch.int64, "bool": torch.bool}
"""The dtypes of tensors in a field `Array<...>`."""

_LEADING_ONES = tuple((1,) * (4 - n) for n in range(5))


class Part(NamedTuple):
    """Numbers of a struct: their name, "q" (int64, an address) or "d" (float64), their count."""

    name: str
    kind: str
    count: int  # type: ignore[assignment]  # a tuple has a method of that name


class Field(NamedTuple):
    """An argument: its name, its parts, and the dtype if it is a contiguous tensor."""

    name: str
    parts: tuple[Part, ...]
    dtype: torch.dtype | None = None


class StructLayout:
    """The layout of a struct of `arguments.h`.

    >>> layout = struct_layout("RmsNorm")
    >>> layout.dtype.names
    ('taken', 'done', 'R', 'M', 'x', 'w', 'y', 'eps', 'offset')
    """

    def __init__(self, fields: Sequence[Field], counters: int) -> None:
        self.fields = tuple(fields)
        parts = [part for field in fields for part in field.parts]
        self._zeros = (0,) * counters
        self._struct = struct.Struct("=" + "".join(x.kind * x.count for x in parts))
        self.dtype = np.dtype(
            [(x.name, x.kind) if x.count == 1 else (x.name, x.kind, (x.count,)) for x in parts]
        )
        self._arguments = [(x.name, x.dtype) for x in fields if x.name not in _COUNTERS]

    def pack(self, **arguments: float | Tensor | Sequence[int]) -> PackedStruct:
        """Return a struct in memory, with its counters at 0.

        Args:
            **arguments: the value of each field by name: a number; a contiguous tensor for an
                `Array`, one with contiguous rows for a `Strided`; a sequence of all numbers for a
                field of several numbers. The caller must keep tensors alive as long as the struct
                is read.
        """
        numbers: list[Any] = [*self._zeros]
        for name, dtype in self._arguments:
            value: Any = arguments[name]
            if dtype is not None:
                shape = value.shape
                numbers += (address(value, dtype), *_LEADING_ONES[len(shape)], *shape)
            elif isinstance(value, Tensor):
                numbers += (row_address(value, value.dtype), *value.stride()[:3])
            elif isinstance(value, Sequence):
                numbers += value
            else:
                numbers.append(value)
        return array("q", self._struct.pack(*numbers))

    def place(self, name: str) -> int:
        """Return the index of a field in a packed struct."""
        field: Any = self.dtype.fields
        return int(field[name][1]) // 8

    def pack_numbers(self, *numbers: float) -> PackedStruct:
        """Return a struct whose fields are all numbers, given in the order of the fields.

        `pack` would take half a microsecond longer, which is a tenth of the time of a short call.
        """
        return array("q", self._struct.pack(*self._zeros, *numbers))


_COUNTERS = ("taken", "done", "taken_of_runs")
_STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (?:const )?([\w<>]+)( \*|\*)? ?(\w+)(?:\[(\w+)\])?;", re.MULTILINE)


@cache
def struct_layout(name: str) -> StructLayout:
    """Return the layout of a struct of `arguments.h` by its name."""
    fields = _structs()[name]
    counters = sum(p.count for x in fields if x.name in _COUNTERS for p in x.parts)
    return StructLayout(fields, counters)


@cache
def _structs() -> dict[str, list[Field]]:
    """Read `arguments.h`: the fields of each struct by its name."""
    text = (SOURCES / "arguments.h").read_text("utf-8")
    structs: dict[str, list[Field]] = {}
    for name, base, body in _STRUCT.findall(text):
        fields = list(structs[base]) if base else []
        fields += (_field(structs, *match) for match in _FIELD.findall(body))
        structs[name] = fields
    return structs


def _field(known: dict[str, list[Field]], kind: str, pointer: str, name: str, count: str) -> Field:
    """Return one field; the parts of a struct are `<name>_<part>`, and its `data` is `<name>`."""
    if not pointer and kind.startswith("Array<"):
        parts = (Part(name, "q", 1), Part(f"{name}_shape", "q", 4))
        return Field(name, parts, ARRAY_DTYPES[kind[6:-1]])
    if not pointer and kind in known:
        inner = [part for field in known[kind] for part in field.parts]
        named = [x._replace(name=name if x.name == "data" else f"{name}_{x.name}") for x in inner]
        return Field(name, tuple(named))
    number = {"kMaxRuns": MAX_RUNS}.get(count) or int(count or 1)
    return Field(name, (Part(name, "d" if kind == "double" and not pointer else "q", number),))
