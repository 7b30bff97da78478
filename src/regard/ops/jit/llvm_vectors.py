"""Loops written in LLVM's vectors, which every processor has in some width. Left to itself, the
compiler keeps sums in memory, and looks for NaN number by number when it wants a maximum.

A vector here is `LANES` float32. The functions here write code with an LLVM builder while Numba
compiles; none of them runs when a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.compile import has_cpu_feature

LANES = 16
CACHE_LINE = 64
"""Bytes of a cache line."""

_I8, _I16, _I32, I64, FLOAT = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
VECTOR = ir.VectorType(FLOAT, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)


def i64_constant(n: int) -> Any:
    """A constant."""
    return ir.Constant(I64, n)


def shuffle_mask(order: Sequence[int]) -> Any:
    """The mask of a shuffle."""
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def broadcast(builder: Any, x: Any, lanes: int = LANES) -> Any:
    """A number in every lane."""
    empty = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    one = builder.insert_element(empty, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, shuffle_mask([0] * lanes))


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    kind = ir.FunctionType(x.type, [x.type] * 3)
    name = f"llvm.fma.v{x.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


HAS_BF16_DOT = has_cpu_feature("avx512bf16")
"""Whether the processor multiplies pairs of bfloat16, and adds both products to a float32 with the
rounding of two fma.
"""

_WORDS = ir.VectorType(_I32, LANES)
"""Pairs of bfloat16: newer LLVM has a type for them, which llvmlite cannot name, and makes it of
these by itself.
"""


def load_bf16_pairs(builder: Any, place: Any) -> Any:
    """32 numbers in bfloat16 from a place of 16 bits each on."""
    return builder.load(builder.bitcast(place, _WORDS.as_pointer()), align=2)


def bf16_dot_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """z + x y, where every lane of z takes the products of two neighbours."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _WORDS, _WORDS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [z, x, y])


def load_floats(builder: Any, place: Any, tag: Any, lanes: int) -> Any:
    """Load as many numbers as lanes from a place on, as floats: 16, or one with zeros behind it.

    place: a pointer to float32, or to 16 bits that the tag (a Numba type: int8 bfloat16, int16
        float16) gives a meaning.
    """
    stored = place.type.pointee
    if lanes == 1:
        wide = _to_float32(builder, builder.load(place), tag, 0)
        return builder.insert_element(ZEROS, wide, ir.Constant(_I32, 0))
    kind = ir.VectorType(stored, lanes)
    x = builder.load(builder.bitcast(place, kind.as_pointer()), align=_type_size(stored))
    return _to_float32(builder, x, tag, lanes)


def _to_float32(builder: Any, x: Any, tag: Any, lanes: int) -> Any:
    """Numbers as they are stored -> as float32; lanes 0 is no vector."""

    def of(kind: Any) -> Any:
        return ir.VectorType(kind, lanes) if lanes else kind

    if x.type == of(FLOAT):
        return x
    if tag == types.int16:
        return builder.fpext(builder.bitcast(x, of(ir.HalfType())), of(FLOAT))
    bits = builder.zext(x, of(_I32))
    upper = ir.Constant(of(_I32), [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(bits, upper), of(FLOAT))


def _type_size(kind: Any) -> int:
    return 4 if kind == FLOAT else 1 if kind == _I8 else 2


def pointee_size(place: Any) -> int:
    """Bytes of what a pointer points to."""
    return _type_size(place.type.pointee)


def store(builder: Any, x: Any, place: Any, lanes: int = LANES) -> None:
    """Store the first lanes of a vector at a float's place."""
    if lanes == 1:
        builder.store(builder.extract_element(x, ir.Constant(_I32, 0)), place)
        return
    if lanes < x.type.count:
        x = builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), shuffle_mask(range(lanes)))
    builder.store(x, builder.bitcast(place, x.type.as_pointer()), align=4)


def lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sum of each vector's lanes, 2^n vectors -> one vector of 2^n numbers, by halves: an add
    serves several sums.
    """
    found, width = list(vectors), LANES
    while len(found) > 1:
        half, low = len(found) // 2, []
        for group in range(LANES // width):
            for source in (0, LANES):
                low += [source + group * width + i for i in range(width // 2)]
        high = shuffle_mask([i + width // 2 for i in low])
        pairs = zip(found[:half], found[half:], strict=True)
        found = [
            builder.fadd(
                builder.shuffle_vector(x, y, shuffle_mask(low)), builder.shuffle_vector(x, y, high)
            )
            for x, y in pairs
        ]
        width //= 2
    (x,) = found
    while width > 1:
        low = [
            group * width + i for group in range(x.type.count // width) for i in range(width // 2)
        ]
        empty, high = ir.Constant(x.type, ir.Undefined), shuffle_mask([i + width // 2 for i in low])
        x = builder.fadd(
            builder.shuffle_vector(x, empty, shuffle_mask(low)),
            builder.shuffle_vector(x, empty, high),
        )
        width //= 2
    return x


def split_vector(builder: Any, x: Any, size: int) -> list[Any]:
    """A vector cut into vectors of a size."""
    empty = ir.Constant(x.type, ir.Undefined)
    cuts = range(0, x.type.count, size)
    return [builder.shuffle_vector(x, empty, shuffle_mask(range(i, i + size))) for i in cuts]


def prefetch_elements(builder: Any, place: Any, length: Any) -> None:
    """Ask for the cache lines of so many numbers from a place on, for the second cache, in order;
    past an end it does no harm.
    """
    step = i64_constant(CACHE_LINE // pointee_size(place))
    with cgutils.for_range_slice(builder, i64_constant(0), length, step, intp=I64) as (i, _):
        prefetch_bytes(builder, builder.gep(place, [i]), 0, CACHE_LINE)


def prefetch_bytes(builder: Any, place: Any, ahead: int, size: int) -> None:
    """Ask for the lines of so many bytes, so many bytes ahead of a place."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(place, _I8.as_pointer())
    for at in range(ahead, ahead + size, CACHE_LINE):
        line = builder.gep(start, [i64_constant(at)])
        builder.call(function, [line, *(ir.Constant(_I32, x) for x in (0, 2, 1))])


