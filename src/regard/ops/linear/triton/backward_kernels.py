"""The backward kernels of a recurrence, in the order in which they run.

With S the state before a chunk, d_S the gradient of the state behind it, and A = Q K^T after
decays, as in `forward_kernels`:

    d_U = A^T d_O + (K * exp(c_C - c)) d_S             gradients_of_updates, gradients_of_states
    d_S <- diag(exp(c_C)) d_S + (Q * exp(c))^T d_O     gradients_of_states, from the last chunk
    d_A = d_O U^T                                      gradients_of_inputs
    d_Q = (d_O S^T) * exp(c) + (d_A after decays) K
    d_K = (U d_S^T) * exp(c_C - c) + (d_A after decays)^T Q

The gradient of g at token l is a sum over all that decays across l, never a difference of such
sums. No program adds to what another one wrote: gradients have the same digits in every run.
Imported only where triton is installed.

Source: Yang et al. 2023 (arXiv 2312.06635), section 4 and appendix C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton.decays import (
    decay_since_start,
    decay_until_end,
    decayed_products,
    finite_or_zero,
    gradients_of_products,
    load_both_decays,
    load_rows,
    pairwise_decay,
    store_rows,
    sums_before,
)
from regard.ops.linear.triton.forward_kernels import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_of_updates(
    q_ptr, k_ptr, g_ptr, d_out_ptr, d_update_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, g_b, g_h, g_t, o_b, o_h, o_t,
    O, N, T, chunks, shared_keys, shared_queries, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What the outputs of a chunk say of its updates: the sum of A^T d_O."""
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, n = head // N, head % N
    i = tl.arange(0, C)
    t = c * C + i
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    outputs = O // N
    k_rows, g_rows = k_ptr + b * k_b + n // shared_keys * k_h, g_ptr + b * g_b + n * g_h
    g = 0.0
    if DECAY == 1:
        g, _ = load_both_decays(g_rows, g_t, t, i, T, i, D, C, False)
    d_u = tl.zeros([C, BE], tl.float32)
    for r in range(outputs):
        o = n * outputs + r
        q_rows = q_ptr + b * q_b + o // shared_queries * q_h
        weights = tl.zeros([C, C], tl.float32)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            k = finite_or_zero(load_rows(k_rows, k_t, t, T, d, D))
            q = finite_or_zero(load_rows(q_rows, q_t, t, T, d, D)) * scale
            g_here, g_behind = 0.0, 0.0
            if DECAY == 2:
                g_here, g_behind = load_both_decays(g_rows, g_t, t, i, T, d, D, C, True)
            weights += decayed_products(q, k, g_here, g_behind, i, DECAY, LEVELS, PRECISION, EXACT)
        if DECAY == 1:
            weights = weights * pairwise_decay(g, i)
        d_out = load_rows(d_out_ptr + b * o_b + o * o_h, o_t, t, T, e, E)
        weights = finite_or_zero(weights)
        d_u = tl.dot(tl.trans(weights), d_out, d_u, input_precision=PRECISION)
    store_rows(d_update_ptr + head * T * E, d_u, E, t, T, e, E)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_of_states(
    q_ptr, k_ptr, g_ptr, erased_ptr, d_out_ptr, d_last_ptr, d_update_ptr, d_states_ptr, d_first_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, g_b, g_h, g_t, o_b, o_h, o_t,
    O, N, T, chunks, shared_keys, shared_queries, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state behind each chunk, from the last one on, and of the updates."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // N, head % N
    i, d = tl.arange(0, C), tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    outputs = O // N
    place = d[:, None] * E + e[None, :]
    place_mask = (d < D)[:, None] & (e < E)[None, :]
    d_S = tl.load(d_last_ptr + head * D * E + place, mask=place_mask, other=0.0)
    for x in range(chunks):
        c = chunks - 1 - x
        t = c * C + i
        tl.store(d_states_ptr + (head * chunks + c) * D * E + place, d_S, mask=place_mask)
        k = finite_or_zero(load_rows(k_ptr + b * k_b + n // shared_keys * k_h, k_t, t, T, d, D))
        since, until = 1.0, 1.0
        d_before = d_S
        if DECAY:
            g_rows = g_ptr + b * g_b + n * g_h
            g, g_next = load_both_decays(g_rows, g_t, t, i, T, d, D, C, DECAY == 2)
            since, until = decay_since_start(g), decay_until_end(g_next)
            d_before = d_S * tl.exp(tl.sum(g, 0))[:, None]
        d_u = load_rows(d_update_ptr + head * T * E, E, t, T, e, E)
        d_u += tl.dot(k * until, d_S, input_precision=PRECISION)
        store_rows(d_update_ptr + head * T * E, d_u, E, t, T, e, E)
        for r in range(outputs):
            o = n * outputs + r
            q = load_rows(q_ptr + b * q_b + o // shared_queries * q_h, q_t, t, T, d, D)
            q = finite_or_zero(q) * scale * since
            d_out = load_rows(d_out_ptr + b * o_b + o * o_h, o_t, t, T, e, E)
            d_before = tl.dot(tl.trans(q), d_out, d_before, input_precision=PRECISION)
        if DELTA:
            erased = load_rows(erased_ptr + head * T * D, D, t, T, d, D)
            d_before -= tl.dot(tl.trans(erased), d_u, input_precision=PRECISION)
        d_S = d_before
    tl.store(d_first_ptr + head * D * E + place, d_S, mask=place_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_of_inputs(
    q_ptr, k_ptr, u_ptr, g_ptr, d_out_ptr, states_ptr, d_states_ptr, d_q_ptr, d_k_ptr, d_g_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, u_b, u_h, u_t, g_b, g_h, g_t, o_b, o_h, o_t,
    O, N, T, chunks, shared_keys, shared_queries, partial, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of BD channels of queries (by output), keys and decays (by state)."""
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, n = head // N, head % N
    i = tl.arange(0, C)
    t = c * C + i
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    outputs = O // N
    k = finite_or_zero(load_rows(k_ptr + b * k_b + n // shared_keys * k_h, k_t, t, T, d, D))
    u_rows = u_ptr + b * u_b + n * u_h
    state = (head * chunks + c) * D * E
    g, g_next, since, until = 0.0, 0.0, 1.0, 1.0
    if DECAY:
        g, g_next = load_both_decays(g_ptr + b * g_b + n * g_h, g_t, t, i, T, d, D, C, DECAY == 2)
        since, until = decay_since_start(g), decay_until_end(g_next)
    d_k = tl.zeros([C, BD], tl.float32)
    of_state = tl.zeros([BD], tl.float32)
    for first in range(0, E, BE):
        e = first + tl.arange(0, BE)
        u = load_rows(u_rows, u_t, t, T, e, E)
        if not DELTA:
            u = finite_or_zero(u)
        d_S = load_rows(d_states_ptr + state, E, d, D, e, E)
        d_k = tl.dot(u, tl.trans(d_S), d_k, input_precision=PRECISION)
        if DECAY:
            of_state += tl.sum(d_S * load_rows(states_ptr + state, E, d, D, e, E), 1)
    d_k = d_k * until
    if DECAY:
        of_end = d_k * k
        of_state = (of_state * tl.exp(tl.sum(g, 0)))[None, :]
        if DECAY == 1:
            of_end, of_state = tl.sum(of_end, 1)[:, None], tl.sum(of_state, 1)[:, None]
        d_g = sums_before(of_end, i, DECAY == 2, PRECISION) + of_state
    for r in range(outputs):
        o = n * outputs + r
        q = load_rows(q_ptr + b * q_b + o // shared_queries * q_h, q_t, t, T, d, D)
        q = finite_or_zero(q) * scale
        d_q = tl.zeros([C, BD], tl.float32)
        d_products = tl.zeros([C, C], tl.float32)
        for first in range(0, E, BE):
            e = first + tl.arange(0, BE)
            u = load_rows(u_rows, u_t, t, T, e, E)
            if not DELTA:
                u = finite_or_zero(u)
            d_out = load_rows(d_out_ptr + b * o_b + o * o_h, o_t, t, T, e, E)
            S = load_rows(states_ptr + state, E, d, D, e, E)
            d_q = tl.dot(d_out, tl.trans(S), d_q, input_precision=PRECISION)
            d_products = tl.dot(d_out, tl.trans(u), d_products, input_precision=PRECISION)
        d_q = d_q * since
        d_x, d_y, d_pairs = gradients_of_products(
            d_products, q, k, g, g_next, i, DECAY, LEVELS, PRECISION, EXACT
        )
        d_k += d_y
        if DECAY:
            of_start = d_q * q
            if DECAY == 1:
                of_start = tl.sum(of_start, 1)[:, None]
            d_g += tl.cumsum(of_start, 0, reverse=True) + d_pairs
        place = d_q_ptr + (b * O + o) * T * D
        store_rows(place, (d_q + d_x) * scale, D, t, T, d, D)
    store_rows(d_k_ptr + head * T * D, d_k, D, t, T, d, D)
    if DECAY == 1:
        part = d_g_ptr + tl.program_id(1).to(tl.int64) * partial
        store_rows(part + head * T, d_g, 1, t, T, tl.arange(0, 1), 1)
    if DECAY == 2:
        store_rows(d_g_ptr + head * T * D, d_g, D, t, T, d, D)
