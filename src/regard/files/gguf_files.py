"""GGUF files of llama.cpp: the metadata, and the names, block formats, shapes and places of the
tensors.

A file is little-endian and consists of

    "GGUF", uint32 version, uint64 tensors, uint64 keys
    keys times:     string key, uint32 type, value
    tensors times:  string name, uint32 dimensions, uint64 sizes, uint32 format, uint64 offset
    the data of the tensors, each at a multiple of `general.alignment` bytes (32 without this key)

where a string is a uint64 length and UTF-8. Sizes are stored with the innermost dimension first, so
that a matrix [N, M] is stored as (M, N). Rows are stored one after the other, each in blocks.

Nothing is allocated for a number before the file was found to have that many bytes, and tensors
fill the data without gaps; other versions, byte orders and repeated names raise.

Source: the GGUF specification of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from regard.errors import FileError
from regard.files.reading import FileState, file_state, open_regular, read_into
from regard.files.safetensors_files import (
    HEADER_LIMIT,
    NAME_LIMIT,
    TENSOR_LIMIT,
    StoredTensor,
    identify_format,
    read_tensors,
)
from regard.units import plural
from regard.untrusted_text import short_repr

MAGIC = b"GGUF"
KEY_LIMIT = 1 << 16
"""The largest number of keys of metadata; published files have fewer than 100."""
DIMENSION_LIMIT = 4
"""The largest number of dimensions of a tensor in the format."""
PANEL_BYTES = 1 << 20
"""How many bytes of a tensor are read at a time."""

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


class BlockFormat(NamedTuple):
    """How the numbers of a row are stored: elements and bytes in a block, and llama.cpp's name."""

    name: str
    elements: int
    bytes: int


_NOT_READ = frozenset({"Q1_0", "Q8_1", "Q8_K", "I8", "I16", "I64", "F64"})
"""Formats of the library that no weight has, or that it cannot read."""


@cache
def block_formats() -> Mapping[int, BlockFormat]:
    """Return the formats of weights that are read, by their numbers in a file."""
    from gguf.constants import GGML_QUANT_SIZES  # 0.2 s that only readers of such files wait

    return {
        int(kind): BlockFormat(kind.name, elements, bytes_)
        for kind, (elements, bytes_) in GGML_QUANT_SIZES.items()
        if kind.name not in _NOT_READ
    }


_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor in a file; the innermost dimension of its shape is the last."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    file: Path
    start: int
    bytes: int

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a row."""
        return self.shape[-1] // self.format.elements * self.format.bytes

    def rows(self, first: int, last: int) -> GgufTensor:
        """Return the rows first <= i < last of a matrix."""
        size = (last - first) * self.row_bytes
        start = self.start + first * self.row_bytes
        return replace(self, shape=(last - first, self.shape[1]), start=start, bytes=size)

    def part(self, i: int) -> GgufTensor:
        """Return the part with index i in the outermost dimension, such as an expert's matrix."""
        size = self.bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + i * size, bytes=size)


@dataclass(frozen=True)
class GgufHeader:
    """The checked header of a GGUF file, or of all its parts, with their states; tensors are in the
    order of the data.
    """

    file: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]
    marks: Mapping[Path, FileState]


def is_gguf(path: Path) -> bool:
    """Return whether a path is a regular file that begins as GGUF files do."""
    if not path.is_file():
        return False
    with open_regular(path) as (file, _):
        return file.read(len(MAGIC)) == MAGIC


