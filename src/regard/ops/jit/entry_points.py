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

from regard.ops.jit.compile import disk_cache, njit_strict, source_stamp
from regard.ops.jit.half_precision import BF16, FP16

STORAGE = {
    torch.float32: (np.float32, BF16),
    torch.bfloat16: (np.uint16, BF16),
    torch.float16: (np.uint16, FP16),
}
"""What holds the numbers of a dtype, and the tag that says how its bits are meant."""

UNBOUNDED = np.int64(1) << 60


@intrinsic
def int_to_pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


def _atomic_counter(place: int) -> Any:
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


take_task, finish_task = _atomic_counter(0), _atomic_counter(1)
"""The next task, each once, whoever asks; and one more that is done: how many were before."""


@njit_strict
def struct_at(address, dtype):
    """The record at an address, its fields by name."""
    return carray(int_to_pointer(address), (1,), dtype)[0]


@njit_strict
def array_4d_at(address, shape, dtype):
    """The array of 4 dimensions at an address."""
    return carray(int_to_pointer(address), (shape[0], shape[1], shape[2], shape[3]), dtype)


@njit_strict
def memory_at(address, dtype):
    """All memory from an address on, as a flat array without an end."""
    return carray(int_to_pointer(address), (UNBOUNDED,), dtype)


_loaded_entries: list[Any] = []


def compile_entry(entry: Callable[[int], None]) -> int:
    """Compile a function of one address, or load it; where its code begins, as long as this process
    lives.
    """
    made: Any = CFunc(
        entry, ((types.int64,), types.void), locals={}, options={"error_model": "numpy"}
    )
    made._cache = disk_cache(entry, source_stamp(entry.__module__))
    made.compile()
    _loaded_entries.append(made)
    address: int = made.address or 0
    return address
