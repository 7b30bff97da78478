"""Keys and values laid out as products of small matrices read them, and numbers on their way in and
out.

A panel of keys is [D, PANEL]: a dimension of PANEL keys side by side. A panel of values is [keys,
PANEL]: PANEL dimensions of a key side by side. In bfloat16 two neighbours along the sum, dimensions
or keys, stand together: [D/2, PANEL, 2]. Missing keys and dimensions are zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from regard.ops.jit.bits import bits_of, widen
from regard.ops.jit.product import PANEL

BUILT_UPON = "1843ecb3720907e4"
"""Of what it compiles in: Numba keeps compiled code until this very file changes
(tests/ops/test_jit.py).
"""

compiled = njit(
    nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}
)


@njit(nogil=True, cache=True)
def _bfloat(x):
    """A float32 as the 16 bits of a bfloat16, to nearest, ties to even; NaN stays NaN."""
    u = bits_of(x)
    rounded = (u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


def _as_it_is(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return args[0]


@intrinsic
def narrow(context: Any, x: Any, tag: Any, like: Any) -> Any:
    """X in the dtype of an array: float32 as it is, else 16 bits as the type of the tag says."""

    def bfloat(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = types.uint16(types.float32)
        return context.compile_internal(builder, lambda x: _bfloat(x), kind, args[:1])

    def half(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    if like.dtype == types.float32:
        return types.float32(types.float32, tag, like), _as_it_is
    return types.uint16(types.float32, tag, like), bfloat if tag == types.int8 else half


@intrinsic
def taken(context: Any, x: Any, tag: Any, like: Any) -> Any:
    """A number of the memory for an array: 16 bits as they are, or widened to float32."""

    def wide(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = types.float32(*signature.args[:2])
        return context.compile_internal(builder, lambda x, tag: widen(x, tag), kind, args[:2])

    if like.dtype == types.uint16:
        return types.uint16(x, tag, like), _as_it_is
    return types.float32(x, tag, like), wide


@compiled
def pack_keys(memory, tokens, D, each, out, at):
    """One panel: keys tokens[0] to tokens[1] - 1 of D dims, to out from `at` on."""
    flat, base, step, tag = memory
    first, n = tokens[0], tokens[1] - tokens[0]
    for d in range(0, D, each):
        for i in range(min(each, D - d)):
            to = at + d * PANEL + i
            start = base + first * step + d + i
            for j in range(n):
                out[to + j * each] = taken(flat[start + j * step], tag, out)


@compiled
def pack_values(memory, tokens, E, each, out, at, across):
    """Keys tokens[0] to tokens[1] - 1, of every panel of E dims; panels begin `across` numbers
    apart.
    """
    flat, base, step, tag = memory
    for j in range(tokens[0], tokens[1]):
        start = base + j * step
        for e in range(0, E, PANEL):
            to = at + e // PANEL * across + j // each * each * PANEL + j % each
            n = min(PANEL, E - e)
            panel, numbers = out[to : to + n * each : each], flat[start + e : start + e + n]
            for i in range(n):
                panel[i] = taken(numbers[i], tag, out)


@compiled
def pack(keys, values, sizes, packed, first, stride):
    """Panels first, first + stride, ... of the keys of all rows and heads, and the values of the
    same keys.

    keys, values: (flat memory, steps of B, G and the tokens, tag). sizes: B, G, S, D, E, numbers
        that stand together.
    packed: keys [B,G,panels of S,D,PANEL] and values [B,G,panels of E,S,PANEL], flat and zero, S
        and D rounded up.
    """
    B, G, S, D, E, each = sizes
    count = (S + PANEL - 1) // PANEL
    k_head, v_panel = packed[0].shape[0] // (B * G), count * PANEL * PANEL
    v_head = packed[1].shape[0] // (B * G)
    for task in range(first, B * G * count, stride):
        head, panel = task // count, task % count
        b, g = head // G, head % G
        tokens = (panel * PANEL, min(S, (panel + 1) * PANEL))
        memory = (keys[0], b * keys[1] + g * keys[2], keys[3], keys[4])
        pack_keys(memory, tokens, D, each, packed[0], head * k_head + panel * (k_head // count))
        memory = (values[0], b * values[1] + g * values[2], values[3], values[4])
        pack_values(memory, tokens, E, each, packed[1], head * v_head, v_panel)