_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of a file that is one of several, as llama-gguf-split writes it."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, without its data; of a file that is one of several,
    those of all, whose metadata are in the first.
    """
    header = _read_one_header(path)
    count = header.metadata.get("split.count", 0)
    if count in (0, 1):
        return header
    match = _PART.search(path.name)
    if (
        type(count) is not int
        or match is None
        or count != int(match[2])
        or not 1 <= int(match[1]) <= count
    ):
        raise invalid_gguf(
            path,
            f"it is one of {short_repr(count)} parts, whose names must end with "
            "-00001-of-00002.gguf and so on; give them the names that they had",
        )
    name = path.name[: match.start()]
    files = [path.with_name(f"{name}-{i:05}-of-{match[2]}.gguf") for i in range(1, count + 1)]
    if missing := [x.name for x in files if not x.is_file()]:
        raise FileError(
            f"{path} is one of {count} parts, and {len(missing)} are missing: "
            f"{', '.join(map(short_repr, missing[:3]))}; put all parts into one folder"
        )
    tensors: dict[str, GgufTensor] = {}
    parts = [_read_one_header(x) for x in files]
    for i, part in enumerate(parts):
        numbering = part.metadata.get("split.no"), part.metadata.get("split.count")
        if numbering != (i, count) or tensors.keys() & part.tensors.keys():
            raise invalid_gguf(
                part.file,
                f"it is not part {i + 1} of {count} of {short_repr(files[0].name)}; are all parts "
                "from one download?",
            )
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise invalid_gguf(
            files[0],
            f"its parts have {plural(len(tensors), 'tensor')}, and the first part says "
            f"{short_repr(total)}",
        )
    marks = {x.file: x.marks[x.file] for x in parts}
    return GgufHeader(
        files[0], parts[0].metadata, MappingProxyType(tensors), MappingProxyType(marks)
    )


def _read_one_header(path: Path) -> GgufHeader:
    """Read and check the header of one file."""
    with open_regular(path) as (file, mark):
        reader = _HeaderReader(path, file, mark.size)
        _check_beginning(reader)
        tensor_count, key_count = reader.number("<u8"), reader.number("<u8")
        reader.check_count("tensor", tensor_count, TENSOR_LIMIT, 24)
        reader.check_count("key", key_count, KEY_LIMIT, 13)
        metadata = _read_metadata(reader, key_count)
        alignment = _alignment(reader, metadata)
        entries = [_read_entry(reader) for _ in range(tensor_count)]
        start = -(-reader.position // alignment) * alignment
    tensors = _place(path, entries, start, alignment, mark.size)
    marks = MappingProxyType({path: mark})
    return GgufHeader(path, MappingProxyType(metadata), MappingProxyType(tensors), marks)


def invalid_gguf(path: Path, problem: str) -> FileError:
    """Return the error for a file that cannot be read, with what is wrong."""
    return FileError(f"{path} is not a GGUF file that can be read: {problem}")


class _HeaderReader:
    """Reads the header from its beginning, in large pieces, and never past the end of the file."""

    def __init__(self, path: Path, file: FileIO, size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self._file, self._buffer = file, bytearray()

    def invalid(self, problem: str) -> FileError:
        """Return the error for this file, with what is wrong."""
        return invalid_gguf(self.path, problem)

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes."""
        end = self.position + count
        if end > self.size:
            raise self.invalid(
                f"its header ends after {self.size} bytes and needs at least {end}; is it a "
                "partial download?"
            )
        if end > HEADER_LIMIT:
            raise self.invalid(f"its header has more than {HEADER_LIMIT} bytes, which are the most")
        if end > len(self._buffer):
            more = min(self.size, max(end, len(self._buffer) + (1 << 20))) - len(self._buffer)
            piece = bytearray(more)
            read_into(self._file, memoryview(piece), self.path)
            self._buffer = self._buffer + piece
        taken = memoryview(self._buffer)[self.position : end]
        self.position = end
        return taken

    def number(self, kind: str) -> int:
        """Return the next number of a numpy type."""
        return int.from_bytes(self.take(np.dtype(kind).itemsize), "little")

    def text(self, what: str, limit: int | None = None) -> str:
        """Return the next string, whose length is stored before it."""
        length = self.number("<u8")
        if limit is not None and length > limit:
            raise self.invalid(f"{what} has {plural(length, 'byte')}; at most {limit} are allowed")
        raw = self.take(length)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.invalid(f"{what} is not UTF-8: {short_repr(bytes(raw[:40]))}") from None

    def texts(self, what: str, count: int) -> list[str]:
        """Return the next strings: a vocabulary has a quarter of a million of them."""
        strings: list[str] = []
        while len(strings) < count:
            buffer, start = self._buffer, self.position
            end = min(len(buffer), HEADER_LIMIT)
            while len(strings) < count and start + 8 <= end:
                stop = start + 8 + int.from_bytes(buffer[start : start + 8], "little")
                if stop > end:
                    break
                try:
                    strings.append(buffer[start + 8 : stop].decode())
                except UnicodeDecodeError:
                    break
                start = stop
            self.position = start
            if len(strings) < count:  # reads the next piece of the file, or says what is wrong
                strings.append(self.text(what))
        return strings

    def check_count(self, what: str, count: int, limit: int, least: int, of: str = "") -> None:
        """Raise for more entries than are allowed, or than fit into the rest of the file."""
        if count > limit or count * least > self.size - self.position:
            raise self.invalid(
                f"it says that {plural(count, what)}{of} follow, and has "
                f"{self.size - self.position} bytes left; at most {limit} are read"
            )


