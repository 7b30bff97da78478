"""A small random Llama with a small tokenizer, and its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.models.families import family
from regard.models.model import Model
from regard.models.save import save
from regard.models.tokenizer import Tokenizer

llama = family("llama")

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


def write(folder: Path, made: Model) -> Path:
    save(made.decoder, made.config, folder)
    made.tokenizer.save(folder)
    return folder
