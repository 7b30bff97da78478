"""What a folder that is no checkpoint seems to be instead, and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from regard.errors import FileError
from regard.files.seems import PICKLE
from regard.foreign import shown

_ADAPTER = (
    "an adapter, which is nothing without its base model; merge it into that first (peft: "
    "merge_and_unload)"
)
_WEIGHTS = {
    "adapter_config.json": _ADAPTER,
    "adapter_model.*": _ADAPTER,
    "*.index.json": "an index whose name is not model.safetensors.index.json",
    "*.bin": f"PyTorch weights, a pickle, {PICKLE}",
    "*.pt": f"PyTorch weights, a pickle, {PICKLE}",
    "*.pth": f"PyTorch weights, a pickle, {PICKLE}",
    "*.ckpt": f"a training checkpoint, a pickle, {PICKLE}",
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
    """The first of some file names that holds weights which are not read: what it is, and the next
    step; "" without one.

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
        said = (
            "the folder is a whole repository of Hugging Face's cache; give one of the folders "
            "in its snapshots"
        )
    elif inner:
        said = (
            f"it is in the folder {shown(inner[0])} here, and in {len(inner)} in all: give "
            "that folder"
        )
    else:
        said = "a model folder holds config.json and model.safetensors"
    return FileError(f"{folder / 'config.json'} is missing; {said}")
