"""Finding a model by its source."""

from __future__ import annotations

import importlib
from importlib import resources
from pathlib import Path

from regard.errors import FileError
from regard.models.checkpoint import read_config, read_weights
from regard.models.model import Model
from regard.models.tokenizer import Tokenizer

EMBEDDED = ("tiny",)
"""Models that come with the package."""


def load(source: str | Path = "tiny") -> Model:
    """Load a model and its tokenizer from a folder, or an embedded one by name.

    Args:
        source: `"tiny"`, a Llama-shaped decoder that comes with the package; or a folder with config.json,
            model.safetensors and tokenizer.json.

    Raises:
        FileError: the folder or a file in it is missing, damaged or not supported.

    >>> load("tiny").config.vocab_size
    1024
    """
    folder = _folder(source)
    config = read_config(folder)
    family = importlib.import_module(type(config).__module__)
    decoder = family.build(config)
    read_weights(decoder, family, folder / "model.safetensors")
    return Model(
        decoder.eval().requires_grad_(False), Tokenizer.load(folder / "tokenizer.json"), config
    )


def _folder(source: str | Path) -> Path:
    if source in EMBEDDED:
        return Path(str(resources.files("regard") / "assets" / str(source)))
    folder = Path(source)
    if not folder.is_dir():
        raise FileError(
            f"no model {str(source)!r}: it is neither an embedded one ({', '.join(EMBEDDED)}) nor a folder"
        )
    return folder
