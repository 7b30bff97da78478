"""The records that carry the arguments of a call to compiled code.

A dispatcher of Numba looks at the type of every array that it is given, which costs more than a
short call itself. So an entry takes one address: that of a record, a C struct of 8-byte fields.
Each record is one list of fields below, and all else follows from it: `Record.pack` fills one on
this side, and `Record.dtype` is what Numba reads on the other side (`record_at`).

Every record begins with two counters that all threads of a call share: `take` hands out the next
task, so that a thread that is late takes fewer, and `done` counts those that are finished.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

PackedStruct: TypeAlias = array  # type: ignore[type-arg]  # Python 3.11 cannot say of what
"""A record in memory, as numbers of 8 bytes."""

_COUNTER_FIELDS = 2
_LEADING_ONES = tuple((1,) * (4 - n) for n in range(5))


class StructField:
    """One argument: its name, and the fields of a C struct that it takes ("q" an int64, "d" a
    float64).
    """

    def __init__(self, name: str, *parts: tuple[str, str, int]) -> None:
        self.name, self.parts = name, parts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class IntField(StructField):
    """A whole number, a truth value, or the address of contiguous memory; 0 where there is none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "q", 1))


class FloatField(StructField):
    """A floating-point number."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "d", 1))


class ArrayField(StructField):
    """A contiguous tensor of up to 4 dimensions: its address, and `<name>_shape` with 1 in front
    where it has fewer.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "q", 1), (f"{name}_shape", "q", 4))


class StridedField(StructField):
    """Keys or values [B,G,S,d] wherever they lie: the address and the steps of B, G and S; the last
    dimension is contiguous.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, (name, "q", 1), (f"{name}_steps", "q", 3))


class QuantizedField(StructField):
    """Keys or values in codes of few bits: the address of the codes and their steps of B, G, rows
    and lines; the addresses of scales and zeros and their steps; the columns of a group, and the
    bits of a code.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            (name, "q", 1),
            (f"{name}_steps", "q", 4),
            (f"{name}_scale", "q", 1),
            (f"{name}_zero", "q", 1),
            (f"{name}_scale_steps", "q", 4),
            (f"{name}_group", "q", 1),
            (f"{name}_bits", "q", 1),
        )


class StructLayout:
    """A list of fields as a C struct.

    dtype: the same as a numpy structured dtype, which Numba reads.

    >>> record = Record(Integer("n"), Real("scale"), Array("x"))
    >>> record.dtype.names
    ('taken', 'done', 'n', 'scale', 'x', 'x_shape')
    >>> list(record.pack(n=7, scale=0.0, x=torch.zeros(2, 3)))[2:4], record.dtype.fields["x"][1]
    ([7, 0], 32)
    """

    def __init__(self, *fields: StructField) -> None:
        self.fields = (IntField("taken"), IntField("done"), *fields)
        parts = [part for field in self.fields for part in field.parts]
        self._struct = struct.Struct("=" + "".join(n * kind for _, kind, n in parts))
        self.dtype = np.dtype(
            [(name, kind) if n == 1 else (name, kind, (n,)) for name, kind, n in parts]
        )
        self._given = [(field.name, type(field)) for field in fields]

    def pack(self, **given: float | Tensor | Sequence[int]) -> PackedStruct:
        """A record in memory, its counters at 0.

        Args:
            given: each field by its name: a number, for an `Array` a contiguous tensor, for a
                `Strided` or `Coded` all its numbers in order. What a tensor has must live as long
                as the record is read.
        """
        numbers: list[Any] = [0] * _COUNTER_FIELDS
        for name, kind in self._given:
            x: Any = given[name]
            if kind is ArrayField:
                shape = x.shape
                numbers += (x.data_ptr(), *_LEADING_ONES[len(shape)], *shape)
            elif kind is IntField or kind is FloatField:
                numbers.append(x)
            else:
                numbers += x
        return array("q", self._struct.pack(*numbers))

    def pack_numbers(self, *given: float) -> PackedStruct:
        """The same for a record of numbers only, in the order of its list: arguments by name would
        take half a microsecond, a tenth of a short call.
        """
        return array("q", self._struct.pack(0, 0, *given))


_DECODE_FIELDS = (
    IntField("T"),  # queries; a row of q is query r % T of head g H/G + r // T
    IntField("origin"),  # the position of key 0, where keys are a contiguous run
    FloatField("softcap"),  # 0 is none
    IntField("symmetric"),  # whether ALiBi is
    FloatField("scale"),
    ArrayField("q"),  # fp32 [B,G,R,D]
    ArrayField("out"),  # fp32 [B G,P,R,E], written
    ArrayField("lse"),  # fp32 [B,G,P,R], written
    ArrayField("k_positions"),  # int64 [b,S], or [1,0] for a run from `origin` on
    ArrayField("starts"),  # int64 [b,h,t,n]: ranges of positions that a query sees
    ArrayField("stops"),
    ArrayField("visible"),  # bool [b,h,t,S] in place of ranges, or none of it
    ArrayField("slopes"),  # fp32 [H] of ALiBi, or none
    ArrayField("bias"),  # fp32 [b,h,t,S], or none of it
    ArrayField("q_positions"),  # int64 [b,T]
    IntField("S"),  # keys
)
DECODE_STRUCT = StructLayout(*_DECODE_FIELDS, StridedField("k"), StridedField("v"))
"""Decoding over keys and values as they are: the door `decode` packs it."""

DECODE_QUANTIZED_STRUCT = StructLayout(*_DECODE_FIELDS, QuantizedField("k"), QuantizedField("v"))
"""Decoding over keys and values in codes."""

GEMV_STRUCT = StructLayout(
    IntField("R"),  # vectors
    IntField("M"),
    IntField("N"),
    IntField("x"),  # [R,M]
    IntField("w"),  # [N,M]
    IntField("b"),  # [N], or 0
    IntField("y"),  # [R,N], written
)
"""A matrix with a few vectors: `regard.ops.gemv` packs it."""

RMS_NORM_STRUCT = StructLayout(
    IntField("R"),  # rows
    IntField("M"),
    IntField("x"),  # [R,M]
    IntField("w"),  # [M]
    IntField("y"),  # [R,M], written
    FloatField("eps"),
    FloatField("offset"),
)
"""The RMS norm of a few rows: `regard.ops.rms_norm` packs it."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What keys, values, weights and the scales of codes may be."""
