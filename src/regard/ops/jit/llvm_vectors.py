"""Functions that emit loops over LLVM vectors, for which LLVM generates vector instructions on
every processor. In loops written in plain Python, the compiler would keep sums in memory instead of
registers, and would check every number for NaN in a maximum.

A vector here is `LANES` float32 numbers. The functions run while Numba compiles, and emit code with
an LLVM builder; they do not run when a kernel runs.
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
"""The number of float32 numbers in a vector."""

CACHE_LINE = 64
"""The size in bytes of a cache line."""

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
    """Return n as an LLVM constant of 64 bits."""
    return ir.Constant(I64, n)


def shuffle_mask(order: Sequence[int]) -> Any:
    """Return the mask of a shuffle: the index of the source lane for each lane."""
    return ir.Constant(ir.VectorType(_I32, len(order)), list(order))


def broadcast(builder: Any, x: Any, lanes: int = LANES) -> Any:
    """Return a vector with the number x in every lane."""
    empty = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    one = builder.insert_element(empty, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, shuffle_mask([0] * lanes))


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x y + z, rounded once."""
    kind = ir.FunctionType(x.type, [x.type] * 3)
    name = f"llvm.fma.v{x.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


HAS_BF16_DOT = has_cpu_feature("avx512bf16")
"""Whether the processor multiplies pairs of bfloat16 numbers and adds both products to a
float32, rounded like two fused multiply-adds.
"""

_WORDS = ir.VectorType(_I32, LANES)
"""The type of a vector of pairs of bfloat16 numbers. Newer versions of LLVM have a bfloat type,
which llvmlite cannot name; they upgrade calls with this type automatically.
"""


def load_bf16_pairs(builder: Any, place: Any) -> Any:
    """Load 32 bfloat16 numbers from a pointer to 16-bit numbers."""
    return builder.load(builder.bitcast(place, _WORDS.as_pointer()), align=2)


def bf16_dot_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return z + x y, where every lane of z gets the products of two neighbours."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _WORDS, _WORDS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [z, x, y])


def load_floats(builder: Any, place: Any, tag: Any, lanes: int) -> Any:
    """Load numbers from a pointer as a vector of float32: `lanes` = LANES numbers, or with `lanes`
    = 1 one number followed by zeros.

    place: a pointer to float32, or to 16-bit numbers that the tag (a Numba type: int8 for bfloat16,
    int16 for float16) describes.
    """
    stored = place.type.pointee
    if lanes == 1:
        wide = _to_float32(builder, builder.load(place), tag, 0)
        return builder.insert_element(ZEROS, wide, ir.Constant(_I32, 0))
    kind = ir.VectorType(stored, lanes)
    x = builder.load(builder.bitcast(place, kind.as_pointer()), align=_type_size(stored))
    return _to_float32(builder, x, tag, lanes)


def _to_float32(builder: Any, x: Any, tag: Any, lanes: int) -> Any:
    """Convert a vector of `lanes` stored numbers to float32; `lanes` is 0 for a single number."""

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
    """Return the size in bytes of a number of this LLVM type."""
    return 4 if kind == FLOAT else 1 if kind == _I8 else 2


def pointee_size(place: Any) -> int:
    """Return the size in bytes of the number that a pointer points to."""
    return _type_size(place.type.pointee)


def store(builder: Any, x: Any, place: Any, lanes: int = LANES) -> None:
    """Store the first lanes of a vector at a pointer to float32."""
    if lanes == 1:
        builder.store(builder.extract_element(x, ir.Constant(_I32, 0)), place)
        return
    if lanes < x.type.count:
        x = builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), shuffle_mask(range(lanes)))
    builder.store(x, builder.bitcast(place, x.type.as_pointer()), align=4)


def lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return the sum of the lanes of each of 2^n vectors, as one vector of 2^n numbers.

    Halves of two vectors are added in one instruction, until one number per vector is left.
    """
    remaining, width = list(vectors), LANES
    while len(remaining) > 1:
        half, low = len(remaining) // 2, []
        for group in range(LANES // width):
            for source in (0, LANES):
                low += [source + group * width + i for i in range(width // 2)]
        high = shuffle_mask([i + width // 2 for i in low])
        pairs = zip(remaining[:half], remaining[half:], strict=True)
        remaining = [
            builder.fadd(
                builder.shuffle_vector(x, y, shuffle_mask(low)), builder.shuffle_vector(x, y, high)
            )
            for x, y in pairs
        ]
        width //= 2
    (x,) = remaining
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
    """Split a vector into vectors of `size` lanes."""
    empty = ir.Constant(x.type, ir.Undefined)
    cuts = range(0, x.type.count, size)
    return [builder.shuffle_vector(x, empty, shuffle_mask(range(i, i + size))) for i in cuts]


def prefetch_elements(builder: Any, place: Any, length: Any) -> None:
    """Prefetch the cache lines of `length` numbers from a pointer on into the L2 cache, in order;
    prefetching past the end of an array has no effect.
    """
    step = i64_constant(CACHE_LINE // pointee_size(place))
    with cgutils.for_range_slice(builder, i64_constant(0), length, step, intp=I64) as (i, _):
        prefetch_bytes(builder, builder.gep(place, [i]), 0, CACHE_LINE)


def prefetch_bytes(builder: Any, place: Any, ahead: int, size: int) -> None:
    """Prefetch the cache lines of `size` bytes into the L2 cache, beginning `ahead` bytes after a
    pointer.
    """
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(place, _I8.as_pointer())
    for offset in range(ahead, ahead + size, CACHE_LINE):
        address = builder.gep(start, [i64_constant(offset)])
        builder.call(function, [address, *(ir.Constant(_I32, x) for x in (0, 2, 1))])


@intrinsic
def prefetch_array(context: Any, memory: Any, index: Any, size: Any) -> Any:
    """Prefetch the cache lines of `size` elements of the flat array `memory` from `index` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, memory, args[0]), [args[1]])
        prefetch_elements(builder, place, args[2])
        return context.get_dummy_value()

    return types.void(memory, index, size), code


