"""What a file or folder that is no checkpoint seems to be instead, and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from regard.errors import FileError

_PICKLE = "which is never opened; convert it to safetensors elsewhere"
_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<": "a web page, not the file; download it again",
    b"PK": f"a zip or a PyTorch pickle, {_PICKLE}",
    b"\x80": f"a pickle, {_PICKLE}",
    b"\x1f\x8b": "a gzip archive; unpack it with `gunzip`",
    b"BZh": "a bzip2 archive; unpack it with `bunzip2`",
    b"\x28\xb5\x2f\xfd": "a zstandard archive; unpack it with `unzstd`",
    b"\xfd7zXZ": "an xz archive; unpack it with `unxz`",
    b"GGUF": "a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation",
    b"\x89HDF": "an HDF5 file of Keras; convert it to safetensors elsewhere",
    b"\x93NUMPY": "a NumPy array; convert it to safetensors elsewhere",
    b"{": "JSON text, not the file: an error message of a server, or an index; download it again",
}
"""First bytes of a file -> what it is. A safetensors file begins with the length of its header, and then {."""

_ADAPTER = "an adapter, which is nothing without its base model; merge it into that first (peft: merge_and_unload)"
_WEIGHTS = {
    "adapter_config.json": _ADAPTER,
    "adapter_model.*": _ADAPTER,
    "*.index.json": "an index whose name is not model.safetensors.index.json",
    "*.bin": f"PyTorch weights, a pickle, {_PICKLE}",
    "*.pt": f"PyTorch weights, a pickle, {_PICKLE}",
    "*.pth": f"PyTorch weights, a pickle, {_PICKLE}",
    "*.ckpt": f"a training checkpoint, a pickle, {_PICKLE}",
    "model-*-of-*.safetensors": "a shard; download model.safetensors.index.json, which says what the shards hold",
    "*.safetensors": "a safetensors file of another name; rename it to model.safetensors if it is the whole model",
    "*.gguf": "a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation",
    "*.h5": "TensorFlow weights; convert them to safetensors elsewhere",
    "*.msgpack": "Flax weights; convert them to safetensors elsewhere",
    "*.onnx": "an ONNX graph; get the safetensors of the model",
    "*.npz": "NumPy arrays; convert them to safetensors elsewhere",
}
"""Names of files that hold weights which are not read -> what they are, the most telling first."""

_LONGEST = 100
AGAIN = "download it again, or write it again with safetensors"
"""The next step where a file is damaged."""


def shown(name: str) -> str:
    """A name from a file for a message: quoted, its control characters escaped, not too long.

    >>> print(shown("a" + chr(27) + "[2J"))
    'a\\x1b[2J'
    """
    return repr(name) if len(name) <= _LONGEST else f"{name[:_LONGEST]!r}..."


def instead(head: bytes) -> str:
    """What the first bytes of a file say it is, with the next step; "" where they say nothing.

    >>> instead(b"PK and so on")
    'it is a zip or a PyTorch pickle, which is never opened; convert it to safetensors elsewhere'
    """
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return next(
        (f"it is {kind}" for sign, kind in _BEGINNINGS.items() if start.startswith(sign)), ""
    )


def refused(path: Path, reason: str, step: str = f"it is damaged; {AGAIN}") -> FileError:
    """The error of a file that is no safetensors file: what is wrong with it, and what to do.

    >>> print(refused(Path("a"), "its header is no JSON", "write it again"))
    a is not a whole safetensors file (its header is no JSON): write it again
    """
    return FileError(f"{path} is not a whole safetensors file ({reason}): {step}")


def without_weights(folder: Path, names: Iterable[str]) -> FileError:
    """The error of a folder that has neither model.safetensors nor its index: what there is, and how to go on.

    >>> print(without_weights(Path("a"), ["config.json", "model.gguf"]))
    a/model.safetensors is missing; the folder holds 'model.gguf', a GGUF file of llama.cpp; get the safetensors of \
the model, before its quantisation
    """
    said = other_weights(names)
    said = (
        f"the folder holds {said}"
        if said
        else "a model folder holds it, or model.safetensors.index.json and its shards"
    )
    return FileError(f"{folder / 'model.safetensors'} is missing; {said}")


def other_weights(names: Iterable[str]) -> str:
    """The first of some file names that holds weights which are not read: what it is, and the next step; "" without one.

    >>> other_weights(["README.md", "model-q4.gguf"])
    "'model-q4.gguf', a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation"
    """
    names = sorted(names)
    for pattern, kind in _WEIGHTS.items():
        found = [name for name in names if fnmatchcase(name.lower(), pattern)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{shown(found[0])}{more}, {kind}"
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
        said = "the folder is a whole repository of Hugging Face's cache; give one of the folders in its snapshots"
    elif inner:
        said = f"it is in the folder {shown(inner[0])} here, and in {len(inner)} in all: give that folder"
    else:
        said = "a model folder holds config.json and model.safetensors"
    return FileError(f"{folder / 'config.json'} is missing; {said}")
