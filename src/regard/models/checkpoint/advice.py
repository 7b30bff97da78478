"""What a folder that is no checkpoint seems to be instead, and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from regard.errors import FileError
from regard.files.seems import PICKLE
from regard.foreign import shown

_WEIGHTS = {
    "*.index.json": "an index whose name is not model.safetensors.index.json",
    "*.bin": f"PyTorch weights, a pickle, {PICKLE}",
    "*.pt": f"PyTorch weights, a pickle, {PICKLE}",
    "*.pth": f"PyTorch weights, a pickle, {PICKLE}",
    "*.ckpt": f"a training checkpoint, a pickle, {PICKLE}",
    "adapter_model.safetensors": "an adapter; merge it into its base model first",
    "model-*-of-*.safetensors": "a shard; download model.safetensors.index.json, which says what the shards hold",
    "*.safetensors": "a safetensors file of another name; rename it to model.safetensors if it is the whole model",
    "*.gguf": "a GGUF file of llama.cpp; get the safetensors of the model, before its quantisation",
    "*.h5": "TensorFlow weights; convert them to safetensors elsewhere",
    "*.msgpack": "Flax weights; convert them to safetensors elsewhere",
    "*.onnx": "an ONNX graph; get the safetensors of the model",
    "*.npz": "NumPy arrays; convert them to safetensors elsewhere",
}
"""Names of files that hold weights which are not read -> what they are, the most telling first."""


def without_weights(folder: Path, names: Iterable[str]) -> FileError:
    """The error of a folder that has neither model.safetensors nor its index: what there is, and how to go on.

    >>> print(without_weights(Path("a"), ["config.json", "model.gguf"]))
    a/model.safetensors is missing; the folder holds 'model.gguf', a GGUF file of llama.cpp; get the safetensors of \
the model, before its quantisation
    """
    names = sorted(names)
    for pattern, kind in _WEIGHTS.items():
        found = [name for name in names if fnmatchcase(name.lower(), pattern)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            said = f"the folder holds {shown(found[0])}{more}, {kind}"
            break
    else:
        said = "a model folder holds it, or model.safetensors.index.json and its shards"
    return FileError(f"{folder / 'model.safetensors'} is missing; {said}")
