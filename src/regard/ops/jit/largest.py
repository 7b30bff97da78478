"""The largest number of a line, in vectors: a compiler looks for NaN in between, number by
number.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.ops.jit.vectors import FLOAT, LANES, VECTOR, Loop, data, number, parts

BUILT_UPON = "fd4d7c41c11f9bc4"
"""As for every file here that takes something from another (tests/ops/test_jit.py)."""


def _largest(*, absolute: bool) -> Any:
    """The largest of so many numbers, or of their sizes: NaN counts for nothing."""

    def of(context: Any, array: Any, at: Any, count: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.gep(data(context, builder, array, args[0]), [args[1]])
            least, found = 0.0 if absolute else -math.inf, []
            ends = (number(0), builder.and_(args[2], number(-LANES)), args[2])
            for lanes, begin, end in ((LANES, *ends[:2]), (1, *ends[1:])):
                kind = VECTOR if lanes > 1 else FLOAT
                loop = Loop(builder, begin, end, lanes, [_filled(kind, least)])
                here = builder.bitcast(builder.gep(place, [loop.i]), kind.as_pointer())
                x = builder.load(here, align=4)
                x = _size_of(builder, x) if absolute else x
                found += loop.close([_greater(builder, x, loop.now[0])])
            wide, most = found
            while wide.type.count > 2:
                wide = _greater(builder, *parts(builder, wide, wide.type.count // 2))
            for i in range(2):
                most = _greater(
                    builder, builder.extract_element(wide, ir.Constant(ir.IntType(32), i)), most
                )
            return most

        return types.float32(array, at, count), code

    return intrinsic(of)


def _filled(kind: Any, x: float) -> Any:
    """A number, or a vector of it."""
    return ir.Constant(kind, [x] * LANES if kind == VECTOR else x)


def _size_of(builder: Any, x: Any) -> Any:
    """|x|."""
    name = "llvm.fabs.f32" if x.type == FLOAT else f"llvm.fabs.v{LANES}f32"
    kind = ir.FunctionType(x.type, [x.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _greater(builder: Any, x: Any, y: Any) -> Any:
    """The greater of two; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


largest, largest_size = _largest(absolute=False), _largest(absolute=True)
