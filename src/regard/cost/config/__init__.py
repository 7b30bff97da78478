"""config.json -> a model as sizes, without torch: one file for each shape that architectures have in common."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regard.cost.config import fused, grouped, latent, own, stacks
from regard.cost.config.keys import Keys
from regard.cost.model import Model
from regard.errors import ArgumentError, FileError
from regard.files.strict import read_json
from regard.foreign import inert, shown, told

READERS: dict[str, Callable[[Keys, str], Model]] = {
    **dict.fromkeys(grouped.SHAPES, grouped.read),
    **dict.fromkeys(fused.TYPES, fused.read),
    **dict.fromkeys(latent.TYPES, latent.read),
    **dict.fromkeys(stacks.TYPES, stacks.read),
    "regard": own.read,
}
"""model_type -> who reads its keys."""
UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "moe_layer_freq": (None, 1),
}
"""Keys that change sizes, and are counted with these values only."""

__all__ = ["READERS", "read", "read_file"]


def read(raw: Mapping[str, Any], name: str, where: str = "config.json") -> Model:
    """The model of a parsed config.json.

    Args:
        raw: Hugging Face's keys; what does not change sizes is not looked at.
        name: what the model is called.
        where: for messages.

    Raises:
        ArgumentError: model_type is not known, a key is missing or makes no sense, or asks for what is not counted.

    >>> read({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
    ...       "n_head": 12}, "gpt2").parameters
    124439808
    """
    kind = raw.get("model_type")
    if kind == "gemma3":
        kind, raw = "gemma3_text", grouped.nested(raw)
    if not isinstance(kind, str) or kind not in READERS:
        close = difflib.get_close_matches(str(kind)[:60], READERS, 1)
        better = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(
            f"{where}: model_type {shown(kind)} is not known{better} Known are {', '.join(sorted(READERS))}; "
            "for another one give the sizes as flags: --layers --dim --heads ..."
        )
    for key, values in UNDERSTOOD.items():
        if raw.get(key) not in values:
            raise ArgumentError(
                f"{where}: {key} is {shown(raw[key])}; only {values[-1]!r} is counted: give the sizes as flags"
            )
    return READERS[kind](Keys(raw, where), name)


def read_file(path: Path) -> Model:
    """The model of a config.json, or of the folder that it is in.

    Raises:
        FileError: it is not there, too large, or no JSON object.
        ArgumentError: as `read`.
    """
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise FileError(f"{path} is no file; give a config.json, or the folder that it is in")
    try:
        return read(read_json(path), inert(path.parent.name) or str(path), str(path))
    except FileError:
        raise
    except ArgumentError as error:
        raise ArgumentError(told(error, 2000)) from error
