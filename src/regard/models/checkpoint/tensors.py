"""The tensors of a checkpoint folder: headers first, values on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files import reading, safetensors_files
from regard.files.reading import FileState, checked_path, read_bytes
from regard.files.safetensors_files import (
    HEADER_LIMIT,
    PICKLE_ADVICE,
    Header,
    ReadBuffering,
    StoredTensor,
    identify_format,
    read_header,
)
from regard.models.checkpoint.group_quantized import IntegerCodes
from regard.units import plural
from regard.untrusted_text import short_repr

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint folder, in the order of its files and data, with the state of
    each file when its header was checked; files are read, because mapped ones may be truncated or
    change.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    bytes: int
    marks: Mapping[Path, FileState]

    @classmethod
    def open(cls, folder: Path) -> CheckpointTensors:
        """Read and check the headers of model.safetensors, or of the index's shards."""
        headers = read_headers(folder)
        entries = {x.name: x for header in headers for x in header.tensors}
        marks = {header.file: header.mark for header in headers}
        total = sum(x.bytes for x in entries.values())
        return cls(folder, MappingProxyType(entries), total, MappingProxyType(marks))

    def read(
        self,
        names: Iterable[str] | None = None,
        buffering: ReadBuffering = safetensors_files.DEFAULT_BUFFERING,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of tensors in the order of the files; each owns its memory. A
        tensor or 32 MiB, whichever is larger, is read ahead.
        """
        chosen = set(self.tensors if names is None else names)
        for name in sorted(chosen - self.tensors.keys()):
            hint = suggest(name, self.tensors)
            raise ArgumentError(f"names: {self.folder} has no tensor {short_repr(name)}{hint}")
        wanted = [x for name, x in self.tensors.items() if name in chosen]
        return safetensors_files.read_tensors(wanted, self.marks, buffering)

    def read_kept(
        self, names: Iterable[str], integer_names: Collection[str]
    ) -> Iterator[tuple[str, Tensor | IntegerCodes]]:
        """Yield names and values as `read` does; those of `integer_names` as the integers with
        scales that a quantized checkpoint has.
        """
        yield from self.read(names)

    def conversion(self, dense: Mapping[str, int]) -> Conversion | None:
        """Return which quantized matrices became plain numbers, of so many bytes; None for none."""
        return None


class Conversion(NamedTuple):
    """How many quantized matrices of a checkpoint became plain numbers, because no stored form has
    the same numbers, with their bytes before and after.
    """

    method: str
    converted: int
    matrices: int
    bytes_before: int
    bytes_after: int


def largest_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype that has the most bytes; float32 of nothing."""
    bytes_of = Counter[torch.dtype]()
    for dtype, size in sizes:
        bytes_of[dtype] += size
    return max(bytes_of, key=bytes_of.__getitem__, default=torch.float32)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise for NaN and infinity in a tensor; a contiguous one is checked in chunks."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    nans = infinities = 0
    first: int | None = None
    for chunk_number, values in enumerate(torch.split(tensor.detach().reshape(-1), _CHUNK)):
        if _all_finite(chunk := _checkable(values)):
            continue
        nans += int(chunk.isnan().sum())
        infinities += int(chunk.isinf().sum())
        if first is None:
            first = chunk_number * _CHUNK + int((~chunk.isfinite()).nonzero()[0])
    if first is not None:
        index = [
            int(i) for i in torch.unravel_index(torch.tensor(first, device="cpu"), tensor.shape)
        ]
        raise FileError(
            f"{short_repr(name)} has values that are not finite: {nans} of {tensor.numel()} NaN, "
            f"{infinities} infinite, the first at {index}; "
            "the file is damaged, or the training diverged: use another checkpoint"
        )


def _checkable(values: Tensor) -> Tensor:
    """Convert 8-bit floats to float32: torch cannot check them, or calls NaN finite."""
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _all_finite(values: Tensor) -> bool:
    """Whether all values are finite, in one pass: minimum and maximum are NaN if any value is."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() == 0:
        return True
    least, greatest = values.aminmax()
    return bool(least.isfinite() & greatest.isfinite())


def read_headers(folder: Path) -> list[Header]:
    """Read the checked headers of a folder's weights: of model.safetensors where it exists, as in
    transformers, or else of the shards, which must match the index.
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as e:
        raise FileError(f"{folder} cannot be read as a folder: {e.strerror}") from e
    if SINGLE in names:
        return [read_header(checked_path(folder, SINGLE))]
    if INDEX not in names:
        raise missing_weights_error(folder, names)
    path, places = checked_path(folder, INDEX), read_index(folder)
    files = sorted(set(places.values()))
    headers = [read_header(_shard(folder, name, path)) for name in files]
    _check_places(places, headers, path)
    return headers


def read_index(folder: Path) -> Mapping[str, str]:
    """Read tensor -> shard from model.safetensors.index.json; its sizes are ignored."""
    path = checked_path(folder, INDEX)
    raw = read_bytes(path, HEADER_LIMIT)
    try:
        index = reading.parse_json(raw)
    except ArgumentError as e:
        kind = "" if raw.lstrip().startswith(b"{") else identify_format(raw[:64])
        raise FileError(f"{path} {e}{f'; {kind}' if kind else ''}") from e
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FileError(
            f"{path}: weight_map is {short_repr(places)}; it must map every tensor to a shard"
        )
    wrong = next((name for name, file in places.items() if not isinstance(file, str)), None)
    if wrong is not None:
        raise FileError(
            f"{path}: weight_map gives {short_repr(wrong)} {short_repr(places[wrong])}; it must be "
            "a file name"
        )
    return places


def _shard(folder: Path, name: str, index: Path) -> Path:
    try:
        return checked_path(folder, name)
    except FileError as e:
        raise FileError(f"{e} ({index.name} refers to it)") from e


def _check_places(places: Mapping[str, str], headers: Sequence[Header], index: Path) -> None:
    """Check that every tensor of the index is in its shard, and that there are no others."""
    by_shard: dict[str, set[str]] = {}
    for name, file in places.items():
        by_shard.setdefault(file, set()).add(name)
    for header in headers:
        listed = by_shard[header.file.name]
        stored = {x.name for x in header.tensors}
        for names, problem in (
            (listed - stored, "missing that the index places there"),
            (stored - listed, "that the index does not place there"),
        ):
            if names:
                some = ", ".join(short_repr(name) for name in sorted(names)[:5])
                raise FileError(
                    f"{header.file}: {plural(len(names), 'tensor')} {problem}: {some}; "
                    f"are {index.name} and the shards from one download?"
                )


_ADAPTER = (
    "an adapter, which needs its base model; merge it into that first (peft: merge_and_unload)"
)
_WEIGHTS = {
    "adapter_config.json": _ADAPTER,
    "adapter_model.*": _ADAPTER,
    "*.index.json": "an index whose name is not model.safetensors.index.json",
    "*.bin": f"PyTorch weights, a pickle, {PICKLE_ADVICE}",
    "*.pt": f"PyTorch weights, a pickle, {PICKLE_ADVICE}",
    "*.pth": f"PyTorch weights, a pickle, {PICKLE_ADVICE}",
    "*.ckpt": f"a training checkpoint, a pickle, {PICKLE_ADVICE}",
    "model-*-of-*.safetensors": "a shard; download model.safetensors.index.json, which says what "
    "the shards hold",
    "*.safetensors": "a safetensors file of another name; rename it to model.safetensors if it is "
    "the whole model",
    "*.gguf": "a GGUF file of llama.cpp, which regard.load reads alone: give its path",
    "*.h5": "TensorFlow weights; convert them to safetensors with another tool",
    "*.msgpack": "Flax weights; convert them to safetensors with another tool",
    "*.onnx": "an ONNX graph; get the safetensors of the model",
    "*.npz": "NumPy arrays; convert them to safetensors with another tool",
}
"""Patterns of files with weights that are not read -> what they are, the most specific first."""


def missing_weights_error(folder: Path, names: Iterable[str]) -> FileError:
    """Return the error for a folder without weights, with what the folder has and the next step."""
    other = describe_other_weights(names)
    hint = (
        f"the folder has {other}"
        if other
        else "a model folder has it, or model.safetensors.index.json and its shards"
    )
    return FileError(f"{folder / 'model.safetensors'} is missing; {hint}")


def describe_other_weights(names: Iterable[str]) -> str:
    """Describe the first file with weights that are not read, and the next step; or ""."""
    names = sorted(names)
    for pattern, kind in _WEIGHTS.items():
        matches = [name for name in names if fnmatchcase(name.lower(), pattern)]
        if matches:
            more = f" and {len(matches) - 1} more" if len(matches) > 1 else ""
            return f"{short_repr(matches[0])}{more}, {kind}"
    return ""


def missing_config_error(folder: Path) -> FileError:
    """Return the error for a folder without config.json, with what it has and the next step."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as e:
        return FileError(f"{folder} cannot be read as a folder: {e.strerror}")
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    if {"model.safetensors", "model.safetensors.index.json"} & {*names}:
        hint = "the folder has the weights without it; get it from where they came from"
    elif kind := describe_other_weights(names):
        hint = f"the folder has {kind}"
    elif folder.name.startswith("models--") and "snapshots" in names:
        hint = (
            "the folder is a whole repository of Hugging Face's cache; give one of the folders "
            "in its snapshots"
        )
    elif inner:
        hint = (
            f"its subfolder {short_repr(inner[0])} has one "
            f"({plural(len(inner), 'subfolder')} in all): "
            "give that folder"
        )
    else:
        hint = "a model folder has config.json and model.safetensors"
    return FileError(f"{folder / 'config.json'} is missing; {hint}")
