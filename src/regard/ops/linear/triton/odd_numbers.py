"""What is not finite: which results of a recurrence are NaN because an input is NaN or infinite.

The kernels compute with 0 in place of NaN and infinity, which a product would carry to earlier
tokens; this kernel then writes NaN where the recurrence would have it. A chunk without odd numbers
costs one read of its count. Imported only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton.decays import (
    is_odd,
    is_odd_decay,
    load_column,
    load_decays,
    load_rows,
)
from regard.ops.linear.triton.forward_kernels import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def write_nans(
    k_ptr, v_ptr, beta_ptr, g_ptr, out_ptr, last_ptr, odd_ptr,
    k_b, k_h, k_t, v_b, v_h, v_t, beta_b, beta_h, beta_t, g_b, g_h, g_t,
    O, N, T, chunks, shared_keys,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Write NaN into BE columns of the outputs and the last state of a value head."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // N, head % N
    i, d = tl.arange(0, C), tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    outputs = O // N
    PART: tl.constexpr = min(BLOCK_D, 64)
    rows, columns = tl.zeros([BLOCK_D], tl.int32), tl.zeros([BE], tl.int32)
    for c in range(chunks):
        count = 0
        for x in range(COUNTS):
            count += tl.load(odd_ptr + (head * chunks + c) * COUNTS + x)
        earlier = tl.max(rows, 0) + tl.max(columns, 0)
        if (count > 0) | (earlier > 0):
            t = c * C + i
            k_rows = k_ptr + b * k_b + n // shared_keys * k_h
            g_rows = g_ptr + b * g_b + n * g_h
            v = load_rows(v_ptr + b * v_b + n * v_h, v_t, t, T, e, E)
            bad_columns = is_odd(v)
            if DELTA:
                # a token's odd number reaches the whole state: one flag a token, from blocks of
                # channels, because all of them at once take too many registers
                bad_rows = is_odd(load_column(beta_ptr + b * beta_b + n * beta_h, beta_t, t, T))
                for start in tl.static_range(0, BLOCK_D, PART):
                    part = start + tl.arange(0, PART)
                    bad = is_odd(load_rows(k_rows, k_t, t, T, part, D))
                    if DECAY == 2:
                        g = load_decays(g_rows, g_t, t, t < T, part, D, True)
                        bad = bad | is_odd_decay(g)
                    bad_rows = bad_rows | tl.max(bad, 1)[:, None]
                if DECAY == 1:
                    g = load_decays(g_rows, g_t, t, t < T, d, D, False)
                    bad_rows = bad_rows | is_odd_decay(g)
            else:
                bad_rows = is_odd(load_rows(k_rows, k_t, t, T, d, D))
                if DECAY:
                    g = load_decays(g_rows, g_t, t, t < T, d, D, DECAY == 2)
                    bad_rows = bad_rows | is_odd_decay(g)
            bad = tl.cumsum(tl.max(bad_rows, 1), 0)[:, None] + tl.cumsum(bad_columns, 0)
            bad += tl.max(rows, 0) + columns[None, :]
            mask = (t < T)[:, None] & (e < E)[None, :] & (bad > 0)
            for r in range(outputs):
                first = out_ptr + (b * O + n * outputs + r) * T * E
                place = first + t.to(tl.int64)[:, None] * E + e[None, :]
                tl.store(place, tl.full([C, BE], float("nan"), out_ptr.dtype.element_ty), mask=mask)
            if DELTA:
                rows = rows | tl.max(tl.max(bad_rows, 1), 0)
            else:
                rows = rows | tl.max(bad_rows, 0)
            columns = columns | tl.max(bad_columns, 0)
    odd = (rows[:, None] | columns[None, :]) > 0
    place = last_ptr + head * D * E + d[:, None] * E + e[None, :]
    mask = (d < D)[:, None] & (e < E)[None, :] & odd
    tl.store(place, tl.full([BLOCK_D, BE], float("nan"), tl.float32), mask=mask)
