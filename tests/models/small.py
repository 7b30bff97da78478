"""A small random Llama with a small tokenizer, and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.errors import FileError
from regard.files.named_packages import packaged_source
from regard.models.families import family
from regard.models.model import Model
from regard.models.save import save
from regard.models.text_model import TextModel
from regard.models.tokenizer import Tokenizer

llama = family("llama")

Kind = TypeVar("Kind", bound=TextModel)


def named_model(name: str, kind: type[Kind]) -> Kind:
    """A trained model from a package; the test is skipped, with the install line, without it."""
    try:
        source = packaged_source(name)
    except FileError as error:
        pytest.skip(str(error))
    model = regard.load(source)
    assert isinstance(model, kind)
    return model


TEXT = [
    "the quick brown fox jumps over the lazy dog, né 你好",
    "the key of a query",
    "a value of the key",
] * 3


def config(**change: Any) -> llama.config:
    """head_dim is not hidden_size / num_attention_heads."""
    plain = {
        "vocab_size": 300,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
    }
    return llama.config(**plain | change)


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Weights large enough that attention is not uniform, and norm weights other than 1."""
    make = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=make)
        parameter.data.copy_(1 + 0.5 * noise if parameter.ndim == 1 else 0.3 * noise)


def model(seed: int = 0, **change: Any) -> Model:
    made = config(**change)
    decoder = llama.build(made)
    randomize(decoder, seed)
    tokenizer = Tokenizer.train(TEXT, vocab_size=made.vocab_size)
    return Model(decoder.eval().requires_grad_(False), tokenizer, made)


def change_config(folder: Path, **change: Any) -> None:
    """Change keys of config.json; None takes a key out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: x for key, x in raw.items() if x is not None}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Store the tensors of a folder as a function has changed them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def write(folder: Path, made: Model) -> Path:
    save(made.decoder, made.config, folder)
    made.tokenizer.save(folder)
    return folder