def _check_beginning(reader: _HeaderReader) -> None:
    head = bytes(reader.take(min(reader.size, 4)))
    if head != MAGIC:
        kind = identify_format(head)
        raise reader.invalid(
            f"it begins with {head!r}, not with {MAGIC!r}{f'; {kind}' if kind else ''}"
        )
    version = reader.number("<u4")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        raise reader.invalid(
            "it is big-endian; convert it on the machine that wrote it"
            if swapped
            else f"its version is {version}; versions 2 and 3 are read"
        )


def _read_metadata(reader: _HeaderReader, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = reader.text("a key", NAME_LIMIT)
        if key in metadata:
            raise reader.invalid(f"the key {short_repr(key)} is there twice")
        metadata[key] = _read_value(reader, key, reader.number("<u4"))
    return metadata


def _read_value(reader: _HeaderReader, key: str, kind: int) -> MetadataValue:
    if kind == _ARRAY:
        inner, count = reader.number("<u4"), reader.number("<u8")
        return _read_array(reader, key, inner, count)
    if kind == _STRING:
        return reader.text(f"the value of {short_repr(key)}")
    if kind == _BOOL:
        return _booleans(reader, key, 1)[0]
    if kind == _FLOAT32:  # the shortest decimal number that is rounded to it: 1e-06
        return float(str(np.frombuffer(reader.take(4), "<f4")[0]))
    if kind in _NUMBERS:
        return _numbers(reader, kind, 1)[0]
    raise _unknown_type(reader, key, kind)


def _read_array(reader: _HeaderReader, key: str, kind: int, count: int) -> MetadataValue:
    sizes = {_STRING: 8, _BOOL: 1} | {k: np.dtype(v).itemsize for k, v in _NUMBERS.items()}
    if kind not in sizes:
        raise _unknown_type(reader, key, kind)
    reader.check_count("value", count, HEADER_LIMIT, sizes[kind], f" of {short_repr(key)}")
    if kind == _STRING:
        return reader.texts(f"a value of {short_repr(key)}", count)
    return _booleans(reader, key, count) if kind == _BOOL else _numbers(reader, kind, count)


def _numbers(reader: _HeaderReader, kind: int, count: int) -> list[int]:
    dtype = np.dtype(_NUMBERS[kind])
    numbers: list[int] = np.frombuffer(reader.take(count * dtype.itemsize), dtype).tolist()
    return numbers


def _booleans(reader: _HeaderReader, key: str, count: int) -> list[bool]:
    raw = bytes(reader.take(count))
    if raw.strip(b"\0\1"):
        raise reader.invalid(f"a boolean of {short_repr(key)} is neither 0 nor 1")
    return [byte == 1 for byte in raw]


def _unknown_type(reader: _HeaderReader, key: str, kind: int) -> FileError:
    return reader.invalid(
        f"{short_repr(key)} has values of type {kind}; types 0 to 12 and arrays of numbers, "
        "booleans and strings are read"
    )


def _alignment(reader: _HeaderReader, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.invalid(
            f"general.alignment is {short_repr(alignment)}; it must be a power of two from 8 to "
            f"{1 << 20}"
        )
    return alignment


class _Entry(NamedTuple):
    """A tensor as the header describes it, with an offset in the data."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    offset: int


def _read_entry(reader: _HeaderReader) -> _Entry:
    name = reader.text("the name of a tensor", NAME_LIMIT)
    dimensions = reader.number("<u4")
    if not 1 <= dimensions <= DIMENSION_LIMIT:
        raise reader.invalid(
            f"{short_repr(name)} has {dimensions} dimensions; 1 to {DIMENSION_LIMIT} are allowed"
        )
    shape = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions))[::-1]
    kind, offset = struct.unpack("<IQ", reader.take(12))
    formats = block_formats()
    if kind not in formats:
        raise reader.invalid(
            f"{short_repr(name)} has the format {kind}; these are read: "
            f"{', '.join(f'{x.name} ({i})' for i, x in formats.items())}"
        )
    block = formats[kind]
    if 0 in shape or math.prod(shape) >= 1 << 60:
        raise reader.invalid(f"{short_repr(name)} has the shape {shape}, which no tensor can have")
    if shape[-1] % block.elements:
        raise reader.invalid(
            f"{short_repr(name)} is {block.name} with rows of {plural(shape[-1], 'number')}; they "
            f"must be whole blocks of {block.elements}"
        )
    return _Entry(name, block, shape, offset)


def _place(
    path: Path, entries: list[_Entry], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Return the places of all tensors, which must fill the data in order."""
    tensors: dict[str, GgufTensor] = {}
    end = start
    for name, block, shape, offset in entries:
        if name in tensors:
            raise invalid_gguf(path, f"the tensor {short_repr(name)} is there twice")
        expected = -(-end // alignment) * alignment
        if start + offset != expected:
            raise invalid_gguf(
                path,
                f"{short_repr(name)} is at offset {offset}; it must follow the tensor before it, "
                f"at {expected - start}, without a gap or an overlap",
            )
        bytes_ = math.prod(shape) // block.elements * block.bytes
        end = expected + bytes_
        tensors[name] = GgufTensor(name, block, shape, path, expected, bytes_)
    if end > size:
        raise invalid_gguf(
            path, f"it has {size} of {end} bytes; is it a partial download? Download it again"
        )
    if entries and size - end >= alignment:
        raise invalid_gguf(path, f"{size - end} bytes follow its last tensor; download it again")
    return tensors


def read_rows(
    header: GgufHeader, tensor: GgufTensor, panel_bytes: int = PANEL_BYTES
) -> Iterator[tuple[int, UInt8[np.ndarray, "rows bytes"]]]:
    """Read the rows of a tensor in panels, so that little more than the result needs memory."""
    rows, width = math.prod(tensor.shape[:-1]), tensor.row_bytes
    step = max(1, panel_bytes // width)
    panel = np.empty((min(rows, step), width), np.uint8)
    mark = header.marks[tensor.file]
    for first in range(0, rows, step):
        part = panel[: min(step, rows - first)]
        with open_regular(tensor.file) as (file, state):
            if state == mark:
                file.seek(tensor.start + first * width)
                read_into(file, part.reshape(-1).data, tensor.file)
                state = file_state(file)
        if state != mark:
            raise FileError(f"{tensor.file} was changed after its header was read; load it again")
        yield first, part


def read_plain(header: GgufHeader, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Read a tensor of numbers that are stored one by one, straight into its memory."""
    place = StoredTensor(tensor.name, dtype, tensor.shape, tensor.file, tensor.start, tensor.bytes)
    ((_, values),) = read_tensors([place], header.marks)
    return values
