"""The tensors of a checkpoint folder: what they are, from the headers alone, and their values, on
demand.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files import reading
from regard.files.header import Stored
from regard.files.regular import Mark, inside
from regard.foreign import shown
from regard.models.checkpoint.shards import read_headers

__all__ = ["Store", "Stored", "check_finite", "inside"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Store:
    """The tensors of a folder, whose files are data of unknown origin: all is checked before any of
    it is used.

    Files are read, never mapped: a mapped file that somebody truncates kills the process with
    SIGBUS, and one that somebody writes changes the weights.

    Attributes:
        folder: the model's folder.
        tensors: by name, in the order of the files and of their data.
        bytes: of all tensors; no more is ever allocated.
        marks: the state of each file when its header was checked.

    >>> from safetensors.torch import save_file
    >>> save_file({"a": torch.ones(2, 3), "b": torch.zeros(1)}, "model.safetensors")
    >>> store = Store.open(Path())
    >>> store.bytes, store.tensors["a"].shape
    (28, (2, 3))
    >>> dict(store.read(["b"]))
    {'b': tensor([0.])}
    """

    folder: Path
    tensors: Mapping[str, Stored]
    bytes: int
    marks: Mapping[Path, Mark]

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Read and check the headers of model.safetensors, or else of the shards that its index
        names.

        Args:
            folder: a folder with safetensors weights.

        Raises:
            FileError: they are missing or not whole; the message says which file, what is wrong,
                and the next step.

        >>> from safetensors.torch import save_file
        >>> save_file({"a": torch.ones(2, 3)}, "model.safetensors")
        >>> list(Store.open(Path()).tensors)
        ['a']
        """
        headers = read_headers(folder)
        found = {x.name: x for header in headers for x in header.tensors}
        marks = {header.file: header.mark for header in headers}
        total = sum(x.bytes for x in found.values())
        return cls(folder, MappingProxyType(found), total, MappingProxyType(marks))

    def read(
        self, names: Iterable[str] | None = None, pace: reading.Pace = reading.USUAL
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and values of tensors, in the order of the files; each owns its memory.

        A few tensors are read ahead of the caller. The memory in use is what the caller keeps, and
        the larger of one tensor and 32 MiB.

        Args:
            names: which tensors; None for all.
            pace: how much is read at a time and ahead, by how many threads.

        Raises:
            ArgumentError: a name is not that of a tensor.
            FileError: a file was changed since its header was checked, or cannot be read; a boolean
                is neither 0 nor 1.

        >>> from safetensors.torch import save_file
        >>> save_file({"a": torch.ones(2), "b": torch.zeros(1)}, "model.safetensors")
        >>> [name for name, _ in Store.open(Path()).read()]
        ['a', 'b']
        """
        chosen = set(self.tensors if names is None else names)
        for name in sorted(chosen - self.tensors.keys()):
            close = difflib.get_close_matches(name, self.tensors, 1)
            hint = f"; did you mean {shown(close[0])}?" if close else ""
            raise ArgumentError(f"names: {self.folder} has no tensor {shown(name)}{hint}")
        wanted = [x for name, x in self.tensors.items() if name in chosen]
        return reading.read(wanted, self.marks, pace)


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity; what is not a floating-point number has neither.

    A contiguous tensor is looked at in pieces, without a second copy of it.

    Args:
        name: of the tensor, for the message.
        tensor: any shape and dtype.

    Raises:
        FileError: with the number of NaN and of infinities, and the first index.

    >>> check_finite("a", torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]]))
    Traceback (most recent call last):
    regard.errors.FileError: 'a' holds 1 NaN and 1 infinite values of 4, the first at [1, 0]; it is damaged, or its \
training was: take another checkpoint
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    nans = infinities = 0
    first: int | None = None
    for index, values in enumerate(torch.split(tensor.detach().reshape(-1), _CHUNK)):
        if _all_finite(chunk := _plain(values)):
            continue
        nans += int(chunk.isnan().sum())
        infinities += int(chunk.isinf().sum())
        if first is None:
            first = index * _CHUNK + int((~chunk.isfinite()).nonzero()[0])
    if first is not None:
        at = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        raise FileError(
            f"{shown(name)} holds {nans} NaN and {infinities} infinite values of "
            f"{tensor.numel()}, the first at {at}; "
            "it is damaged, or its training was: take another checkpoint"
        )


def _plain(values: Tensor) -> Tensor:
    """Numbers whose dtype torch can look into: of 8 bits it cannot, or (float8_e8m0fnu) calls NaN
    finite.
    """
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass: least and greatest value are NaN where any
    is.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() == 0:
        return True
    least, greatest = values.aminmax()
    return bool(least.isfinite() & greatest.isfinite())
