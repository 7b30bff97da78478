"""Bytes of files straight into tensors, several pieces at a time."""

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

from regard import pages
from regard.errors import FileError
from regard.files.header import Stored, read_header
from regard.files.regular import Mark, fill, mark_of, opened
from regard.foreign import shown

PIECE = 8 << 20
"""Bytes that one thread reads at a time: a large tensor is shared among all."""
AHEAD = 32 << 20
"""Bytes that may be read before they are asked for; a tensor larger than that is read alone."""
THREADS = 4
"""Most threads that read, the caller's among them; half of torch's threads where that is less.

The time goes into fresh memory, which the kernel clears page by page. On two busy cores a second
thread brings nothing and costs a tenth of the processor's time (bench/load.py), so there the caller
reads alone.
"""


class Pace(NamedTuple):
    """How a file is read.

    piece: bytes that one thread reads at a time. ahead: bytes that may be read before they are
    asked for. threads: most threads that read; None: `THREADS`, or half of torch's where that is
    less.
    """

    piece: int = PIECE
    ahead: int = AHEAD
    threads: int | None = None

    @property
    def helpers(self) -> int:
        """Threads beside the caller's."""
        if self.threads is None:
            return min(THREADS, torch.get_num_threads() // 2) - 1
        return self.threads - 1


USUAL = Pace()


@dataclass
class _Coming:
    """A tensor whose bytes are being read."""

    stored: Stored
    tensor: Tensor
    pieces: list[tuple[Future[None] | None, Callable[[], None]]]


def read(
    wanted: Sequence[Stored], marks: Mapping[Path, Mark], pace: Pace = USUAL
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, in the order wanted. Whoever stops early leaves no thread behind.

    Args:
        wanted: checked entries.
        marks: the state of each file in which its header was checked.
        pace: how much is read at a time and ahead, by how many threads.

    Raises:
        FileError: a file has changed since, cannot be read, or holds a byte that is no boolean; or
            there is not enough memory.

    >>> from regard.files.header import read_header
    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.arange(3)}, "a.safetensors")
    >>> header = read_header(Path("a.safetensors"))
    >>> list(read(header.tensors, {header.file: header.mark}))
    [('a', tensor([0, 1, 2]))]
    """
    if pace.helpers < 1:
        yield from _read(wanted, marks, pace, None)
        return
    with ThreadPoolExecutor(pace.helpers) as pool:
        try:
            yield from _read(wanted, marks, pace, pool)
        finally:
            pool.shutdown(cancel_futures=True)


def load(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """All tensors of a safetensors file by name, and the texts of its `__metadata__`.

    Raises:
        FileError: as `read_header` and `read`.

    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.ones(2)}, "a.safetensors", metadata={"by": "hand"})
    >>> load(Path("a.safetensors"))
    ({'a': tensor([1., 1.])}, {'by': 'hand'})
    """
    header = read_header(path)
    return dict(read(header.tensors, {header.file: header.mark})), header.metadata


def _read(
    wanted: Sequence[Stored],
    marks: Mapping[Path, Mark],
    pace: Pace,
    pool: ThreadPoolExecutor | None,
) -> Iterator[tuple[str, Tensor]]:
    coming: deque[_Coming] = deque()
    ahead, rest = 0, deque(wanted)
    while rest or coming:
        while rest and (not coming or (pool and ahead + rest[0].bytes <= pace.ahead)):
            stored = rest.popleft()
            coming.append(_start(stored, marks[stored.file], pace.piece, pool))
            ahead += stored.bytes
        ahead -= coming[0].stored.bytes
        # no name here holds the tensor while the caller has it: it may drop it at once
        yield coming[0].stored.name, _finish(coming.popleft())


def _start(stored: Stored, mark: Mark, size: int, pool: ThreadPoolExecutor | None) -> _Coming:
    try:
        tensor = pages.empty(stored.shape, dtype=stored.dtype)
    except (RuntimeError, MemoryError) as e:
        raise FileError(
            f"{stored.file}: {shown(stored.name)} needs {stored.bytes} bytes of memory, which are "
            "not to be had"
        ) from e
    place = _bytes(tensor).numpy().data if stored.bytes else memoryview(b"")
    pieces = [
        partial(_read_piece, stored, mark, place[at : at + size], at)
        for at in range(0, stored.bytes, size)
    ]
    return _Coming(
        stored, tensor, [(pool.submit(piece) if pool else None, piece) for piece in pieces]
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _read_piece(stored: Stored, mark: Mark, place: memoryview, at: int) -> None:
    with opened(stored.file) as (file, found):
        if found == mark:
            file.seek(stored.start + at)
            fill(file, place, stored.file)
            found = mark_of(file)
    if found != mark:
        raise FileError(f"{stored.file} was changed after its header was read; load it again")


def _finish(coming: _Coming) -> Tensor:
    for future, piece in coming.pieces:
        if (
            future is None or future.cancel()
        ):  # no thread has come to it yet: rather than wait, do it here
            piece()
        else:
            future.result()
    if coming.stored.dtype is torch.bool and coming.stored.bytes:
        largest = int(_bytes(coming.tensor).max())
        if largest > 1:
            raise FileError(
                f"{coming.stored.file}: {shown(coming.stored.name)} is BOOL and holds a byte "
                f"{largest}; "
                "only 0 and 1 are booleans"
            )
    return coming.tensor