@intrinsic
def prefetch_array(context: Any, memory: Any, at: Any, size: Any) -> Any:
    """Ask for the lines of so many bytes from a place of a flat array on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, memory, args[0]), [args[1]])
        prefetch_elements(builder, place, args[2])
        return context.get_dummy_value()

    return types.void(memory, at, size), code


class LLVMLoop:
    """for i in range(start, stop, step), with values carried from turn to turn.

    Between making and `close` the builder stands in the body; `now` are the carried values there,
    and after `close` those of the end.
    """

    def __init__(
        self, builder: Any, start: Any, stop: Any, step: int, carried: Sequence[Any] = ()
    ) -> None:
        self._builder, self._step, before = builder, step, builder.block
        self._head, body, self._end = (
            builder.append_basic_block(x) for x in ("head", "body", "end")
        )
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.i = builder.phi(I64)
        self.i.add_incoming(start, before)
        self.now = [builder.phi(x.type) for x in carried]
        for phi, x in zip(self.now, carried, strict=True):
            phi.add_incoming(x, before)
        builder.cbranch(builder.icmp_signed("<", self.i, stop), body, self._end)
        builder.position_at_end(body)

    def close(self, carried: Sequence[Any] = ()) -> list[Any]:
        """End the body with the values for the next turn; gives those of the end."""
        builder = self._builder
        self.i.add_incoming(builder.add(self.i, i64_constant(self._step)), builder.block)
        for phi, x in zip(self.now, carried, strict=True):
            phi.add_incoming(x, builder.block)
        builder.branch(self._head)
        builder.position_at_end(self._end)
        return self.now


def array_data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Where the memory of an array begins."""
    return context.make_array(kind)(context, builder, array).data


def row_pointer(context: Any, builder: Any, kind: Any, array: Any, row: Any) -> Any:
    """Where a row of an array [R,n] begins."""
    made = context.make_array(kind)(context, builder, value=array)
    width = cgutils.unpack_tuple(builder, made.shape)[1]
    return builder.gep(made.data, [builder.mul(row, width)])


def _make_max(*, absolute: bool) -> Any:
    """The largest of so many numbers, or of their sizes: NaN counts for nothing."""

    def of(context: Any, array: Any, at: Any, count: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.gep(array_data(context, builder, array, args[0]), [args[1]])
            least, found = 0.0 if absolute else -math.inf, []
            ends = (i64_constant(0), builder.and_(args[2], i64_constant(-LANES)), args[2])
            for lanes, begin, end in ((LANES, *ends[:2]), (1, *ends[1:])):
                kind = VECTOR if lanes > 1 else FLOAT
                loop = LLVMLoop(builder, begin, end, lanes, [_constant(kind, least)])
                here = builder.bitcast(builder.gep(place, [loop.i]), kind.as_pointer())
                x = builder.load(here, align=4)
                x = _abs(builder, x) if absolute else x
                found += loop.close([_maximum(builder, x, loop.now[0])])
            wide, most = found
            while wide.type.count > 2:
                wide = _maximum(builder, *split_vector(builder, wide, wide.type.count // 2))
            for i in range(2):
                most = _maximum(
                    builder, builder.extract_element(wide, ir.Constant(ir.IntType(32), i)), most
                )
            return most

        return types.float32(array, at, count), code

    return intrinsic(of)


def _constant(kind: Any, x: float) -> Any:
    """A number, or a vector of it."""
    return ir.Constant(kind, [x] * LANES if kind == VECTOR else x)


def _abs(builder: Any, x: Any) -> Any:
    """|x|."""
    name = "llvm.fabs.f32" if x.type == FLOAT else f"llvm.fabs.v{LANES}f32"
    kind = ir.FunctionType(x.type, [x.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _maximum(builder: Any, x: Any, y: Any) -> Any:
    """The greater of two; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


max_of, max_abs_of = _make_max(absolute=False), _make_max(absolute=True)
