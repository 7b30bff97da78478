"""The matrix product that prefill consists of, and the packing of keys and values for it. One
product multiplies a few rows of a with PANEL_COLUMNS columns of b; the factors are bfloat16
or fp32 and the sums fp32.

    c_rj (+)= sum_k a_rk b_kj        r < rows, j < PANEL_COLUMNS

All sums stay in registers during the loop over k: a number of a is broadcast to all lanes, and
PANEL_COLUMNS numbers of b are loaded at once. With AVX512-BF16 one instruction adds two products of
bfloat16 numbers to each of 16 fp32 sums, without rounding in between. The loop is written as LLVM
code, because compilers do not generate this form.

With AMX one instruction multiplies tiles of bfloat16 numbers (`amx`); b is packed in the same way,
and a product has more rows, and sums of more numbers (`Factors`).

a is stored row by row. b is packed in panels `[k, PANEL_COLUMNS]`, for bfloat16 as `[k/2,
PANEL_COLUMNS, 2]`, so that two neighbours along the sum are adjacent. A panel of keys is `[D,
PANEL_COLUMNS]`: a row has one dimension of PANEL_COLUMNS keys. A panel of values is `[keys,
PANEL_COLUMNS]`: a row has PANEL_COLUMNS dimensions of the value of one key. Missing keys and
dimensions are zeros.

Source: Goto and van de Geijn 2008 (ACM TOMS 34, 12), sections 4 and 5: panels, and the block of
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.amx import TILE_DEPTH, TILE_PRODUCT_ROWS, TileRows, has_amx, multiply_tiles
from regard.ops.jit.compile import has_cpu_feature, njit_fastmath_no_arrays
from regard.ops.jit.half_precision import convert

HAS_AVX512 = has_cpu_feature("avx512f")
"""Whether the processor has AVX-512: 32 registers of 16 fp32 numbers."""

HAS_BF16_DOT = HAS_AVX512 and has_cpu_feature("avx512bf16")
"""Whether the processor multiplies pairs of bfloat16 numbers (AVX512-BF16); otherwise they are
converted to fp32.
"""

LANES = 16 if HAS_AVX512 else 8 if has_cpu_feature("avx2") else 4
"""The number of fp32 numbers in a register."""

REGISTERS = 4 if HAS_AVX512 else 2
"""The number of registers for the sums of one row."""

REGISTER_ROWS, PANEL_COLUMNS = 6, LANES * REGISTERS
"""The rows of a that one product in vector registers multiplies; the columns of a panel of b."""


HALF_PANEL = PANEL_COLUMNS // 2
"""The columns that `matmul_add_half` computes, for a last panel that is half empty."""


class Factors(NamedTuple):
    """How the factors of a product are stored.

    Args:
        dtype: the numpy type of their arrays, from which compiled code knows the kind of product:
            float32, or the 16 bits of bfloat16 numbers as uint16 (pairs) or int16 (tiles).
        each: how many neighbours along the sum are adjacent in b.
        depth: the number of products in a sum is a multiple of this.
        rows: the rows of a that one product multiplies.
    """

    dtype: type[np.generic]
    each: int
    depth: int
    rows: int


FP32_FACTORS = Factors(np.float32, 1, 1, REGISTER_ROWS)
BF16_PAIRS = Factors(np.uint16, 2, 2, REGISTER_ROWS)
BF16_TILES = Factors(np.int16, 2, TILE_DEPTH, TILE_PRODUCT_ROWS)
"""The forms of factors. Compiled code knows a form from the type of its arrays, never from a
constant of a module, because it is kept on disk, and not every process may use tiles
(`amx.has_amx`).
"""


def bfloat16_factors() -> tuple[Factors, ...]:
    """Return the forms in which this process can multiply bfloat16 numbers, the fastest first."""
    if not HAS_BF16_DOT:  # what is around the products of tiles converts with its instructions
        return (FP32_FACTORS,)
    return *([BF16_TILES] if has_amx() else []), BF16_PAIRS, FP32_FACTORS


@intrinsic
def product_rows(context, a):
    """Return how many rows one product multiplies if `a` is its left factor, a constant."""
    kinds = {types.float32: FP32_FACTORS, types.uint16: BF16_PAIRS, types.int16: BF16_TILES}
    rows = kinds[a.dtype].rows

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _I64(rows)

    return types.int64(a), code


_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class _FactorType(NamedTuple):
    """The LLVM types in which the factors of a product are stored.

    Args:
        number: the type of one number.
        word: the type that is broadcast to all lanes: one number, or a pair of bfloat16 numbers.
        register: the type of a register of words.
        each: the number of numbers in a word, 1 or 2.
    """

    number: ir.Type
    word: ir.Type
    register: ir.Type
    each: int


_BF16, _FP32 = _FactorType(_I16, _I32, _WORDS, 2), _FactorType(_F32, _F32, _SUMS, 1)


class _MatmulEmitter:
    """Emits the code of one product with an LLVM builder."""

    def __init__(self, builder: Any, kind: _FactorType) -> None:
        self.builder, self.kind = builder, kind
        # Newer versions of LLVM expect bfloat vectors here, which llvmlite cannot name; they
        # convert this declaration themselves.
        pair_product = "llvm.x86.avx512bf16.dpbf16ps.512", [_SUMS, _WORDS, _WORDS]
        name, argument_types = (
            pair_product if kind.each == 2 else (f"llvm.fma.v{LANES}f32", [_SUMS] * 3)
        )
        signature = ir.FunctionType(_SUMS, argument_types)
        self.operation = cgutils.get_or_insert_function(builder.module, signature, name)

    def offset(self, start: Any, steps: Any, number: ir.Type) -> Any:
        """Return a pointer `steps` numbers after `start`."""
        return self.builder.gep(start, [steps], source_etype=number)

    def load(self, place: Any, what: ir.Type) -> Any:
        """Load a value of type `what` from a pointer."""
        typed = self.builder.bitcast(place, ir.PointerType(what))
        return self.builder.load(typed, typ=what, align=2)

    def spread(self, place: Any) -> Any:
        """Load one word and broadcast it to all lanes."""
        register = self.kind.register
        nothing = ir.Constant(register, ir.Undefined)
        one = self.builder.insert_element(nothing, self.load(place, self.kind.word), _I32(0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * LANES))

    def add(self, total: Any, x: Any, y: Any) -> Any:
        """Add the products of two registers to the sums so far."""
        args = [total, x, y] if self.kind.each == 2 else [x, y, total]
        return self.builder.call(self.operation, args)

    @contextmanager
    def loop(self, times: Any, sums: list[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Emit a loop of `times` iterations that carries sums from one iteration to the next.

        The body of the `with` block emits one iteration. The context manager yields the iteration
        number, the sums so far, and a list to fill with their next values. After the block, the
        list `sums` holds the final sums.
        """
        builder, before, next_sums = self.builder, self.builder.block, list(sums)
        head, done = (builder.append_basic_block(name) for name in ("products", "done"))
        builder.cbranch(builder.icmp_signed(">", times, _I64(0)), head, done)
        builder.position_at_end(head)
        number, so_far = builder.phi(_I64), [builder.phi(_SUMS) for _ in sums]
        yield number, so_far, next_sums
        more = builder.add(number, _I64(1))
        for phi, first, after in zip(
            [number, *so_far], [_I64(0), *sums], [more, *next_sums], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(after, head)
        builder.cbranch(builder.icmp_signed("<", more, times), head, done)
        builder.position_at_end(done)
        for i, (first, after) in enumerate(zip(list(sums), next_sums, strict=True)):
            sums[i] = builder.phi(_SUMS)
            sums[i].add_incoming(first, before)
            sums[i].add_incoming(after, head)


def _make_matmul(factors: Any, *, adds: bool, columns: int = PANEL_COLUMNS) -> Callable[..., Any]:
    """Return the function that emits the code of `matmul`, or with `adds` of `matmul_add`, for
    arrays of this Numba type and the first columns of a panel, in the form that Numba expects.
    """
    if factors.dtype == types.int16:
        return _make_tile_matmul(columns, adds=adds)
    registers = columns // LANES
    kind = _BF16 if factors.dtype == types.uint16 else _FP32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_at, a_step, b, b_at, k, c, c_at, c_step = args
        emit = _MatmulEmitter(builder, kind)

        def start(i: int, array: Any, steps: Any, number: ir.Type) -> Any:
            data = context.make_array(signature.args[i])(context, builder, array).data
            return emit.offset(data, steps, number)

        left, right = start(0, a, a_at, kind.number), start(3, b, b_at, kind.number)
        target = start(6, c, c_at, _F32)
        lines = [
            emit.offset(left, builder.mul(a_step, _I64(r)), kind.number)
            for r in range(REGISTER_ROWS)
        ]
        targets = [
            emit.offset(target, builder.add(builder.mul(c_step, _I64(r)), _I64(v * LANES)), _F32)
            for r in range(REGISTER_ROWS)
            for v in range(registers)
        ]
        sums = [ir.Constant(_SUMS, [0.0] * LANES) for _ in targets]
        times = builder.lshr(k, _I64(1)) if kind.each == 2 else k
        with emit.loop(times, sums) as (i, so_far, after):
            across, along = (
                builder.mul(i, _I64(PANEL_COLUMNS * kind.each)),
                builder.mul(i, _I64(kind.each)),
            )
            ys = []
            for v in range(registers):
                steps = builder.add(across, _I64(v * LANES * kind.each))
                ys.append(emit.load(emit.offset(right, steps, kind.number), kind.register))
            for r in range(REGISTER_ROWS):
                x = emit.spread(emit.offset(lines[r], along, kind.number))
                for v in range(registers):
                    after[r * registers + v] = emit.add(so_far[r * registers + v], x, ys[v])
        for target_pointer, total in zip(targets, sums, strict=True):
            if adds:  # added last, because a sum of partial sums rounds less than one long sum
                total = builder.fadd(emit.load(target_pointer, _SUMS), total)
            builder.store(total, builder.bitcast(target_pointer, ir.PointerType(_SUMS)), align=4)
        return context.get_dummy_value()

    return code


def _make_tile_matmul(columns: int, *, adds: bool) -> Callable[..., Any]:
    """Return what `_make_matmul` returns, for factors in tiles."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_at, a_step, b, b_at, k, c, c_at, c_step = args

        def start(i: int, array: Any, steps: Any, size: int) -> Any:
            data = context.make_array(signature.args[i])(context, builder, array).data
            place = builder.bitcast(data, ir.IntType(8).as_pointer())
            return builder.gep(place, [builder.mul(steps, _I64(size))], source_etype=ir.IntType(8))

        left = TileRows(start(0, a, a_at, 2), builder.mul(a_step, _I64(2)))
        target = TileRows(start(6, c, c_at, 4), builder.mul(c_step, _I64(4)))
        panel = TileRows(start(3, b, b_at, 2), _I64(PANEL_COLUMNS * 4))
        multiply_tiles(builder, left, panel, k, target, columns, adds=adds)
        return context.get_dummy_value()

    return code


def _signature(a: Any, b: Any, c: Any) -> Any:
    """Return the Numba signature of a product of these array types."""
    i = types.int64
    return types.none(a, i, i, b, i, i, c, i, i)


@intrinsic
def matmul(context, a, a_at, a_step, b, b_at, k, c, c_at, c_step):
    """Compute c = a b for `product_rows(a)` rows of a and one panel of b, which are parts of flat
    arrays.

    The rows of a begin at a_at and are a_step numbers apart; the panel of b begins at b_at; the
    rows of c begin at c_at and are c_step numbers apart. k is the number of products in a sum, a
    multiple of the depth of the factors. Tiles must have been configured (`amx.configure_tiles`).
    """
    return _signature(a, b, c), _make_matmul(a, adds=False)


@intrinsic
def matmul_add(context, a, a_at, a_step, b, b_at, k, c, c_at, c_step):
    """Compute c += a b, with the arguments of `matmul`."""
    return _signature(a, b, c), _make_matmul(a, adds=True)


@intrinsic
def matmul_add_half(context, a, a_at, a_step, b, b_at, k, c, c_at, c_step):
    """Compute c += a b for the first HALF_PANEL columns of a panel of b."""
    return _signature(a, b, c), _make_matmul(a, adds=True, columns=HALF_PANEL)


@njit_fastmath_no_arrays
def pack_keys(memory, tokens, D, each, out, start):
    """Pack the keys tokens[0] to tokens[1] - 1 of D dimensions into one panel of `out`, beginning
    at index `start`.

    memory: (flat memory, offset of the head in it, stride of the tokens, tag). each: the numbers in
    a word, 2 for bfloat16 in pairs.
    """
    flat, base, step, tag = memory
    first, count = tokens[0], tokens[1] - tokens[0]
    for d in range(0, D, each):
        for i in range(min(each, D - d)):
            target = start + d * PANEL_COLUMNS + i
            source = base + first * step + d + i
            for j in range(count):
                out[target + j * each] = convert(flat[source + j * step], tag, out)


@njit_fastmath_no_arrays
def pack_values(memory, tokens, E, each, out, offset, across):
    """Pack the values of the keys tokens[0] to tokens[1] - 1 into all panels of their E dimensions.

    memory and each are as in `pack_keys`. The panels of `out` begin at index `offset` and are
    `across` numbers apart.
    """
    flat, base, step, tag = memory
    for j in range(tokens[0], tokens[1]):
        source = base + j * step
        for e in range(0, E, PANEL_COLUMNS):
            target = (
                offset + e // PANEL_COLUMNS * across + j // each * each * PANEL_COLUMNS + j % each
            )
            count = min(PANEL_COLUMNS, E - e)
            panel, numbers = (
                out[target : target + count * each : each],
                flat[source + e : source + e + count],
            )
            for i in range(count):
                panel[i] = convert(numbers[i], tag, out)


@njit_fastmath_no_arrays
def pack_panels(keys, values, sizes, packed, first, stride):
    """Pack the panels first, first + stride, ... of the keys of all rows and heads, and the values
    of the same keys.

    keys, values: (flat memory, strides of B, G and the tokens, tag). sizes: B, G, S, D, E, numbers
    per word. packed: the outputs, keys `[B, G, panels of S, D, PANEL_COLUMNS]` and values `[B, G,
    panels of E, S, PANEL_COLUMNS]`, flat; S and D are rounded up, and the padding must be zeros.
    """
    B, G, S, D, E, each = sizes
    count = (S + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    k_head, v_panel = packed[0].shape[0] // (B * G), count * PANEL_COLUMNS * PANEL_COLUMNS
    v_head = packed[1].shape[0] // (B * G)
    for task in range(first, B * G * count, stride):
        head, panel = task // count, task % count
        b, g = head // G, head % G
        tokens = (panel * PANEL_COLUMNS, min(S, (panel + 1) * PANEL_COLUMNS))
        memory = (keys[0], b * keys[1] + g * keys[2], keys[3], keys[4])
        pack_keys(memory, tokens, D, each, packed[0], head * k_head + panel * (k_head // count))
        memory = (values[0], b * values[1] + g * values[2], values[3], values[4])
        pack_values(memory, tokens, E, each, packed[1], head * v_head, v_panel)