class LLVMLoop:
    """Emits `for index in range(start, stop, step)` with values that are carried from one iteration
    to the next.

    The code that the builder emits between the constructor and `close` is the body of the loop. In
    it, `index` is the loop index and `now` the list of carried values of the current iteration.

    Args:
        builder: the LLVM builder.
        start: the first index.
        stop: the end of the range.
        step: the step of the range.
        carried: the values before the first iteration.
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
        self.index = builder.phi(I64)
        self.index.add_incoming(start, before)
        self.now = [builder.phi(x.type) for x in carried]
        for phi, x in zip(self.now, carried, strict=True):
            phi.add_incoming(x, before)
        builder.cbranch(builder.icmp_signed("<", self.index, stop), body, self._end)
        builder.position_at_end(body)

    def close(self, carried: Sequence[Any] = ()) -> list[Any]:
        """End the body with the values for the next iteration, and return the final values."""
        builder = self._builder
        self.index.add_incoming(builder.add(self.index, i64_constant(self._step)), builder.block)
        for phi, x in zip(self.now, carried, strict=True):
            phi.add_incoming(x, builder.block)
        builder.branch(self._head)
        builder.position_at_end(self._end)
        return self.now


def array_data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Return a pointer to the first element of an array."""
    return context.make_array(kind)(context, builder, array).data


def row_pointer(context: Any, builder: Any, kind: Any, array: Any, row: Any) -> Any:
    """Return a pointer to a row of an array `[R, n]`, whose rows may lie apart."""
    struct = context.make_array(kind)(context, builder, value=array)
    distance = cgutils.unpack_tuple(builder, struct.strides)[0]
    start = builder.bitcast(struct.data, _I8.as_pointer())
    place = builder.gep(start, [builder.mul(row, distance)])
    return builder.bitcast(place, struct.data.type)


def _make_max(*, absolute: bool) -> Any:
    """Return a compiled function of (array, start, count) that returns the largest of `count`
    numbers of a flat array from `start` on, or of their absolute values; NaN is ignored.
    """

    def of(context: Any, array: Any, start: Any, count: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.gep(array_data(context, builder, array, args[0]), [args[1]])
            least, maxima = 0.0 if absolute else -math.inf, []
            bounds = (i64_constant(0), builder.and_(args[2], i64_constant(-LANES)), args[2])
            for lanes, begin, end in ((LANES, *bounds[:2]), (1, *bounds[1:])):
                kind = VECTOR if lanes > 1 else FLOAT
                loop = LLVMLoop(builder, begin, end, lanes, [_constant(kind, least)])
                position = builder.bitcast(builder.gep(place, [loop.index]), kind.as_pointer())
                x = builder.load(position, align=4)
                x = _abs(builder, x) if absolute else x
                maxima += loop.close([_maximum(builder, x, loop.now[0])])
            vector, result = maxima
            while vector.type.count > 2:
                vector = _maximum(builder, *split_vector(builder, vector, vector.type.count // 2))
            for i in range(2):
                result = _maximum(
                    builder, builder.extract_element(vector, ir.Constant(ir.IntType(32), i)), result
                )
            return result

        return types.float32(array, start, count), code

    return intrinsic(of)


def _constant(kind: Any, x: float) -> Any:
    """Return the constant x, or a vector with x in every lane, as an LLVM value of this type."""
    return ir.Constant(kind, [x] * LANES if kind == VECTOR else x)


def _abs(builder: Any, x: Any) -> Any:
    """Return the absolute value of a number or of each lane."""
    name = "llvm.fabs.f32" if x.type == FLOAT else f"llvm.fabs.v{LANES}f32"
    kind = ir.FunctionType(x.type, [x.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _maximum(builder: Any, x: Any, y: Any) -> Any:
    """Return the greater of two numbers, lane by lane; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


max_of, max_abs_of = _make_max(absolute=False), _make_max(absolute=True)


@intrinsic
def use_wide_vectors(context):
    """Let LLVM use vectors of 512 bits for the loops of the function that calls this; a processor
    without them is not affected.

    LLVM prefers 256 bits on Intel's processors, because the first of them that had AVX-512 lowered
    their clock for wide vectors.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite lists the attributes that it knows, and this is not one of them
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), code
