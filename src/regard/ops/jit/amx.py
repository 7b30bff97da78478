"""Products of bfloat16 tiles on processors with AMX, in the layouts of `matmul`.

A tile is a register of 16 rows of 64 bytes. One instruction multiplies a tile of 16 x 32 bfloat16
numbers with a tile of 32 x 16, whose rows are stored in pairs, and adds the products to a tile of
16 x 16 fp32 sums, rounded to nearest; numbers too small for a normal bfloat16 or fp32 count as 0.
`multiply_tiles` computes `TILE_PRODUCT_ROWS` rows of a panel in two halves, each with four tiles of
sums, two of a and two of b, so that each tile that is loaded is used twice.

    c_rj (+)= sum_k a_rk b_kj        r < TILE_PRODUCT_ROWS, j < columns

A thread must load a configuration of its tile registers before it multiplies
(`configure_tiles`), and other libraries configure the same registers: `restore_tiles` puts back
what the thread had before. A process must ask Linux once for the permission to use tiles
(`has_amx`), because they enlarge the state that Linux stores for each thread.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18
(programming with AMX), and volume 2 (TDPBF16PS, LDTILECFG); Linux, Documentation/arch/x86/xstate.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature

TILE_ROWS, TILE_BYTES, TILE_DEPTH = 16, 64, 32
"""The rows of a tile, the bytes of a row, and how many products of bfloat16 numbers one
instruction adds to each sum.
"""

TILE_PRODUCT_ROWS = 2 * TILE_ROWS
"""The rows of a that one call of `multiply_tiles` multiplies."""

CONFIGURATION_BYTES = 64
"""The size of a configuration of the tile registers."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _I8.as_pointer()
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@cache
def has_amx() -> bool:
    """Return whether this process may multiply bfloat16 tiles: the processor has AMX-BF16, and
    Linux gives the permission, which this function requests once for the whole process.
    """
    if not (has_cpu_feature("amx-tile") and has_cpu_feature("amx-bf16")):
        return False
    if not (sys.platform == "linux" and sys.maxsize > 2**32):
        return False
    request = ctypes.CDLL(None).syscall
    request.argtypes, request.restype = [ctypes.c_long] * 3, ctypes.c_long
    return bool(request(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


class _TileEmitter:
    """Emits instructions on tiles with an LLVM builder; a tile register is a number below 8."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _call(self, name: str, kinds: list[Any], args: list[Any]) -> None:
        """Call an LLVM function that returns nothing."""
        signature = ir.FunctionType(ir.VoidType(), kinds)
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, f"llvm.x86.{name}"
        )
        self.builder.call(function, args)

    def configuration(self, name: str, place: Any) -> None:
        """Load ("ldtilecfg") or store ("sttilecfg") the configuration of the tile registers."""
        self._call(name, [_POINTER], [place])

    def zero(self, tile: int) -> None:
        """Set a tile to 0."""
        self._call("tilezero", [_I8], [_I8(tile)])

    def load(self, tile: int, place: Any, stride: Any) -> None:
        """Load a tile from rows that are `stride` bytes apart."""
        self._call("tileloadd64", [_I8, _POINTER, _I64], [_I8(tile), place, stride])

    def store(self, tile: int, place: Any, stride: Any) -> None:
        """Store a tile to rows that are `stride` bytes apart."""
        self._call("tilestored64", [_I8, _POINTER, _I64], [_I8(tile), place, stride])

    def add_product(self, sums: int, x: int, y: int) -> None:
        """Add the product of the tiles x and y to a tile of sums."""
        self._call("tdpbf16ps", [_I8] * 3, [_I8(sums), _I8(x), _I8(y)])

    def offset(self, place: Any, size: Any) -> Any:
        """Return the pointer `size` bytes after `place`."""
        return self.builder.gep(place, [size], source_etype=_I8)


class TileRows(NamedTuple):
    """Rows in memory that are loaded as tiles.

    Args:
        start: a pointer to the first row.
        stride: the bytes from one row to the next.
        parts: where the parts begin whose sum is the factor, in bytes after `start`: one part, or
            two of a number that is the sum of two bfloat16 numbers.
    """

    start: Any
    stride: Any
    parts: tuple[Any, ...] = (_I64(0),)


def multiply_tiles(
    builder: Any, a: TileRows, b: TileRows, k: Any, c: TileRows, columns: int, *, adds: bool
) -> None:
    """Emit the code of c = a b, or with `adds` of c += a b, for TILE_PRODUCT_ROWS rows of a and one
    panel of b. Factors in two parts are multiplied part by part, into the same sums.

    Args:
        builder: the LLVM builder.
        a: the bfloat16 rows.
        b: the panel `[k/2, n, 2]` of bfloat16 numbers.
        k: the number of products in a sum, a multiple of TILE_DEPTH.
        c: the fp32 rows.
        columns: how many columns of the panel to compute, a multiple of 32.
        adds: whether the products are added to c.
    """
    emit, halves = _TileEmitter(builder), range(2)
    for first in range(0, columns, 2 * TILE_ROWS):
        sums = {}
        for i in halves:
            row = emit.offset(c.start, builder.mul(c.stride, _I64(i * TILE_ROWS)))
            for j in halves:
                sums[i, j] = emit.offset(row, _I64((first + j * TILE_ROWS) * 4))
                if adds:
                    emit.load(2 * i + j, sums[i, j], c.stride)
                else:
                    emit.zero(2 * i + j)
        steps = cgutils.for_range_slice(builder, _I64(0), k, _I64(TILE_DEPTH), intp=_I64)
        with steps as (first_product, _):
            left = emit.offset(a.start, builder.mul(first_product, _I64(2)))
            row = builder.lshr(first_product, _I64(1))  # a row of b has two products
            right = emit.offset(b.start, builder.mul(row, b.stride))
            right = emit.offset(right, _I64(first * 4))
            _multiply_parts(emit, (left, a), (right, b))
        for (i, j), place in sums.items():
            emit.store(2 * i + j, place, c.stride)


def _multiply_parts(
    emit: _TileEmitter, left: tuple[Any, TileRows], right: tuple[Any, TileRows]
) -> None:
    """Emit the products of all parts of four tiles, two of a and two of b, each given by where its
    tiles begin and the rows. Neighbouring products share the part of one factor, so that only the
    other one is loaded.
    """
    (left_start, a), (right_start, b) = left, right
    halves = range(2)
    lower = emit.builder.mul(a.stride, _I64(TILE_ROWS))
    pairs = [
        (x, y)
        for y in range(len(b.parts))
        for x in (range(len(a.parts)) if y % 2 == 0 else reversed(range(len(a.parts))))
    ]
    before: tuple[int | None, int | None] = None, None
    for x, y in pairs:
        x_start = emit.offset(left_start, a.parts[x])
        y_start = emit.offset(right_start, b.parts[y])
        for i in halves:
            if x != before[0]:
                emit.load(4 + i, emit.offset(x_start, lower) if i else x_start, a.stride)
            if y != before[1]:
                emit.load(6 + i, emit.offset(y_start, _I64(i * TILE_ROWS * 4)), b.stride)
        for i in halves:
            for j in halves:
                emit.add_product(2 * i + j, 4 + i, 6 + j)
        before = x, y


def _configuration() -> bytes:
    """Return the configuration of eight tiles of 16 rows of 64 bytes: palette 1, the bytes of a
    row of each tile as 16 bits from byte 16 on, and the rows of each from byte 48 on.
    """
    row_bytes = TILE_BYTES.to_bytes(2, "little") * 8 + bytes(16)
    return bytes([1, *bytes(15)]) + row_bytes + bytes([TILE_ROWS] * 8 + [0] * 8)


@intrinsic
def configure_tiles(context, factors, memory):
    """Store the configuration of this thread's tile registers in `memory`, and load that of
    `multiply_tiles`; no effect if the products of `factors` use no tiles.

    memory: 2 CONFIGURATION_BYTES bytes.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if factors.dtype == types.int16:
            emit, place = _TileEmitter(builder), _bytes_of(context, builder, memory, args[1])
            emit.configuration("sttilecfg", place)
            own = emit.offset(place, _I64(CONFIGURATION_BYTES))
            for i, x in enumerate(_configuration()):
                builder.store(_I8(x), emit.offset(own, _I64(i)))
            emit.configuration("ldtilecfg", own)
        return context.get_dummy_value()

    return types.none(factors, memory), code


@intrinsic
def restore_tiles(context, factors, memory):
    """Load the configuration that `configure_tiles` stored in `memory`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if factors.dtype == types.int16:
            place = _bytes_of(context, builder, memory, args[1])
            _TileEmitter(builder).configuration("ldtilecfg", place)
        return context.get_dummy_value()

    return types.none(factors, memory), code


def _bytes_of(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Return a pointer to the bytes of an array."""
    return builder.bitcast(context.make_array(kind)(context, builder, array).data, _POINTER)
