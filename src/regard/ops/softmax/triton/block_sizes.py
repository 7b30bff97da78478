"""The block sizes of the kernels: a table that is reviewed like code.

Nothing is tuned while a program runs, since that would change the order of sums between runs.
`python -m benchmarks --tune FILE` measures rows for review.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias

import torch

from regard.ops.triton_support import assigned

KernelKind: TypeAlias = Literal["forward", "backward_q", "backward_kv", "decode"]


class LaunchSizes(NamedTuple):
    """The sizes of a program: queries BM of a block, keys BN of a tile, warps, and loaded tiles."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = LaunchSizes(16, 16, 4, 1)
"""Small blocks for triton's interpreter, where small calls have several of them."""


class SizesKey(NamedTuple):
    """The row of a table of block sizes: kernel, 2-byte dtype, and the largest head dimension."""

    kind: KernelKind
    half: bool
    width: int


# (kind, half precision, largest head dimension) -> sizes; compiled for sm_80, sm_90 and sm_100 by
# tests/ops/softmax/triton/test_compile.py, and not yet measured on a GPU
_TABLE: dict[tuple[KernelKind, bool, int], LaunchSizes] = {
    ("forward", True, 64): LaunchSizes(128, 64, 8, 3),
    ("forward", True, 128): LaunchSizes(128, 64, 8, 3),
    ("forward", True, 256): LaunchSizes(64, 32, 8, 2),
    ("forward", False, 64): LaunchSizes(64, 32, 8, 2),
    ("forward", False, 128): LaunchSizes(32, 16, 8, 2),
    ("forward", False, 256): LaunchSizes(16, 16, 8, 1),
    ("backward_q", True, 64): LaunchSizes(128, 64, 8, 2),
    ("backward_q", True, 128): LaunchSizes(64, 64, 8, 2),
    ("backward_q", True, 256): LaunchSizes(32, 32, 8, 1),
    ("backward_q", False, 64): LaunchSizes(32, 16, 8, 1),
    ("backward_q", False, 128): LaunchSizes(16, 16, 8, 1),
    ("backward_q", False, 256): LaunchSizes(16, 16, 8, 1),
    ("backward_kv", True, 64): LaunchSizes(64, 64, 8, 1),
    ("backward_kv", True, 128): LaunchSizes(32, 64, 8, 2),
    ("backward_kv", True, 256): LaunchSizes(32, 32, 8, 1),
    ("backward_kv", False, 64): LaunchSizes(32, 32, 8, 1),
    ("backward_kv", False, 128): LaunchSizes(32, 32, 8, 1),
    ("backward_kv", False, 256): LaunchSizes(16, 16, 8, 1),
    ("decode", True, 128): LaunchSizes(16, 64, 4, 3),
    ("decode", True, 256): LaunchSizes(16, 32, 4, 2),
    ("decode", True, 576): LaunchSizes(16, 32, 8, 2),
    ("decode", False, 256): LaunchSizes(16, 16, 4, 2),
    ("decode", False, 576): LaunchSizes(16, 16, 8, 1),
}
TABLE = {SizesKey(*key): sizes for key, sizes in _TABLE.items()}
"""The sizes for a device of which no row has been measured."""

MEASURED: dict[int, dict[SizesKey, LaunchSizes]] = {}
"""Reviewed rows of `python -m benchmarks --tune`, by compute capability, before `TABLE`."""

MAX_HEAD_DIM = 256
"""The largest D and E of the kernels that do not decode."""

_tried: ContextVar[dict[SizesKey, LaunchSizes] | None] = ContextVar("tried", default=None)


def try_sizes(key: SizesKey, sizes: LaunchSizes) -> AbstractContextManager[None]:
    """Use other sizes than those of the tables for one row, in this thread, to measure them."""
    return assigned(_tried, {**(_tried.get() or {}), key: sizes})


def key_of(kind: KernelKind, dtype: torch.dtype, D: int, E: int) -> SizesKey:
    """Return the row of the tables for a kernel, a dtype and head dimensions."""
    half = dtype.itemsize == 2
    widths = [x.width for x in TABLE if x.kind == kind and x.half == half]
    return SizesKey(kind, half, min(x for x in widths if max(D, E) <= x))


def block_sizes(
    kind: KernelKind, dtype: torch.dtype, D: int, E: int, *, capability: int = 90
) -> LaunchSizes:
    """Return the block sizes for a kernel, a dtype, head dimensions and a compute capability.

    The rows of the decoding kernel are the queries of a group of heads.
    """
    key = key_of(kind, dtype, D, E)
    for table in (_tried.get() or {}, MEASURED.get(capability, {})):
        if key in table:
            return table[key]
    return TABLE[key]


SPAN_KEYS = 512
"""The keys of a program that decodes, fixed, so that the order of sums depends on keys alone."""

MAX_DECODED_KEY_DIM, MAX_DECODED_VALUE_DIM = 576, 512
"""The largest D and E of the decoding kernel: those of latent attention in DeepSeek-V2 and V3."""


def coded_sizes(sizes: LaunchSizes, group: int) -> LaunchSizes:
    """Return the sizes of the decoding kernel for codes in groups, where a tile lies in one.

    >>> sizes = block_sizes("decode", torch.bfloat16, 128, 128)
    >>> sizes.keys, coded_sizes(sizes, 32).keys, coded_sizes(sizes, 20).keys
    (64, 32, 64)
    """
    divisor = group & -group
    return sizes._replace(keys=min(sizes.keys, divisor)) if divisor >= 16 else sizes


def split_key_dim(D: int) -> tuple[int, int]:
    """Return the key channels of the two products of the decoding kernel, powers of 2 or 0.

    >>> split_key_dim(128), split_key_dim(576), split_key_dim(80)
    ((128, 0), (512, 64), (128, 0))
    """
    power = max(16, 1 << (D - 1).bit_length())
    if power <= MAX_HEAD_DIM or power == D:
        return power, 0
    return power // 2, max(16, 1 << (D - power // 2 - 1).bit_length())
