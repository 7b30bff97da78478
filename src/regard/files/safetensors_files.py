"""Safetensors files: their header, with the names, dtypes, shapes and places of the tensors, and
the reading of tensors by several threads, into memory of their own.

A file is 8 bytes (the header's length N, little-endian), N bytes of JSON, and the data:

    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]},
...}

The library `safetensors` checks types, sizes and gaps, but does not return the offsets, so this
module parses the header too, and checks what the library (0.8) does not:

- The library waits forever for the writer of a named pipe, and follows any link.
- It takes the second of two tensors with one name, and accepts whatever Python's JSON accepts.
- It needs 9 s for a header of 95 MB with 1.4 million tensors, and 6 s for 90 MB of brackets; their
  number is limited first, in 0.4 s.
- It accepts names of any length, 26 dimensions, shapes such as [0, 2^62, 2^40], and dtypes of less
  than a byte, which torch does not have.
- It says "header too large" or "file not fully covered" for other formats and partial downloads.

The library maps files; this module reads them, because (file of 0.44 GB, 1 thread)

- a truncated mapped file kills the process with SIGBUS, and a file that is written later changes
  the weights of the running model; here a tensor owns its memory;
- pages of 4 KiB are read at 23 GB/s instead of 32 (LOG.md, `regard.huge_pages`), and a copy to
  huge pages has a peak memory of 1.85 times the file, here 1.02 times;
- the library accepts any byte as a boolean; here it must be 0 or 1.

Source: the format's specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files import reading
from regard.files.reading import FileState, file_state, open_regular, read_exactly, read_into
from regard.huge_pages import CACHE_LINE, HugePageBlock
from regard.units import plural
from regard.untrusted_text import error_text, short_repr

HEADER_LIMIT = 100_000_000
"""The largest number of bytes of a header, the same as in the official reader."""
TENSOR_LIMIT = 1 << 18
"""The largest number of tensors in a file; the largest models have a third of that in all."""
NAME_LIMIT = 1024
"""The largest number of characters of a tensor's name."""
DIMENSION_LIMIT = 25
"""The largest number of dimensions of a tensor; several torch operations refuse more."""

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
class StoredTensor:
    """The place of a tensor: `bytes` bytes from `start`, little-endian, in row-major order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """The checked header of a safetensors file, tensors in the order of data, the file's state."""

    file: Path
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    mark: FileState


def read_header(path: Path, limit: int = TENSOR_LIMIT) -> Header:
    """Read and check the header of a safetensors file, without its data."""
    with open_regular(path) as (file, mark):
        head = file.read(64)
        length = _length(path, head, mark.size)
        file.seek(8)
        raw = read_exactly(file, length, path)
    data = mark.size - 8 - length
    try:
        table = reading.parse_json(raw)
        metadata = table.pop("__metadata__", None) or {}  # the library takes null for none
        if len(table) > limit:
            raise ArgumentError(f"names {plural(len(table), 'tensor')}; at most {limit} are read")
        _check_with_library(path, table, data, mark.size)
        tensors = [_stored_tensor(name, entry, path, 8 + length) for name, entry in table.items()]
    except ArgumentError as e:
        raise invalid_file(path, f"its header {e}") from e
    tensors.sort(key=lambda x: (x.start, x.bytes))  # empty tensors first
    return Header(path, tuple(tensors), metadata, mark)


def _length(path: Path, head: bytes, size: int) -> int:
    """Return the length of the header, and raise unless it fits into the file."""
    length = int.from_bytes(head[:8], "little")
    allowed = 2 <= length <= HEADER_LIMIT
    # lengths such as 0x580 begin like a pickle, so that the following bytes must decide
    if len(head) >= 8 and allowed and head[8:9] in (b"{", b""):
        if length <= size - 8:
            return length
        raise invalid_file(path, f"its header alone needs {8 + length} bytes", _partial(size))
    kind = identify_format(head)
    if kind:
        raise invalid_file(path, "its first bytes are not the length of a header", kind)
    if len(head) < 8:
        raise invalid_file(path, "the length of its header alone needs 8 bytes", _partial(size))
    if not allowed:
        raise invalid_file(path, f"its header has {length} bytes; 2 to {HEADER_LIMIT} are allowed")
    raise invalid_file(path, f"its header does not begin with {{ but with {head[8:16]!r}")


