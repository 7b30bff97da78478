"""Entries: compiled functions that take the address of a record, and what they make of it: its
fields, arrays, and the counters that threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from regard.ops.jit.compile import disk_cache, exact, source_stamp
from regard.ops.jit.half_precision import BF16, FP16

KINDS = {
    torch.float32: (np.float32, BF16),
    torch.bfloat16: (np.uint16, BF16),
    torch.float16: (np.uint16, FP16),
}
"""What holds the numbers of a dtype, and the tag that says how its bits are meant."""

EVER = np.int64(1) << 60


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


def _counter(place: int) -> Any:
    """Adds 1 to a counter of the record at an address, for all threads to see, and gives what it
    was.
    """

    def count(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            at = builder.add(args[0], ir.Constant(word, 8 * place))
            counter = builder.inttoptr(at, word.as_pointer())
            return builder.atomic_rmw("add", counter, ir.Constant(word, 1), "acq_rel")

        return types.int64(types.int64), code

    return intrinsic(count)


take, done = _counter(0), _counter(1)
"""The next task, each once, whoever asks; and one more that is done: how many were before."""


@exact
def record_at(address, dtype):
    """The record at an address, its fields by name."""
    return carray(pointer(address), (1,), dtype)[0]


@exact
def array_at(address, shape, dtype):
    """The array of 4 dimensions at an address."""
    return carray(pointer(address), (shape[0], shape[1], shape[2], shape[3]), dtype)


@exact
def memory_at(address, dtype):
    """All memory from an address on, as a flat array without an end."""
    return carray(pointer(address), (EVER,), dtype)


_entries: list[Any] = []


def address_of(entry: Callable[[int], None]) -> int:
    """Compile a function of one address, or load it; where its code begins, as long as this process
    lives.
    """
    made: Any = CFunc(
        entry, ((types.int64,), types.void), locals={}, options={"error_model": "numpy"}
    )
    made._cache = disk_cache(entry, source_stamp(entry.__module__))
    made.compile()
    _entries.append(made)
    address: int = made.address or 0
    return address
