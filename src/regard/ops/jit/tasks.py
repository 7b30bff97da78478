"""What a compiled entry is given: one line of int64 numbers, of which arrays and settings are made
again.

A dispatcher of Numba looks at every array of a call for its type, which costs more than a short
call itself; an entry takes one pointer. Number 0 counts the tasks that were taken, so that a thread
that is late takes fewer; the last one those that are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.bits import BF16, FP16

BUILT_UPON = "3f01cfe31ff4b4cb"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

KINDS = {
    torch.float32: (np.float32, BF16),
    torch.bfloat16: (np.uint16, BF16),
    torch.float16: (np.uint16, FP16),
}
"""What holds the numbers of a dtype, and how its bits are meant."""

EVER = np.int64(1) << 60
inlined = njit(nogil=True, cache=True, error_model="numpy")


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


def _counted(place: int) -> Any:
    """Adds 1 to a number of the line, for all threads to see, and gives what it was."""

    def count(context: Any, given: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = context.make_array(given)(context, builder, args[0])
            (length,) = cgutils.unpack_tuple(builder, made.shape)
            at = builder.add(length, _number(place)) if place < 0 else _number(place)
            return builder.atomic_rmw("add", builder.gep(made.data, [at]), _number(1), "acq_rel")

        return types.int64(given), code

    return intrinsic(count)


def _number(n: int) -> Any:
    return ir.Constant(ir.IntType(64), n)


take, done = _counted(0), _counted(-1)
"""The next task, each once, whoever asks; and one more that is done: how many were before."""


@intrinsic
def real(context: Any, bits: Any) -> Any:
    """The float64 of 64 bits."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), code


@inlined
def numbers(address, count):
    """The line itself."""
    return carray(pointer(address), (count,), np.int64)


@inlined
def memory(given, at, dtype):
    """The array of 4 dimensions whose address and shape begin at a place of the line."""
    shape = (given[at + 1], given[at + 2], given[at + 3], given[at + 4])
    return carray(pointer(given[at]), shape, dtype)


@inlined
def line_at(address, dtype):
    """All memory from an address on."""
    return carray(pointer(address), (EVER,), dtype)


_kept: list[Any] = []


def address_of(entry: Callable[[int], None]) -> int:
    """Compile an entry; its address is good as long as this process lives."""
    found = cfunc(types.void(types.int64), cache=True, error_model="numpy")(entry)
    _kept.append(found)
    address: int = found.address or 0
    return address


FIELD = 5
"""Numbers that an array takes: its address and shape."""