def _partial(size: int) -> str:
    return f"it has {plural(size, 'byte')}; is it a partial download?"


def _check_with_library(path: Path, table: Mapping[str, object], data: int, size: int) -> None:
    """Check the types, sizes and offsets of all entries with the safetensors library."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except MemoryError:  # the library maps the file, which may be sparse and larger than memory
        raise FileError(
            f"{path} has {size} bytes, and there is not enough memory to map them"
        ) from None
    except (SafetensorError, OSError) as e:
        if "ncomplete" in str(e):  # the data is longer or shorter than described
            _check_length(path, table, data, size)
        raise invalid_file(path, f"its header is refused by safetensors: {error_text(e)}") from e


def _check_length(path: Path, table: Mapping[str, Any], data: int, size: int) -> None:
    """Raise if the data is shorter or longer than the header says, the most common damage."""
    end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
    if data < end:
        raise invalid_file(
            path,
            f"its data ends after {data} of {end} bytes",
            f"it has {size} of {size - data + end} bytes; is it a partial download?",
        )
    if data > end:
        raise invalid_file(
            path,
            f"{data - end} bytes follow its last tensor",
            f"it has {size} bytes, {size - data + end} are described; {DOWNLOAD_AGAIN}",
        )


def _stored_tensor(name: str, entry: Any, path: Path, base: int) -> StoredTensor:
    """Check an entry that the library has accepted, and that torch supports its dtype and shape."""
    if len(name) > NAME_LIMIT:
        raise ArgumentError(
            f"has a name of {len(name)} characters; at most {NAME_LIMIT} are allowed"
        )
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ArgumentError(
            f"gives {short_repr(name)} the dtype {short_repr(dtype)}; allowed: {', '.join(DTYPES)}"
        )
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if len(shape) > DIMENSION_LIMIT:
        raise ArgumentError(
            f"gives {short_repr(name)} {len(shape)} dimensions; at most {DIMENSION_LIMIT} are "
            "allowed"
        )
    if math.prod(max(1, x) for x in shape) * DTYPES[dtype].itemsize >= 1 << 63:
        raise ArgumentError(
            f"gives {short_repr(name)} the shape {shape}, which has more bytes than torch can "
            "address"
        )
    return StoredTensor(name, DTYPES[dtype], tuple(shape), path, base + start, end - start)


PICKLE_ADVICE = "which regard does not open; convert it to safetensors with another program"
_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<": "a web page, not the file; download it again",
    b"PK": f"a zip or a PyTorch pickle, {PICKLE_ADVICE}",
    b"\x80": f"a pickle, {PICKLE_ADVICE}",
    b"\x1f\x8b": "a gzip archive; unpack it with `gunzip`",
    b"BZh": "a bzip2 archive; unpack it with `bunzip2`",
    b"\x28\xb5\x2f\xfd": "a zstandard archive; unpack it with `unzstd`",
    b"\xfd7zXZ": "an xz archive; unpack it with `unxz`",
    b"GGUF": "a GGUF file of llama.cpp, which regard.load reads alone: give its path",
    b"\x89HDF": "an HDF5 file of Keras; convert it to safetensors with another program",
    b"\x93NUMPY": "a NumPy array; convert it to safetensors with another program",
    b"{": "JSON text, not the file: an error message of a server, or an index; download it again",
}
"""The format of a file by its first bytes, with advice. A safetensors file begins with the length
of its header in 8 bytes, and then {.
"""

DOWNLOAD_AGAIN = "download it again, or write it again with safetensors"
"""The next step in messages about damaged files."""


def identify_format(head: bytes) -> str:
    """Return a message that names the format by a file's first bytes; "" if unknown."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return next(
        (f"it is {kind}" for sign, kind in _BEGINNINGS.items() if start.startswith(sign)), ""
    )


def invalid_file(
    path: Path, reason: str, step: str = f"it is damaged; {DOWNLOAD_AGAIN}"
) -> FileError:
    """Return the error for a file that is not a safetensors file, with the next step."""
    return FileError(f"{path} is not a whole safetensors file ({reason}): {step}")


