"""Reading of tensors from safetensors files by several threads, into memory of their own.

The library `safetensors` maps a file instead of reading it. This module reads, for these reasons
(measured with version 0.8 on a file of 0.44 GB, on 1 thread):

- If a mapped file is truncated, the process is killed with SIGBUS. Here the file is refused.
- If a mapped file is written later, the weights of the running model change. Here a tensor owns its
  memory, and a file that has changed since its header was checked is refused.
- A mapped file has pages of 4 KiB, from which one core reads weights at 23 GB/s instead of 32
  (LOG.md, `regard.huge_pages`). Copying it to huge pages takes as long as reading does here (0.07 s
  for both), and its peak memory is 1.85 times the file, mapped pages included; here it is 1.02
  times.
- The library accepts any byte as a boolean. Here it must be 0 or 1.

`load_tensors` reads a whole file; caches, recordings and training checkpoints use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regard import huge_pages
from regard.errors import FileError
from regard.files.regular_files import FileState, file_state, open_regular, read_into
from regard.files.safetensors_header import StoredTensor, read_header
from regard.untrusted_text import short_repr


class ReadBuffering(NamedTuple):
    """How much of a file is read at a time.

    Most of the time is spent in clearing new memory pages in the kernel. On two busy cores a second
    thread gains nothing and costs a tenth of the processor time (bench/load.py), so that the
    calling thread then reads alone.

    Attributes:
        piece: the number of bytes that one thread reads at a time; threads share a large tensor.
        ahead: the number of bytes that may be read before they are requested; a larger tensor is
            read alone.
        threads: the number of reading threads, the calling one included; None is half of torch's
            threads, and at most 4.
    """

    piece: int = 8 << 20
    ahead: int = 32 << 20
    threads: int | None = None


DEFAULT_BUFFERING = ReadBuffering()


@dataclass
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
    """Read tensors in the requested order. If iteration stops early, no thread keeps running.

    Args:
        wanted: checked entries of headers.
        marks: the state of each file when its header was checked.
        buffering: how much is read at a time.

    Yields:
        The name of each tensor, and the tensor.

    Raises:
        FileError: a file has changed since its header was checked, cannot be read, or contains a
            byte that is not a boolean; or there is not enough memory.

    >>> from regard.files.safetensors_header import read_header
    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.arange(3)}, "a.safetensors")
    >>> header = read_header(Path("a.safetensors"))
    >>> list(read_tensors(header.tensors, {header.file: header.mark}))
    [('a', tensor([0, 1, 2]))]
    """
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
    """Read all tensors of a safetensors file.

    Args:
        path: the file.

    Returns:
        The tensors by name, and the strings under `__metadata__`.

    Raises:
        FileError: `read_header` or `read_tensors` refuses the file.

    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.ones(2)}, "a.safetensors", metadata={"by": "hand"})
    >>> load_tensors(Path("a.safetensors"))
    ({'a': tensor([1., 1.])}, {'by': 'hand'})
    """
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
    while rest or pending:
        while rest and (not pending or (pool and ahead + rest[0].bytes <= buffering.ahead)):
            stored = rest.popleft()
            pending.append(_start_reading(stored, marks[stored.file], buffering.piece, pool))
            ahead += stored.bytes
        ahead -= pending[0].stored.bytes
        # keep no reference to the tensor here, so that the caller can free it
        yield pending[0].stored.name, _finish_reading(pending.popleft())


def _start_reading(
    stored: StoredTensor, mark: FileState, size: int, pool: ThreadPoolExecutor | None
) -> _PendingTensor:
    try:
        tensor = huge_pages.empty(stored.shape, dtype=stored.dtype)
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
