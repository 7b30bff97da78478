"""The arguments of compiled code, and its one door: the memory that it writes, and the addresses
of what it reads.

Compiled code checks nothing: a tensor of another dtype, device or layout would give wrong numbers,
or end the process. No other module of compiled code therefore takes the address of a tensor, or
makes a tensor. What is made here does not depend on torch's default dtype and device, which belong
to the user (`torch.set_default_dtype`, `torch.device("meta")`), nor on inference mode.

`csrc/arguments.h` is the only list of the fields of a call's structs: the kernels are compiled with
it, and this module reads it. A field of any kind takes one or several numbers of 8 bytes.
`StructLayout.pack` fills a struct; `StructLayout.dtype` is the same layout for an array of structs.
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

from regard.errors import KernelRefusal
from regard.ops.cpu.instruction_sets import SOURCES


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory on the CPU.

    >>> empty(2, 3, dtype=torch.float32).shape
    torch.Size([2, 3])
    """
    return torch.empty(shape, dtype=dtype, device="cpu")


def full(shape: tuple[int, ...], value: float, *, dtype: torch.dtype) -> Tensor:
    """Return memory on the CPU in which every number is `value`."""
    return torch.full(shape, value, dtype=dtype, device="cpu")


def constant(shape: tuple[int, ...], value: int = 0, *, dtype: torch.dtype) -> Tensor:
    """Return a tensor that is kept: it may be used in and outside of inference mode."""
    with torch.inference_mode(mode=False):
        return full(shape, value, dtype=dtype)


def arange(start: int, stop: int) -> Tensor:
    """Return the int64 numbers from `start` to `stop` - 1, which may be kept like a `constant`."""
    with torch.inference_mode(mode=False):
        return torch.arange(start, stop, dtype=torch.int64, device="cpu")


NO_POSITIONS = constant((1, 0), dtype=torch.int64)
"""The positions of keys that are contiguous, and the pages of keys that lie in none."""

NO_RANGES = constant((1, 1, 1, 0), dtype=torch.int64)
"""The ranges of a mask that is given as `visible`."""

NO_VISIBLE = constant((1, 1, 1, 0), dtype=torch.bool)
"""The field `visible` of a mask that is given by ranges."""

NO_BIAS, NO_SLOPES = (constant(x, dtype=torch.float32) for x in ((1, 1, 1, 0), (0,)))
"""The table and the slopes of a call without a bias."""


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor that compiled code reads or writes as contiguous memory of a
    dtype; the caller must keep it alive. Another dtype, layout or device raises `KernelRefusal`.

    >>> address(torch.ones(2).double(), torch.float32)
    Traceback (most recent call last):
    regard.errors.KernelRefusal: compiled code was given a float64 tensor (2,) on cpu; it reads ...
    """
    if x.dtype is dtype and x.is_cpu and x.is_contiguous():
        pointer: int = x.data_ptr()
        if pointer % dtype.itemsize == 0:
            return pointer
    raise _refusal(x, dtype, "contiguous")


def row_address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor of any strides whose last dimension is contiguous."""
    if x.dtype is dtype and x.is_cpu and (x.stride(-1) == 1 or x.shape[-1] <= 1):
        pointer: int = x.data_ptr()
        if pointer % dtype.itemsize == 0:
            return pointer
    raise _refusal(x, dtype, "contiguous in its last dimension")


def with_rows(x: Tensor) -> Tensor:
    """Return a tensor, copied only if its last dimension is not contiguous."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _refusal(x: Tensor, dtype: torch.dtype, layout: str) -> KernelRefusal:
    name, wanted = (str(y).removeprefix("torch.") for y in (x.dtype, dtype))
    kind = "" if x.layout is torch.strided and x.is_contiguous() else " of other strides"
    return KernelRefusal(
        f"compiled code was given a {name} tensor {tuple(x.shape)}{kind} on {x.device}; it reads "
        f"{wanted} on a CPU, {layout} and aligned: choose another backend, and report this call"
    )


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
        """Return a struct in memory, with its counters at 0; the caller keeps tensors alive.

        A field takes a number; an `Array` a contiguous tensor, a `Strided` one with contiguous
        rows, and a field of several numbers a sequence of all of them.
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
