"""The sizes of chunks and blocks of the recurrences: a table that is reviewed like code.

The rows were chosen by the registers that spill (tests/ops/linear/triton/test_compile.py), and not
yet measured on a GPU: `python -m benchmarks --tune FILE` does so for review.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias

from regard.ops.triton_support import assigned

RecurrenceKernelKind: TypeAlias = Literal["states", "parallel", "gradients", "solve"]
"""The kernels that pass a state on, those of all chunks at once, and the triangular systems."""


class ChunkSizes(NamedTuple):
    """The sizes of a program.

    The `chunk` C is shared by all kernels of a call; `channels` and `columns` are key and value
    channels at once.
    """

    chunk: int
    channels: int
    columns: int
    warps: int
    stages: int


class RecurrenceSizes(NamedTuple):
    """The sizes of a program without the chunk, as they are measured."""

    channels: int
    columns: int
    warps: int
    stages: int


class RecurrenceSizesKey(NamedTuple):
    """The row of a table of sizes."""

    kind: RecurrenceKernelKind
    by_channel: bool
    width: int


INTERPRETED = ChunkSizes(16, 16, 16, 4, 1)
"""Small chunks for triton's interpreter, where small calls have several of them."""

MAX_KEY_CHANNELS = 256
"""The largest D that the table has a row for."""

_TABLE: dict[tuple[RecurrenceKernelKind, bool, int], ChunkSizes] = {
    ("states", False, 64): ChunkSizes(64, 64, 64, 4, 2),
    ("states", False, 128): ChunkSizes(64, 64, 32, 8, 2),
    ("states", False, 256): ChunkSizes(64, 64, 16, 8, 1),
    ("parallel", False, 256): ChunkSizes(64, 32, 64, 8, 1),
    ("gradients", False, 64): ChunkSizes(64, 16, 32, 8, 1),
    ("gradients", False, 256): ChunkSizes(64, 32, 32, 8, 1),
    ("solve", False, 256): ChunkSizes(64, 32, 64, 4, 1),
    ("states", True, 64): ChunkSizes(32, 64, 64, 4, 2),
    ("states", True, 128): ChunkSizes(32, 64, 32, 8, 2),
    ("states", True, 256): ChunkSizes(32, 64, 16, 8, 2),
    ("parallel", True, 256): ChunkSizes(32, 16, 32, 8, 1),
    ("gradients", True, 256): ChunkSizes(32, 16, 32, 4, 1),
    ("solve", True, 256): ChunkSizes(32, 16, 32, 8, 1),
}
"""(kind, one decay for each channel, largest D) -> sizes; all kernels of a call have one chunk."""
TABLE = {RecurrenceSizesKey(*key): sizes for key, sizes in _TABLE.items()}
"""The sizes for a device of which no row has been measured."""

MEASURED: dict[int, dict[RecurrenceSizesKey, RecurrenceSizes]] = {}
"""Reviewed rows of `python -m benchmarks --tune`, by compute capability, before `TABLE`."""

_tried: ContextVar[dict[RecurrenceSizesKey, RecurrenceSizes] | None] = ContextVar(
    "tried", default=None
)


def try_recurrence_sizes(
    key: RecurrenceSizesKey, sizes: RecurrenceSizes
) -> AbstractContextManager[None]:
    """Use other sizes than those of the tables for one row, in this thread, to measure them."""
    return assigned(_tried, {**(_tried.get() or {}), key: sizes})


_SHORT_CHUNK = 32
"""The tokens of a chunk where 64 spill: triangular systems before sm_90, wide states from sm_100.
"""

_EXACT, _EXACT_STATES = ChunkSizes(16, 16, 16, 4, 1), ChunkSizes(16, 16, 16, 8, 1)
"""The kernels in fp32, whose products run on no tensor cores and need many registers."""


def chunk_sizes(
    kind: RecurrenceKernelKind, *, by_channel: bool, exact: bool, D: int, capability: int = 90
) -> ChunkSizes:
    """Return the sizes of a kernel for keys of D channels, at most `MAX_KEY_CHANNELS`."""
    if exact:
        return _EXACT_STATES if kind == "states" else _EXACT
    width = min(x for *key, x in TABLE if key == [kind, by_channel] and x >= D)
    key = RecurrenceSizesKey(kind, by_channel, width)
    sizes = TABLE[key]
    if capability < 90 or (capability >= 100 and D > 128):
        sizes = sizes._replace(chunk=min(sizes.chunk, _SHORT_CHUNK))
    for table in (_tried.get() or {}, MEASURED.get(capability, {})):
        if key in table:
            return ChunkSizes(sizes.chunk, *table[key])
    # before sm_90, 4 warps spill 56 bytes and 8 warps 16 to 24
    return sizes._replace(warps=8) if kind == "gradients" and capability < 90 else sizes
