"""The feed-forward networks without a gate of the compiled step, down(f(up x)), and their
activations f: the map up is a phase like the one with a gate, the map down is the same.
"""

from __future__ import annotations

import numpy as np

from regard.ops.jit.compile import njit_fastmath, njit_strict
from regard.ops.jit.entry_points import finish_task, struct_at, take_next
from regard.ops.jit.exp_tanh import exp, gelu_tanh
from regard.ops.jit.half_precision import from_float32, to_float32
from regard.ops.jit.step_network_loops import NETWORK, units_of_task
from regard.ops.jit.step_parts import (
    map_at,
    map_rows,
    vectors_in,
    wait_until_finished,
)

_HALF, _ONE, _STEP = np.float32(0.5), np.float32(1), np.float32(0.3)
_TAIL = tuple(
    np.float32(x)
    for x in (
        0.11968648433685303,
        0.1195756122469902,
        0.11020554602146149,
        0.07852185517549515,
        0.09579329937696457,
        -0.07877779752016068,
        0.19104212522506714,
        -0.22767959535121918,
        0.11221713572740555,
        -0.020584655925631523,
    )
)
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9 = _TAIL


@njit_fastmath
def gelu(x):
    """Return x Phi(x), with the distribution function Phi of the normal distribution, accurate to
    about one rounding.

    Phi(-a) = t p(t) exp(-a^2 / 2),  t = 1 / (1 + 0.3 a),  a = |x|

    The polynomial p of degree 9 was fitted for this file to exp(a^2 / 2) erfc(a / sqrt(2)) / 2; its
    largest relative error for 0 <= a <= 13.3 is 3.5e-9. Beyond that the exponential is 0.
    """
    a = abs(x)
    t = _ONE / (_ONE + _STEP * a)
    p = ((((_T9 * t + _T8) * t + _T7) * t + _T6) * t + _T5) * t + _T4
    p = (((p * t + _T3) * t + _T2) * t + _T1) * t + _T0
    tail = x * (p * t * exp(-_HALF * a * a))
    return tail if x < 0 else x - tail


@njit_fastmath
def gelu_units(hidden, place, n, tag):
    """Apply GELU to n hidden units at a place."""
    for i in range(place, place + n):
        hidden[i] = from_float32(gelu(to_float32(hidden[i], tag)), tag, hidden)


@njit_fastmath
def gelu_tanh_units(hidden, place, n, tag):
    """Apply the approximation of GELU by tanh to n hidden units at a place."""
    for i in range(place, place + n):
        hidden[i] = from_float32(gelu_tanh(to_float32(hidden[i], tag)), tag, hidden)


@njit_fastmath
def silu_units(hidden, place, n, tag):
    """Apply SiLU to n hidden units at a place."""
    for i in range(place, place + n):
        x = to_float32(hidden[i], tag)
        e = exp(-abs(x))
        y = x / (_ONE + e) if x >= 0 else x * e / (_ONE + e)
        hidden[i] = from_float32(y, tag, hidden)


@njit_strict
def relu_units(hidden, place, n, squared, tag):
    """Apply ReLU, or its square, to n hidden units at a place; NaN stays NaN."""
    for i in range(place, place + n):
        x = to_float32(hidden[i], tag)
        x = np.float32(0) if x < 0 else x
        hidden[i] = from_float32(x * x if squared else x, tag, hidden)


@njit_strict
def activate_units(activation, hidden, place, n, tag):
    """Apply the activation of a number to n hidden units at a place, where they are."""
    if activation == 0:
        silu_units(hidden, place, n, tag)
    elif activation == 1:
        gelu_tanh_units(hidden, place, n, tag)
    elif activation == 4:
        gelu_units(hidden, place, n, tag)
    else:
        relu_units(hidden, place, n, activation == 5, tag)


@njit_strict
def open_units(counters, layer, sizes, hidden, scratch, dtype, tag):
    """Phase 4 of a layer with a network without a gate: up and activation.

    counters: see `step_network_loops.open_gates`.
    """
    R, M = sizes
    address, task = counters
    network, room = struct_at(layer.network, NETWORK), scratch[5]
    F, vectors = network.F, vectors_in(scratch[4], R, M)
    up_map = map_at(network.up_w, network.up_b, network.up_stored, M, dtype)
    step = units_of_task(network, M, dtype)
    tasks = (F + step - 1) // step
    while task < tasks:
        rows = (task * step, min(F, (task + 1) * step))
        map_rows(up_map, rows, vectors, R, tag, room, (hidden, rows[0], F))
        for r in range(R):
            activate_units(network.activation, hidden, r * F + rows[0], rows[1] - rows[0], tag)
        finish_task(address)
        task = take_next(address, tasks, scratch[7])
    wait_until_finished(address, tasks)
