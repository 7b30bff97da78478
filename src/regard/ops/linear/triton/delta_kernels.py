"""The corrections of the delta rules: the triangular system of each chunk, and its gradient.

The corrections u of a chunk depend on the state S before it:

    (I + strict(diag(beta) A)) U = diag(beta) (V - diag(exp(c)) K S),   A = K K^T after decays

With X the inverse of the matrix, U = written - erased S, where written = X diag(beta) V and erased
= X diag(beta) (K * exp(c)). X is computed by blocks of 1, 2, 4, ... tokens, as the inverse of [[P,
0], [R, Q]] is [[P', 0], [-Q' R P', Q']]. Imported only where triton is installed.

Source: Yang et al. 2024 (arXiv 2406.06484), section 3.2; arXiv 2412.06464, section 3.3; Kimi Team
2025 (arXiv 2510.26692), section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton.decays import (
    decay_since_start,
    decayed_products,
    finite_or_zero,
    gradients_of_products,
    is_odd,
    is_odd_decay,
    load_both_decays,
    load_column,
    load_decays,
    load_rows,
    pairs_of_level,
    pairwise_decay,
    store_rows,
)
from regard.ops.linear.triton.forward_kernels import UNSPECIALIZED


@triton.jit
def inverse_of_unit_triangle(below, i, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """The inverse of I + below `[C, C]`; a row that overflows is NaN and reaches no earlier row."""
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for level in range(LEVELS):
        across = tl.where(pairs_of_level(i, 1 << level), below, 0.0)
        joined = tl.dot(across, finite_or_zero(inverse), input_precision=EXACT)
        inverse += tl.sum(joined * 0.0, 1)[:, None]
        inverse -= tl.dot(inverse, finite_or_zero(joined), input_precision=EXACT)
    return inverse


@triton.jit(do_not_specialize=UNSPECIALIZED)
def solve_chunk(
    k_ptr, v_ptr, beta_ptr, g_ptr, written_ptr, erased_ptr, inverse_ptr, odd_ptr,
    k_b, k_h, k_t, v_b, v_h, v_t, beta_b, beta_h, beta_t, g_b, g_h, g_t,
    N, T, chunks, shared_keys,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What the tokens of one chunk write and erase, and X; odd chunks are counted."""
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, n = head // N, head % N
    i = tl.arange(0, C)
    t = c * C + i
    k_rows = k_ptr + b * k_b + n // shared_keys * k_h
    g_rows = g_ptr + b * g_b + n * g_h
    beta = load_column(beta_ptr + b * beta_b + n * beta_h, beta_t, t, T)
    odd = tl.sum(tl.sum(is_odd(beta), 1), 0)
    beta = finite_or_zero(beta)
    g, since = 0.0, 1.0
    if DECAY == 1:
        raw = load_decays(g_rows, g_t, t, t < T, i, D, False)
        odd += tl.sum(tl.sum(is_odd_decay(raw), 1), 0)
        g, _ = load_both_decays(g_rows, g_t, t, i, T, i, D, C, False)
        since = decay_since_start(g)
    products = tl.zeros([C, C], tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        k = load_rows(k_rows, k_t, t, T, d, D)
        odd += tl.sum(tl.sum(is_odd(k), 1), 0)
        k = finite_or_zero(k)
        g_here, g_behind = 0.0, 0.0
        if DECAY == 2:
            odd_g = is_odd_decay(load_decays(g_rows, g_t, t, t < T, d, D, True))
            odd += tl.sum(tl.sum(odd_g, 1), 0)
            g_here, g_behind = load_both_decays(g_rows, g_t, t, i, T, d, D, C, True)
        products += decayed_products(beta * k, k, g_here, g_behind, i, DECAY, LEVELS, EXACT, EXACT)
    if DECAY == 1:
        products = products * pairwise_decay(g, i)
    below = tl.where(i[:, None] > i[None, :], products, 0.0)
    inverse = inverse_of_unit_triangle(below, i, LEVELS, EXACT)
    store_rows(inverse_ptr + (head * chunks + c) * C * C, inverse, C, i, C, i, C)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        k = finite_or_zero(load_rows(k_rows, k_t, t, T, d, D))
        if DECAY == 2:
            g_here, _ = load_both_decays(g_rows, g_t, t, i, T, d, D, C, True)
            k = k * decay_since_start(g_here)
        erased = tl.dot(inverse, beta * k * since, input_precision=PRECISION)
        store_rows(erased_ptr + head * T * D, erased, D, t, T, d, D)
    for first in range(0, E, BE):
        e = first + tl.arange(0, BE)
        v = load_rows(v_ptr + b * v_b + n * v_h, v_t, t, T, e, E)
        odd += tl.sum(tl.sum(is_odd(v), 1), 0)
        written = tl.dot(inverse, beta * finite_or_zero(v), input_precision=PRECISION)
        store_rows(written_ptr + head * T * E, written, E, t, T, e, E)
    tl.store(odd_ptr + head * chunks + c, odd)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_of_corrections(
    v_ptr, beta_ptr, inverse_ptr, written_ptr, erased_ptr, states_ptr, d_update_ptr,
    d_v_ptr, d_beta_ptr, d_right_ptr, d_matrix_ptr,
    v_b, v_h, v_t, beta_b, beta_h, beta_t, N, T, chunks,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of v, of the matrix and of the right-hand sides of a chunk, and beta's part.

    With R the right-hand sides and Y = X R, d_R = X^T d_Y and d_matrix = -d_R Y^T.
    """
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, n = head // N, head % N
    i = tl.arange(0, C)
    t = c * C + i
    beta = finite_or_zero(load_column(beta_ptr + b * beta_b + n * beta_h, beta_t, t, T))
    matrix = (head * chunks + c) * C * C
    state = states_ptr + (head * chunks + c) * D * E
    # X^T, loaded transposed
    place = inverse_ptr + matrix + i[None, :] * C + i[:, None]
    transposed = tl.load(place)
    d_matrix = tl.zeros([C, C], tl.float32)
    d_beta = tl.zeros([C, 1], tl.float32)
    for first in range(0, E, BE):
        e = first + tl.arange(0, BE)
        d_u = load_rows(d_update_ptr + head * T * E, E, t, T, e, E)
        d_right = tl.dot(transposed, d_u, input_precision=PRECISION)
        written = load_rows(written_ptr + head * T * E, E, t, T, e, E)
        d_matrix -= tl.dot(d_right, tl.trans(written), input_precision=PRECISION)
        v = finite_or_zero(load_rows(v_ptr + b * v_b + n * v_h, v_t, t, T, e, E))
        d_beta += tl.sum(d_right * v, 1)[:, None]
        store_rows(d_v_ptr + head * T * E, beta * d_right, E, t, T, e, E)
    store_rows(d_beta_ptr + head * T, d_beta, 1, t, T, tl.arange(0, 1), 1)
    for first_d in range(0, D, BD):
        d = first_d + tl.arange(0, BD)
        d_erased = tl.zeros([C, BD], tl.float32)
        for first in range(0, E, BE):
            e = first + tl.arange(0, BE)
            d_u = load_rows(d_update_ptr + head * T * E, E, t, T, e, E)
            S = load_rows(state, E, d, D, e, E)
            d_erased -= tl.dot(d_u, tl.trans(S), input_precision=PRECISION)
        d_right = tl.dot(transposed, d_erased, input_precision=PRECISION)
        store_rows(d_right_ptr + head * T * D, d_right, D, t, T, d, D)
        erased = load_rows(erased_ptr + head * T * D, D, t, T, d, D)
        d_matrix -= tl.dot(d_right, tl.trans(erased), input_precision=PRECISION)
    d_matrix = tl.where(i[:, None] > i[None, :], d_matrix, 0.0)
    store_rows(d_matrix_ptr + matrix, d_matrix, C, i, C, i, C)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradients_of_system(
    k_ptr, beta_ptr, g_ptr, d_right_ptr, d_matrix_ptr, d_k_ptr, d_beta_ptr, d_g_ptr,
    k_b, k_h, k_t, beta_b, beta_h, beta_t, g_b, g_h, g_t, N, T, chunks, shared_keys, partial,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the gradients of k and g from those of the system, for BD channels; beta's by block."""
    c, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, n = head // N, head % N
    i, one = tl.arange(0, C), tl.arange(0, 1)
    t = c * C + i
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    part = tl.program_id(1).to(tl.int64) * partial
    k = finite_or_zero(load_rows(k_ptr + b * k_b + n // shared_keys * k_h, k_t, t, T, d, D))
    beta = finite_or_zero(load_column(beta_ptr + b * beta_b + n * beta_h, beta_t, t, T))
    d_right = load_rows(d_right_ptr + head * T * D, D, t, T, d, D)
    d_matrix = load_rows(d_matrix_ptr + (head * chunks + c) * C * C, C, i, C, i, C)
    g, g_next, since = 0.0, 0.0, 1.0
    if DECAY:
        g, g_next = load_both_decays(g_ptr + b * g_b + n * g_h, g_t, t, i, T, d, D, C, DECAY == 2)
        since = decay_since_start(g)
    d_x, d_y, d_g = gradients_of_products(
        d_matrix, beta * k, k, g, g_next, i, DECAY, LEVELS, PRECISION, EXACT
    )
    d_x += d_right * since
    d_beta = tl.sum(d_x * k, 1)[:, None]
    store_rows(d_beta_ptr + part + head * T, d_beta, 1, t, T, one, 1)
    d_k = load_rows(d_k_ptr + head * T * D, D, t, T, d, D) + beta * d_x + d_y
    store_rows(d_k_ptr + head * T * D, d_k, D, t, T, d, D)
    if DECAY:
        of_start = beta * d_right * since * k
        if DECAY == 1:
            of_start = tl.sum(of_start, 1)[:, None]
        d_g += tl.cumsum(of_start, 0, reverse=True)
        if DECAY == 1:
            place = d_g_ptr + part + head * T
            store_rows(place, d_g + load_rows(place, 1, t, T, one, 1), 1, t, T, one, 1)
        else:
            place = d_g_ptr + head * T * D
            store_rows(place, d_g + load_rows(place, D, t, T, d, D), D, t, T, d, D)
