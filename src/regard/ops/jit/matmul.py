"""Products of small matrices in registers, and the panels in which they read keys and values: STEP
rows of a by PANEL columns of b, fp32 sums, bf16 or fp32 factors.

    c_rj (+)= sum_k a_rk b_kj        r < STEP, j < PANEL

All STEP x PANEL sums stay in registers while k runs: a number of a is broadcast to all lanes, PANEL
numbers of b are loaded at once. With AVX512-BF16 one instruction adds two products of bfloat16s to
each of 16 fp32 sums, without rounding them to bfloat16 in between. The loop is written in LLVM's
own words, for no compiler finds this form by itself.

a lies row after row. b is packed in panels, [k, PANEL], for bfloat16 in pairs, [k/2, PANEL, 2]: two
neighbours along the sum stand together. So a panel of keys is [D, PANEL], a dimension of PANEL keys
side by side, and a panel of values is [keys, PANEL], PANEL dimensions of a key side by side.
Missing keys and dimensions are zeros.

Source: Goto and van de Geijn 2008 (ACM TOMS 34, 12), sections 4 and 5: panels, and the block of
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature, njit_fastmath
from regard.ops.jit.half_precision import convert

HAS_AVX512 = has_cpu_feature("avx512f")
"""Whether registers hold 16 numbers and there are 32 of them."""

HAS_BF16_DOT = HAS_AVX512 and has_cpu_feature("avx512bf16")
"""Whether products of bfloat16s are to be had; else they are widened to fp32."""

LANES = 16 if HAS_AVX512 else 8 if has_cpu_feature("avx2") else 4
REGISTERS = 4 if HAS_AVX512 else 2
REGISTER_ROWS, PANEL_COLUMNS = 6, LANES * REGISTERS

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class _FactorType(NamedTuple):
    """How the factors lie in memory: one number, a word of it that is broadcast, a register of
    words, numbers in a word.
    """

    number: ir.Type
    word: ir.Type
    register: ir.Type
    each: int


_BF16, _FP32 = _FactorType(_I16, _I32, _WORDS, 2), _FactorType(_F32, _F32, _SUMS, 1)


class _MatmulEmitter:
    """Writes one product with a builder."""

    def __init__(self, builder: Any, kind: _FactorType) -> None:
        self.builder, self.kind = builder, kind
        # newer LLVM wants bfloats in place of the words, which llvmlite cannot name: it upgrades
        # this by itself
        two = "llvm.x86.avx512bf16.dpbf16ps.512", [_SUMS, _WORDS, _WORDS]
        name, given = two if kind.each == 2 else (f"llvm.fma.v{LANES}f32", [_SUMS] * 3)
        signature = ir.FunctionType(_SUMS, given)
        self.operation = cgutils.get_or_insert_function(builder.module, signature, name)

    def at(self, start: Any, steps: Any, number: ir.Type) -> Any:
        return self.builder.gep(start, [steps], source_etype=number)

    def load(self, place: Any, what: ir.Type) -> Any:
        typed = self.builder.bitcast(place, ir.PointerType(what))
        return self.builder.load(typed, typ=what, align=2)

    def spread(self, place: Any) -> Any:
        """One word in all lanes."""
        register = self.kind.register
        nothing = ir.Constant(register, ir.Undefined)
        one = self.builder.insert_element(nothing, self.load(place, self.kind.word), _I32(0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * LANES))

    def add(self, total: Any, x: Any, y: Any) -> Any:
        """The sums so far and the products of two registers."""
        args = [total, x, y] if self.kind.each == 2 else [x, y, total]
        return self.builder.call(self.operation, args)

    @contextmanager
    def loop(self, times: Any, sums: list[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """A loop that carries sums: (its number, the sums so far, where their next values go); then
        sums are the last.
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


