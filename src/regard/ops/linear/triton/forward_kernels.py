"""The forward kernels of a recurrence: the state before each chunk, then the outputs of all chunks.

With S the state before a chunk, c_i the sum of g over the chunk up to token i, and u what the
tokens write (the values; for the delta rules the corrections, from `delta_kernels`):

    S <- diag(exp(c_C)) S + (K * exp(c_C - c))^T U
    O = (Q * exp(c)) S + (Q K^T * exp(c_i - c_j)) U

Only the first line passes from chunk to chunk. All sums are in fp32.

Source: Sun et al. 2023 (arXiv 2307.08621), equation 7; Yang et al. 2023 (arXiv 2312.06635).

`write_nans` says which results are NaN because an input is NaN or infinite. The
kernels compute with 0 in place of NaN and infinity, which a product would carry to earlier
tokens; this kernel then writes NaN where the recurrence would have it. A chunk without odd numbers
costs one read of its count. Imported only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton.decays import (
    decay_since_start,
    decay_until_end,
    decayed_products,
    finite_or_zero,
    is_odd,
    is_odd_decay,
    load_both_decays,
    load_column,
    load_decays,
    load_rows,
    pairwise_decay,
    store_rows,
)

UNSPECIALIZED = ("H", "N", "O", "T", "chunks", "shared_keys", "shared_queries",
    "g_b", "g_h", "g_t", "beta_b", "beta_h", "beta_t", "partial",
)  # fmt: skip
"""Numbers whose values triton must not look at, so that nothing is compiled for another length."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_states(
    k_ptr, u_ptr, erase_ptr, g_ptr, first_ptr, states_ptr, update_ptr, last_ptr, odd_ptr,
    k_b, k_h, k_t, u_b, u_h, u_t, g_b, g_h, g_t,
    N, T, chunks, shared_keys,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk and behind the last one, for BE columns of the state of a head.

    With DELTA u is written - erased S. Without it, chunks with odd numbers are counted.
    """
    head = tl.program_id(0).to(tl.int64)
    b, n = head // N, head % N
    i, d = tl.arange(0, C), tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    k_rows = k_ptr + b * k_b + n // shared_keys * k_h
    u_rows = u_ptr + b * u_b + n * u_h
    g_rows = g_ptr + b * g_b + n * g_h
    place = d[:, None] * E + e[None, :]
    place_mask = (d < D)[:, None] & (e < E)[None, :]
    S = tl.load(first_ptr + head * D * E + place, mask=place_mask, other=0.0)
    for c in range(chunks):
        t = c * C + i
        tl.store(states_ptr + (head * chunks + c) * D * E + place, S, mask=place_mask)
        k = load_rows(k_rows, k_t, t, T, d, D)
        u = load_rows(u_rows, u_t, t, T, e, E)
        if DELTA:
            k = finite_or_zero(k)
            erase = load_rows(erase_ptr + head * T * D, D, t, T, d, D)
            u -= tl.dot(erase, S, input_precision=PRECISION)
            store_rows(update_ptr + head * T * E, u, E, t, T, e, E)
        else:
            count = tl.sum(tl.sum(is_odd(k), 1), 0) + tl.sum(tl.sum(is_odd(u), 1), 0)
            k, u = finite_or_zero(k), finite_or_zero(u)
        if DECAY:
            g, g_next = load_both_decays(g_rows, g_t, t, i, T, d, D, C, DECAY == 2)
            until = decay_until_end(g_next)
            if not DELTA:
                raw = load_decays(g_rows, g_t, t, t < T, d, D, DECAY == 2)
                count += tl.sum(tl.sum(is_odd_decay(raw), 1), 0)
            S = S * tl.exp(tl.sum(g, 0))[:, None]
            if DECAY == 2:
                k = k * until
            else:
                u = u * until
        S += tl.dot(tl.trans(k), u, input_precision=PRECISION)
        if not DELTA:
            place_of_count = (head * chunks + c) * tl.num_programs(1) + tl.program_id(1)
            tl.store(odd_ptr + place_of_count, count)
    tl.store(last_ptr + head * D * E + place, S, mask=place_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_outputs(
    q_ptr, k_ptr, u_ptr, g_ptr, states_ptr, out_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, u_b, u_h, u_t, g_b, g_h, g_t,
    O, N, T, chunks, shared_keys, shared_queries, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk of one head, in BE columns."""
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, o = head // O, head % O
    n = o // (O // N)
    i = tl.arange(0, C)
    t = c * C + i
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    q_rows = q_ptr + b * q_b + o // shared_queries * q_h
    k_rows = k_ptr + b * k_b + n // shared_keys * k_h
    g_rows = g_ptr + b * g_b + n * g_h
    state = states_ptr + ((b * N + n) * chunks + c) * D * E
    weights, odd = tl.zeros([C, C], tl.float32), tl.zeros([C, 1], tl.float32)
    out = tl.zeros([C, BE], tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        q = load_rows(q_rows, q_t, t, T, d, D)
        # a query that is not finite has no finite output, and changes no other
        odd += tl.sum(q * 0.0, 1)[:, None]
        q = finite_or_zero(q) * scale
        k = finite_or_zero(load_rows(k_rows, k_t, t, T, d, D))
        g_here, g_behind = 0.0, 0.0
        if DECAY == 2:
            g_here, g_behind = load_both_decays(g_rows, g_t, t, i, T, d, D, C, True)
        weights += decayed_products(q, k, g_here, g_behind, i, DECAY, LEVELS, PRECISION, EXACT)
        if DECAY == 2:
            q = q * decay_since_start(g_here)
        S = load_rows(state, E, d, D, e, E)
        out = tl.dot(q, S, out, input_precision=PRECISION)
    if DECAY == 1:
        g, _ = load_both_decays(g_rows, g_t, t, i, T, i, D, C, False)
        out, weights = out * decay_since_start(g), weights * pairwise_decay(g, i)
    u = load_rows(u_ptr + b * u_b + n * u_h, u_t, t, T, e, E)
    if DELTA:
        # a correction that is not finite reaches the outputs from its token on
        out += tl.cumsum(u * 0.0, 0)
    out = tl.dot(weights, finite_or_zero(u), out, input_precision=PRECISION) + odd
    store_rows(out_ptr + head * T * E, out, E, t, T, e, E)


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
