"""The tensors of a checkpoint folder: what they are, from the headers alone, and their values, on
demand.

They lie in model.safetensors, or in the shards that an index names. Of a folder that has neither,
or no config.json, an error says what it seems to be instead, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, FileError
from regard.files import safetensors_reader, strict_json
from regard.files.regular_files import FileState, checked_path, read_bytes
from regard.files.safetensors_header import (
    HEADER_LIMIT,
    PICKLE_ADVICE,
    Header,
    StoredTensor,
    identify_format,
    read_header,
)
from regard.files.safetensors_reader import ReadBuffering
from regard.untrusted_text import short_repr

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
    tensors: Mapping[str, StoredTensor]
    bytes: int
    marks: Mapping[Path, FileState]

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
        self,
        names: Iterable[str] | None = None,
        buffering: ReadBuffering = safetensors_reader.DEFAULT_BUFFERING,
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and values of tensors, in the order of the files; each owns its memory.

        A few tensors are read ahead of the caller. The memory in use is what the caller keeps, and
        the larger of one tensor and 32 MiB.

        Args:
            names: which tensors; None for all.
            buffering: how much is read at a time.

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
            hint = suggest(name, self.tensors)
            raise ArgumentError(f"names: {self.folder} has no tensor {short_repr(name)}{hint}")
        wanted = [x for name, x in self.tensors.items() if name in chosen]
        return safetensors_reader.read_tensors(wanted, self.marks, buffering)


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
    regard.errors.FileError: 'a' holds 1 NaN and 1 infinite values of 4, the first at [1, 0];
    it is damaged, or its training was: take another checkpoint
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
            f"{short_repr(name)} holds {nans} NaN and {infinities} infinite values of "
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


def read_headers(folder: Path) -> list[Header]:
    """The checked headers of a folder's weights, in the order of the files' names.

    Where there is a model.safetensors it is the model, index or not, as for transformers. Shards
    hold together what the index says: each of its tensors in the shard that it names, and no
    others.

    Raises:
        FileError: there are no weights; or a file, a header or the index is not what it should be.

    >>> from safetensors.torch import save_file
    >>> import torch
    >>> save_file({"a": torch.zeros(2)}, "model.safetensors")
    >>> [x.name for header in read_headers(Path()) for x in header.tensors]
    ['a']
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as e:
        raise FileError(f"{folder} cannot be read as a folder: {e.strerror}") from e
    if SINGLE in names:
        return [read_header(checked_path(folder, SINGLE))]
    if INDEX not in names:
        raise without_weights(folder, names)
    path, places = checked_path(folder, INDEX), read_index(folder)
    files = sorted(set(places.values()))
    headers = [read_header(_shard(folder, name, path)) for name in files]
    _check_places(places, headers, path)
    return headers


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor -> shard, from model.safetensors.index.json. What it says of sizes is not believed:
    the headers have them.

    Raises:
        FileError: it is missing, no JSON object, or has no weight_map of names.
    """
    path = checked_path(folder, INDEX)
    raw = read_bytes(path, HEADER_LIMIT)
    try:
        found = strict_json.parse_json(raw)
    except ArgumentError as e:
        kind = "" if raw.lstrip().startswith(b"{") else identify_format(raw[:64])
        raise FileError(f"{path} {e}{f'; {kind}' if kind else ''}") from e
    places = found.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FileError(
            f"{path}: weight_map is {short_repr(places)}; it must name a shard for every tensor"
        )
    wrong = next((name for name, file in places.items() if not isinstance(file, str)), None)
    if wrong is not None:
        raise FileError(
            f"{path}: weight_map gives {short_repr(wrong)} {short_repr(places[wrong])}; it must "
            "be a file "
            "name"
        )
    return places


def _shard(folder: Path, name: str, index: Path) -> Path:
    try:
        return checked_path(folder, name)
    except FileError as e:
        raise FileError(f"{e} ({index.name} names it)") from e


def _check_places(places: Mapping[str, str], headers: Sequence[Header], index: Path) -> None:
    """Every tensor of the index is in the shard that it names, and the shards hold no others."""
    by_shard: dict[str, set[str]] = {}
    for name, file in places.items():
        by_shard.setdefault(file, set()).add(name)
    for header in headers:
        listed = by_shard[header.file.name]
        held = {x.name for x in header.tensors}
        for names, said in (
            (listed - held, "that the index places there and it lacks"),
            (held - listed, "that the index does not place there"),
        ):
            if names:
                some = ", ".join(short_repr(name) for name in sorted(names)[:5])
                raise FileError(
                    f"{header.file}: {len(names)} tensors {said}: {some}; "
                    f"are {index.name} and the shards of one download?"
                )


_ADAPTER = (
    "an adapter, which is nothing without its base model; merge it into that first (peft: "
    "merge_and_unload)"
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
    "*.gguf": "a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation",
    "*.h5": "TensorFlow weights; convert them to safetensors elsewhere",
    "*.msgpack": "Flax weights; convert them to safetensors elsewhere",
    "*.onnx": "an ONNX graph; get the safetensors of the model",
    "*.npz": "NumPy arrays; convert them to safetensors elsewhere",
}
"""Names of files that hold weights which are not read -> what they are, the most telling first."""


def without_weights(folder: Path, names: Iterable[str]) -> FileError:
    """The error of a folder that has neither model.safetensors nor its index: what there is, and
    how to go on.

    >>> print(without_weights(Path("a"), ["config.json", "model.gguf"]))
    a/model.safetensors is missing; the folder holds 'model.gguf', a GGUF file of llama.cpp; get
    the safetensors of the model, before its quantisation
    """
    said = other_weights(names)
    said = (
        f"the folder holds {said}"
        if said
        else "a model folder holds it, or model.safetensors.index.json and its shards"
    )
    return FileError(f"{folder / 'model.safetensors'} is missing; {said}")


def other_weights(names: Iterable[str]) -> str:
    """The first of some file names that holds weights which are not read: what it is, and the next
    step; "" without one.

    >>> other_weights(["README.md", "model-q4.gguf"])
    "'model-q4.gguf', a GGUF file of llama.cpp; get the safetensors of the model, before its
    quantisation"
    """
    names = sorted(names)
    for pattern, kind in _WEIGHTS.items():
        found = [name for name in names if fnmatchcase(name.lower(), pattern)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{short_repr(found[0])}{more}, {kind}"
    return ""


def without_config(folder: Path) -> FileError:
    """The error of a folder that has no config.json: what there is instead, and how to go on.

    >>> folder = Path("no-config")
    >>> folder.mkdir()
    >>> print(without_config(folder))
    no-config/config.json is missing; a model folder holds config.json and model.safetensors
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as e:
        return FileError(f"{folder} cannot be read as a folder: {e.strerror}")
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    if {"model.safetensors", "model.safetensors.index.json"} & {*names}:
        said = "the folder holds the weights without it; get it from where they came from"
    elif kind := other_weights(names):
        said = f"the folder holds {kind}"
    elif folder.name.startswith("models--") and "snapshots" in names:
        said = (
            "the folder is a whole repository of Hugging Face's cache; give one of the folders "
            "in its snapshots"
        )
    elif inner:
        said = (
            f"it is in the folder {short_repr(inner[0])} here, and in {len(inner)} in all: give "
            "that folder"
        )
    else:
        said = "a model folder holds config.json and model.safetensors"
    return FileError(f"{folder / 'config.json'} is missing; {said}")
