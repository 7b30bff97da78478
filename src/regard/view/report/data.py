"""The data of the page as text: JSON that nothing obeys, and arrays as one compressed block."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArgumentTypeError
from regard.foreign import inert

TYPES = {"float32": "f32", "float64": "f64", "uint8": "u8", "int32": "i32", "uint16": "bf16"}
"""numpy's name -> the page's; 16 bits are the upper half of a float32."""


class Packed(NamedTuple):
    """Arrays as base64 of gzip of their bytes, little-endian, and where each one is."""

    table: list[dict[str, Any]]
    text: str


def pack(arrays: Mapping[str, NDArray[Any]]) -> Packed:
    """One block of all arrays, each at a multiple of 8 bytes.

    Raises:
        ArgumentTypeError: an array of a type that the page does not read.

    >>> pack({"x": np.zeros(3, np.float32)}).table
    [{'name': 'x', 'type': 'f32', 'offset': 0, 'count': 3}]
    """
    table, blocks, offset = [], [], 0
    for name, x in arrays.items():
        if x.dtype.name not in TYPES:
            raise ArgumentTypeError(
                f"the array {name} is {x.dtype.name}; a page carries {', '.join(TYPES)}"
            )
        block = np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes()
        block += bytes(-len(block) % 8)
        table.append({"name": name, "type": TYPES[x.dtype.name], "offset": offset, "count": x.size})
        blocks.append(block)
        offset += len(block)
    packed = gzip.compress(b"".join(blocks), 6, mtime=0)
    return Packed(table, base64.b64encode(packed).decode())


def as_json(content: Any) -> str:
    """JSON that no HTML parser and no script engine reads as anything else: ASCII, without <, > and
    &.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def shown(value: Any) -> Any:
    """Plain data, its texts with everything that a page would obey or hide shown by number; numbers
    that are not finite are null.

    >>> shown({"a": ["x\\u202ey", 1, float("nan")]})
    {'a': ['x‹202E›y', 1, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return inert(value)
    if isinstance(value, Mapping):
        return {inert(str(name)): shown(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(x) for x in value]
    return value
