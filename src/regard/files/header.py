"""The header of a safetensors file, checked in full before a byte of its data is read or memory is
taken for it.

A file is 8 bytes (the header's length N, little-endian), N bytes of JSON, and the data:

    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]},
    ...}

The offsets count from the end of the header; the tensors fill the data without a hole and without
an overlap.

Source: the format's specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import ArgumentError
from regard.files import strict
from regard.files.regular import Mark, exactly, opened
from regard.files.seems import AGAIN, instead, refused
from regard.foreign import shown

HEADER_LIMIT = 100_000_000
"""Most bytes of a header: the official reader's bound."""
TENSOR_LIMIT = 1 << 18
"""Most tensors of a file; the largest models have a third of that in all."""
NAME_LIMIT = 1024
DIMENSION_LIMIT = 25
"""Most dimensions of a tensor: more than that, several operations of torch refuse."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's dtypes that torch computes with. Those of less than a byte (F4, F6) are refused."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `bytes` bytes of `file`, from `start` on, little-endian and row by
    row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds, in the order of its data, and the state of the file that was
    checked.
    """

    file: Path
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]
    mark: Mark


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; of the data nothing is read.

    Raises:
        FileError: the file is no whole safetensors file; the message says what it has, and what it
            seems to be.

    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.zeros(2, 3)}, "a.safetensors")
    >>> stored = read_header(Path("a.safetensors")).tensors[0]
    >>> stored.name, stored.dtype, stored.shape, stored.bytes
    ('a', torch.float32, (2, 3), 24)
    """
    with opened(path) as (file, mark):
        head = file.read(64)
        length = _length(path, head, mark.size)
        file.seek(8)
        raw = exactly(file, length, path)
    data = mark.size - 8 - length
    try:
        table = strict.parse(raw)
        metadata = _metadata(table.pop("__metadata__", {}))
        found = _tensors(table, path, 8 + length)
    except ArgumentError as e:
        raise refused(path, f"its header {e}") from e
    end = found[-1].start + found[-1].bytes - 8 - length if found else 0
    _check_data(path, end, data, mark.size)
    return Header(path, found, metadata, mark)


def _length(path: Path, head: bytes, size: int) -> int:
    """The header's length, which fits into the file."""
    length = int.from_bytes(head[:8], "little")
    allowed = 2 <= length <= HEADER_LIMIT
    # lengths such as 0x580 begin with the byte of a pickle: what follows them decides
    if len(head) >= 8 and allowed and head[8:9] in (b"{", b""):
        if length <= size - 8:
            return length
        raise refused(path, f"its header alone needs {8 + length}", _partial(size))
    kind = instead(head)
    if kind:
        raise refused(path, "its first bytes are no header's length", kind)
    if len(head) < 8:
        raise refused(path, "a header's length has 8", _partial(size))
    if not allowed:
        raise refused(path, f"its header has {length} bytes; 2 to {HEADER_LIMIT} are allowed")
    raise refused(path, f"its header does not begin with {{ but with {head[8:16]!r}")


def _partial(size: int) -> str:
    return f"{size} bytes; is it a partial download?"


def _check_data(path: Path, end: int, data: int, size: int) -> None:
    """The data is as long as the header says."""
    if data < end:
        raise refused(
            path,
            f"its data ends after {data} of {end} bytes",
            f"it has {size} of {size - data + end} bytes; is it a partial download?",
        )
    if data > end:
        raise refused(
            path,
            f"{data - end} bytes follow its last tensor",
            f"it has {size} bytes, {size - data + end} are described; {AGAIN}",
        )


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
        raise ArgumentError("has a __metadata__ that is no object of strings")
    return found


def _tensors(table: Mapping[str, Any], path: Path, base: int) -> tuple[Stored, ...]:
    """The tensors in the order of their data, without a hole and without an overlap."""
    if len(table) > TENSOR_LIMIT:
        raise ArgumentError(f"names {len(table)} tensors; at most {TENSOR_LIMIT} are read")
    found = [_stored(name, entry, path, base) for name, entry in table.items()]
    found.sort(key=lambda x: (x.start, x.bytes))  # an empty tensor before the one that begins there
    end = base
    for x in found:
        if x.start != end:
            what = "overlaps the one before it" if x.start < end else "leaves a hole before it"
            raise ArgumentError(
                f"gives {shown(x.name)} data from byte {x.start - base} on, which {what} (up to "
                f"{end - base})"
            )
        end += x.bytes
    return tuple(found)


def _stored(name: str, entry: Any, path: Path, base: int) -> Stored:
    """One entry, checked by itself, in Python's integers, which do not overflow."""
    if len(name) > NAME_LIMIT:
        raise ArgumentError(f"has a name of {len(name)} letters; at most {NAME_LIMIT} are allowed")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        keys = sorted(map(shown, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ArgumentError(f"gives {shown(name)} {keys}; it must be dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ArgumentError(
            f"gives {shown(name)} the dtype {dtype!r:.100}; allowed: {', '.join(DTYPES)}"
        )
    shape = _whole_numbers(name, "shape", entry["shape"])
    if len(shape) > DIMENSION_LIMIT:
        raise ArgumentError(
            f"gives {shown(name)} {len(shape)} dimensions; at most {DIMENSION_LIMIT} are allowed"
        )
    offsets = _whole_numbers(name, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ArgumentError(
            f"gives {shown(name)} the data_offsets {offsets!r:.100}; two are needed, begin <= end"
        )
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if size != offsets[1] - offsets[0]:
        raise ArgumentError(
            f"gives {shown(name)} {offsets[1] - offsets[0]} bytes; {dtype} {shape} has {size}"
        )
    if math.prod(max(1, x) for x in shape) * DTYPES[dtype].itemsize >= 1 << 63:
        raise ArgumentError(f"gives {shown(name)} the shape {shape}, which torch cannot count")
    return Stored(name, DTYPES[dtype], tuple(shape), path, base + offsets[0], size)


def _whole_numbers(name: str, key: str, found: Any) -> list[int]:
    if not isinstance(found, list) or not all(type(x) is int and x >= 0 for x in found):
        raise ArgumentError(
            f"gives {shown(name)} the {key} {found!r:.100}; it must be a list of integers >= 0"
        )
    return found
