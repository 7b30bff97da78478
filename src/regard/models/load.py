"""Finding a model by its source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from regard.errors import ArgumentError, FileError
from regard.models.checkpoint import fill, read_config
from regard.models.checkpoint.ends import read_ends
from regard.models.checkpoint.family import Family, Raw
from regard.models.checkpoint.store import Store
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.models.model import Model
from regard.models.tokenizer import Tokenizer

EMBEDDED = ("tiny",)
"""Models that come with the package."""


def load(
    source: str | Path = "tiny",
    *,
    dtype: torch.dtype | None = None,
    allow_missing: Sequence[str] = (),
    finite: bool = False,
) -> Model:
    """Load a model and its tokenizer from a Hugging Face folder, or an embedded one by name.

    The folder is data, never code: config.json, safetensors (one file, or shards with an index) and tokenizer.json are
    checked before anything is allocated. A folder without tokenizer.json gives a model that takes ids only.

    Args:
        source: `"tiny"`, a Llama-shaped decoder that comes with the package; or a folder.
        dtype: of the weights, and so of the computation; None is the one that config.json names, else that of the stored
            weights. On a CPU, float16 decodes fastest (LOG.md), and bfloat16 slowest.
        allow_missing: patterns (`*`, `?`) of stored names that may be absent; such weights are fresh, not trained.
        finite: whether to refuse weights that are NaN or infinite; it takes about as long again as reading them.

    Raises:
        FileError: the folder or a file in it is missing, damaged, not supported, or contradicts another.
        ArgumentError: dtype is not a floating-point one.

    >>> load("tiny").config.vocab_size
    1024
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}; weights are float32, float16, bfloat16 or float64")
    folder = _folder(source)
    found, config, raw = read_config(folder, family)
    store = Store.open(folder)
    config = found.settle(config, raw, store.tensors)
    _check_layers(folder, config, len(store.tensors))
    with torch.device("meta"):
        network = found.build(config)
    fill(
        network, found, store,
        dtype=dtype or _dtype(folder, raw, store),
        allow_missing=allow_missing, finite=finite, fresh=partial(found.build, config),
    )  # fmt: skip
    network = network.eval().requires_grad_(False)
    return _model(found, network, config, folder, raw)


def _model(found: Family, network: nn.Module, config: Any, folder: Path, raw: Raw) -> Model:
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(file) if file.exists() else None
    return Model(cast("Decoder", network), tokenizer, config, ends=read_ends(folder, raw, tokenizer))


def _check_layers(folder: Path, config: Any, tensors: int) -> None:
    """Refuse a config that would make more modules than there are tensors, before they are made."""
    for name, value in vars(config).items():
        counted = "layers" in name or "experts" in name or name == "n_layer"
        if counted and isinstance(value, int) and value > 64 * tensors:
            raise FileError(
                f"{folder / 'config.json'}: {name} is {value}, and the folder holds {tensors} tensors"
            )


def _dtype(folder: Path, raw: Raw, store: Store) -> torch.dtype:
    """The one dtype that config.json names, else that of most stored bytes."""
    text = raw.get("dtype") or raw.get("torch_dtype")
    if text is not None:
        found = getattr(torch, str(text).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise FileError(
                f"{folder / 'config.json'}: torch_dtype is {text!r}; it must be float32, float16, bfloat16 or float64"
            )
        return found
    bytes_of: dict[torch.dtype, int] = {}
    for x in store.tensors.values():
        if x.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            bytes_of[x.dtype] = bytes_of.get(x.dtype, 0) + x.bytes
    return max(bytes_of, key=lambda d: bytes_of[d], default=torch.float32)


def _folder(source: str | Path) -> Path:
    if source in EMBEDDED:
        return Path(str(resources.files("regard") / "assets" / str(source)))
    folder = Path(source)
    if not folder.is_dir():
        raise FileError(
            f"no model {str(source)!r}: it is neither an embedded one ({', '.join(EMBEDDED)}) nor a folder"
        )
    return folder