class ReadBuffering(NamedTuple):
    """How much of a file is read at a time.

    Attributes:
        ahead: the number of bytes that may be read before they are requested; a larger tensor is
            read alone.
        threads: the number of reading threads, the calling one included; None is half of torch's
            threads, and at most 4.
    """

    piece: int = 8 << 20
    ahead: int = 32 << 20
    threads: int | None = None


DEFAULT_BUFFERING = ReadBuffering()


@dataclass(eq=False)
class _PendingTensor:
    """A tensor whose bytes are being read."""

    stored: StoredTensor
    tensor: Tensor
    pieces: list[tuple[Future[None] | None, Callable[[], None]]]


def read_tensors(
    wanted: Sequence[StoredTensor],
    marks: Mapping[Path, FileState],
    buffering: ReadBuffering = DEFAULT_BUFFERING,
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors in the requested order; if iteration stops early, no thread keeps running."""
    threads = buffering.threads
    helpers = (min(4, torch.get_num_threads() // 2) if threads is None else threads) - 1
    if helpers < 1:
        yield from _read(wanted, marks, buffering, None)
        return
    with ThreadPoolExecutor(helpers) as pool:
        try:
            yield from _read(wanted, marks, buffering, pool)
        finally:
            pool.shutdown(cancel_futures=True)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Read all tensors of a safetensors file, as caches, recordings and training checkpoints do."""
    header = read_header(path)
    return dict(read_tensors(header.tensors, {header.file: header.mark})), header.metadata


def _read(
    wanted: Sequence[StoredTensor],
    marks: Mapping[Path, FileState],
    buffering: ReadBuffering,
    pool: ThreadPoolExecutor | None,
) -> Iterator[tuple[str, Tensor]]:
    pending: deque[_PendingTensor] = deque()
    ahead, rest = 0, deque(wanted)
    memory = HugePageBlock(sum(x.bytes + -x.bytes % CACHE_LINE for x in wanted))
    while rest or pending:
        while rest and (not pending or (pool and ahead + rest[0].bytes <= buffering.ahead)):
            stored = rest.popleft()
            pending.append(
                _start_reading(stored, marks[stored.file], memory, buffering.piece, pool)
            )
            ahead += stored.bytes
        ahead -= pending[0].stored.bytes
        # keep no reference to the tensor here, so that the caller can free it
        yield pending[0].stored.name, _finish_reading(pending.popleft())


def _start_reading(
    stored: StoredTensor,
    mark: FileState,
    memory: HugePageBlock,
    size: int,
    pool: ThreadPoolExecutor | None,
) -> _PendingTensor:
    try:
        tensor = memory.empty(stored.shape, dtype=stored.dtype)
    except (RuntimeError, MemoryError) as e:
        raise FileError(
            f"{stored.file}: {short_repr(stored.name)} needs {stored.bytes} bytes of memory, which "
            "are not available"
        ) from e
    buffer = _bytes(tensor).numpy().data if stored.bytes else memoryview(b"")
    pieces = [
        partial(_read_piece, stored, mark, buffer[offset : offset + size], offset)
        for offset in range(0, stored.bytes, size)
    ]
    return _PendingTensor(
        stored, tensor, [(pool.submit(piece) if pool else None, piece) for piece in pieces]
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _read_piece(stored: StoredTensor, mark: FileState, buffer: memoryview, offset: int) -> None:
    """Read bytes of a tensor from `offset` into a buffer, and raise if the file has changed."""
    with open_regular(stored.file) as (file, state):
        if state == mark:
            file.seek(stored.start + offset)
            read_into(file, buffer, stored.file)
            state = file_state(file)
    if state != mark:
        raise FileError(f"{stored.file} was changed after its header was read; load it again")


def _finish_reading(coming: _PendingTensor) -> Tensor:
    """Read the pieces that no thread has started, wait for the others, and return the tensor."""
    for future, piece in coming.pieces:
        if future is None or future.cancel():  # no thread has started it, so read it here
            piece()
        else:
            future.result()
    if coming.stored.dtype is torch.bool and coming.stored.bytes:
        largest = int(_bytes(coming.tensor).max())
        if largest > 1:
            raise FileError(
                f"{coming.stored.file}: {short_repr(coming.stored.name)} is BOOL and holds a byte "
                f"{largest}; only 0 and 1 are booleans"
            )
    return coming.tensor