def _make_matmul(kind: _FactorType, *, adds: bool) -> Callable[..., Any]:
    """The code of one product, as Numba asks for it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_at, a_step, b, b_at, k, c, c_at, c_step = args
        emit = _MatmulEmitter(builder, kind)

        def start(i: int, array: Any, steps: Any, number: ir.Type) -> Any:
            data = context.make_array(signature.args[i])(context, builder, array).data
            return emit.at(data, steps, number)

        left, right = start(0, a, a_at, kind.number), start(3, b, b_at, kind.number)
        target = start(6, c, c_at, _F32)
        lines = [
            emit.at(left, builder.mul(a_step, _I64(r)), kind.number) for r in range(REGISTER_ROWS)
        ]
        spots = [
            emit.at(target, builder.add(builder.mul(c_step, _I64(r)), _I64(v * LANES)), _F32)
            for r in range(REGISTER_ROWS)
            for v in range(REGISTERS)
        ]
        sums = [ir.Constant(_SUMS, [0.0] * LANES) for _ in spots]
        times = builder.lshr(k, _I64(1)) if kind.each == 2 else k
        with emit.loop(times, sums) as (i, so_far, after):
            across, along = (
                builder.mul(i, _I64(PANEL_COLUMNS * kind.each)),
                builder.mul(i, _I64(kind.each)),
            )
            ys = []
            for v in range(REGISTERS):
                steps = builder.add(across, _I64(v * LANES * kind.each))
                ys.append(emit.load(emit.at(right, steps, kind.number), kind.register))
            for r in range(REGISTER_ROWS):
                x = emit.spread(emit.at(lines[r], along, kind.number))
                for v in range(REGISTERS):
                    after[r * REGISTERS + v] = emit.add(so_far[r * REGISTERS + v], x, ys[v])
        for spot, total in zip(spots, sums, strict=True):
            if adds:  # at the end: sums of sums round less than one long chain
                total = builder.fadd(emit.load(spot, _SUMS), total)
            builder.store(total, builder.bitcast(spot, ir.PointerType(_SUMS)), align=4)
        return context.get_dummy_value()

    return code


def _signature(a: Any, b: Any, c: Any) -> Any:
    i = types.int64
    return types.none(a, i, i, b, i, i, c, i, i)


@intrinsic
def matmul(context, a, a_at, a_step, b, b_at, k, c, c_at, c_step):
    """c = a b, for flat arrays: a from a_at on with a_step between rows, b from b_at on, c as a; k
    is even for bf16.
    """
    kind = _BF16 if a.dtype == types.uint16 else _FP32
    return _signature(a, b, c), _make_matmul(kind, adds=False)


@intrinsic
def matmul_add(context, a, a_at, a_step, b, b_at, k, c, c_at, c_step):
    """c += a b."""
    kind = _BF16 if a.dtype == types.uint16 else _FP32
    return _signature(a, b, c), _make_matmul(kind, adds=True)


@njit_fastmath
def pack_keys(memory, tokens, D, each, out, at):
    """One panel: keys tokens[0] to tokens[1] - 1 of D dims, to out from `at` on."""
    flat, base, step, tag = memory
    first, n = tokens[0], tokens[1] - tokens[0]
    for d in range(0, D, each):
        for i in range(min(each, D - d)):
            to = at + d * PANEL_COLUMNS + i
            start = base + first * step + d + i
            for j in range(n):
                out[to + j * each] = convert(flat[start + j * step], tag, out)


@njit_fastmath
def pack_values(memory, tokens, E, each, out, at, across):
    """Keys tokens[0] to tokens[1] - 1, of every panel of E dims; panels begin `across` numbers
    apart.
    """
    flat, base, step, tag = memory
    for j in range(tokens[0], tokens[1]):
        start = base + j * step
        for e in range(0, E, PANEL_COLUMNS):
            to = at + e // PANEL_COLUMNS * across + j // each * each * PANEL_COLUMNS + j % each
            n = min(PANEL_COLUMNS, E - e)
            panel, numbers = out[to : to + n * each : each], flat[start + e : start + e + n]
            for i in range(n):
                panel[i] = convert(numbers[i], tag, out)


@njit_fastmath
def pack_panels(keys, values, sizes, packed, first, stride):
    """Panels first, first + stride, ... of the keys of all rows and heads, and the values of the
    same keys.

    keys, values: (flat memory, steps of B, G and the tokens, tag). sizes: B, G, S, D, E, numbers
        that stand together.
    packed: keys [B,G,panels of S,D,PANEL] and values [B,G,panels of E,S,PANEL], flat and zero, S
        and D rounded up.
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
