"""Entry points: compiled functions of one argument, the address of an argument struct. This module
compiles them, and holds the functions by which they read the fields and arrays of the struct and
increment the counters in it that all threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from regard.ops.jit.code_files import CodeFile, code_file
from regard.ops.jit.compile import disk_cache, njit_strict
from regard.ops.jit.half_precision import BF16, FP16
from regard.ops.jit.source_stamps import source_stamp

STORAGE = {
    torch.float32: (np.float32, BF16),
    torch.bfloat16: (np.uint16, BF16),
    torch.float16: (np.uint16, FP16),
}
"""For each torch dtype the numpy dtype in which compiled code reads its memory, and a tag whose
type determines whether 16-bit numbers are bfloat16 or float16.
"""

UNBOUNDED = np.int64(1) << 60
"""The length of an array whose end is unknown."""


@intrinsic
def int_to_pointer(context: Any, address: Any) -> Any:
    """Convert an address to a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


def _atomic_counter(place: int) -> Any:
    """Return a compiled function that atomically adds 1 to a counter of the struct at an address,
    and returns the value that the counter had before.

    Args:
        place: the index of the counter in the struct.
    """

    def count(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            counter_address = builder.add(args[0], ir.Constant(word, 8 * place))
            counter = builder.inttoptr(counter_address, word.as_pointer())
            return builder.atomic_rmw("add", counter, ir.Constant(word, 1), "acq_rel")

        return types.int64(types.int64), code

    return intrinsic(count)


take_task, finish_task = _atomic_counter(0), _atomic_counter(1)
"""`take_task(address)` returns the number of the next task; no two threads get the same one.
`finish_task(address)` counts one task as finished, and returns how many were finished before.
"""


@intrinsic
def counter_at(context: Any, address: Any) -> Any:
    """Return the value of the counter at an address; what the threads wrote before they counted can
    be read afterwards.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), code


@njit_strict
def take_next(address, tasks, team):
    """Return the number of the next of `tasks` tasks for a thread, or `tasks` if none is left.

    The tasks form runs of equal length, whose counters follow the two counters at `address`. A
    thread takes the tasks of its own run one after another, and then those of other runs that no
    thread has begun. So a core reads one piece of memory, which is faster by a fifth than small
    pieces in turns with other cores (LOG.md).

    team: (the number of the thread, the number of runs).
    """
    thread, runs = team
    for i in range(runs):
        run = (thread + i) % runs
        first, last = tasks * run // runs, tasks * (run + 1) // runs
        counter = address + 8 * (2 + run)
        if first + counter_at(counter) < last:
            task = first + take_task(counter)
            if task < last:
                return task
    return tasks


@njit_strict
def struct_at(address, dtype):
    """View the struct at `address` as a numpy record of the structured `dtype`."""
    return carray(int_to_pointer(address), (1,), dtype)[0]


@njit_strict
def array_4d_at(address, shape, dtype):
    """View the memory at `address` as an array of four dimensions."""
    return carray(int_to_pointer(address), (shape[0], shape[1], shape[2], shape[3]), dtype)


@njit_strict
def memory_at(address, dtype):
    """View the memory at `address` as an unbounded 1-D array."""
    return carray(int_to_pointer(address), (UNBOUNDED,), dtype)


@intrinsic
def call_entry(context: Any, entry: Any, address: Any) -> Any:
    """Call an entry, given by its address, with the address of its struct."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


_compiled_entries: list[Any] = []
"""The entries that Numba compiled or loaded; this list keeps them alive as long as the process."""


def compile_entry(entry: Callable[[int], None], file: CodeFile | None = None) -> int:
    """Compile a function of one address, or load it from the disk, and return the address of its
    code, which is valid as long as the process lives.

    Args:
        entry: the function.
        file: the file of its code; None: Numba's disk cache.
    """
    if file is not None and (loaded := file.load()) is not None:
        return loaded
    compiled: Any = CFunc(
        entry, ((types.int64,), types.void), locals={}, options={"error_model": "numpy"}
    )
    if file is None:
        compiled._cache = disk_cache(entry, source_stamp(entry.__module__))
    compiled.compile()
    _compiled_entries.append(compiled)
    address: int = compiled.address or 0
    if file is not None and file.save(
        compiled._library._get_compiled_object(), compiled._wrapper_name
    ):
        return file.load() or address
    return address


def entry_point(make: Callable[..., Callable[[int], None]]) -> Callable[..., int]:
    """Decorator of a function that makes an entry, to be compiled: a call with the same arguments
    returns the address of its code, compiled at most once on a machine.
    """
    loops = make.__module__.rpartition(".")[2]

    @wraps(make)
    def address(*arguments: Any) -> int:
        return compile_entry(make(*arguments), code_file(loops, make.__name__, arguments))

    return cache(address)
