"""The compiled entries of decoding, by address: one for each dtype of keys and values, and of the
scales of codes.

The line of numbers that an entry is given (`Given` of `regard.ops.softmax.cpu` writes it): 0 the
counter, 1 T, 2 position of key 0, 3 softcap, 4 whether ALiBi is symmetric, 5 the scale; from
`ARRAYS` on fields of 5: q, out, lse, positions of the keys, starts, stops, dense, slopes, bias,
positions of the queries; from `MEMORY` on keys and values, their number, and how many tasks are
done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from regard.ops.jit.decode import run_tasks as _decode
from regard.ops.jit.quantised import run_tasks as _quantised
from regard.ops.jit.tasks import FIELD, KINDS, address_of, inlined, line_at, memory, numbers, real

BUILT_UPON = "b4fbdcda7e4a42ef"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

ARRAYS = 6
MEMORY = ARRAYS + 10 * FIELD
LENGTH = MEMORY + 29


@inlined
def call_of(given):
    """q [B,G,R,D], the scale, T, mask, extra, out [B,G,P,R,E], lse [B,G,P,R], as `decode` says."""
    q = memory(given, ARRAYS, np.float32)
    out, lse = (
        memory(given, ARRAYS + FIELD, np.float32),
        memory(given, ARRAYS + 2 * FIELD, np.float32),
    )
    B, G, R = q.shape[0], q.shape[1], q.shape[2]
    P, E = out.shape[1], out.shape[3]
    mask = (
        memory(given, ARRAYS + 3 * FIELD, np.int64)[0, 0],
        given[2],
        memory(given, ARRAYS + 4 * FIELD, np.int64),
        memory(given, ARRAYS + 5 * FIELD, np.int64),
        memory(given, ARRAYS + 6 * FIELD, np.bool_),
    )
    extra = (
        np.float32(real(given[3])),
        given[4] != 0,
        memory(given, ARRAYS + 7 * FIELD, np.float32)[0, 0, 0],
        memory(given, ARRAYS + 8 * FIELD, np.float32),
        memory(given, ARRAYS + 9 * FIELD, np.int64)[0, 0],
    )
    scale = np.float32(real(given[5]))
    return q, scale, given[1], mask, extra, out.reshape(B, G, P, R, E), lse.reshape(B, G, P, R)


def _plain(dtype: Any, tag: Any) -> Callable[[int], None]:
    def entry(address: int) -> None:
        given = numbers(address, LENGTH)
        S, at = given[MEMORY + 27], MEMORY
        keys = (line_at(given[at], dtype), given[at + 1], given[at + 2], given[at + 3], tag, S)
        at += 4
        values = (line_at(given[at], dtype), given[at + 1], given[at + 2], given[at + 3], tag, S)
        _decode(given, call_of(given), keys, values)

    return entry


@inlined
def codes(given, at, dtype, tag, S):
    """Keys or values in codes, as `quantised` says."""
    steps = (given[at + 1], given[at + 2], given[at + 3], given[at + 4])
    scale_steps = (given[at + 7], given[at + 8], given[at + 9], given[at + 10])
    scale, zero = line_at(given[at + 5], dtype), line_at(given[at + 6], dtype)
    return (
        line_at(given[at], np.uint8),
        steps,
        scale,
        zero,
        scale_steps,
        tag,
        given[at + 11],
        given[at + 12],
        S,
    )


def _coded(dtype: Any, tag: Any) -> Callable[[int], None]:
    def entry(address: int) -> None:
        given = numbers(address, LENGTH)
        S = given[MEMORY + 27]
        keys, values = codes(given, MEMORY, dtype, tag, S), codes(given, MEMORY + 13, dtype, tag, S)
        _quantised(given, call_of(given), keys, values)

    return entry


@cache
def plain(dtype: torch.dtype) -> int:
    """The address of the entry for keys and values of a dtype."""
    return address_of(_plain(*KINDS[dtype]))


@cache
def coded(dtype: torch.dtype) -> int:
    """The address of the entry for codes with scales of a dtype."""
    return address_of(_coded(*KINDS[dtype]))
