"""`regard train --start-from`: the tokenizer and the weights of a model that is trained further."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.configs.base import ModelConfig
from regard.errors import ArgumentError
from regard.models.families import family, model_type_of
from regard.models.load import load
from regard.models.model import Model
from regard.models.tokenizer import Tokenizer
from regard.nn.stored import stored_modules
from regard.units import plural


def load_starting_model(source: str | Path) -> Model:
    """Load a decoder in float32, to train it further.

    >>> load_starting_model("tiny").dtype
    torch.float32
    """
    model = load(source, dtype=torch.float32)
    if not isinstance(model, Model) or model.tokenizer is None:
        raise ArgumentError(
            f"{source} cannot be trained further: only a decoder with a tokenizer can; give the "
            "folder of another model"
        )
    return model


def extended_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a model, with the Chinese characters of some texts if `vocab_size` is
    larger than its vocabulary.

    >>> tokenizer = Tokenizer.train(["low"], vocab_size=258)
    >>> extended_tokenizer(tokenizer, ["我"], 259).vocab_size
    259
    """
    if vocab_size < tokenizer.vocab_size:
        raise ArgumentError(
            f"vocab is {vocab_size} and the model has {plural(tokenizer.vocab_size, 'token')}, "
            f"which it keeps; give {tokenizer.vocab_size} or more"
        )
    if vocab_size == tokenizer.vocab_size:
        return tokenizer
    return tokenizer.with_chinese(texts, vocab_size)


def extended_model(model: Model, vocab_size: int, seed: int) -> tuple[nn.Module, ModelConfig]:
    """Return a copy of a model with more tokens, and its config.

    The weights of the old tokens and of all layers are copied; those that are stored in fewer bits
    are dequantized. Rows of new tokens are normally distributed, with the mean and the standard
    deviation of the old rows of their matrix. The global random state is set to the seed.

    >>> network, config = extended_model(load("tiny"), 2000, seed=0)
    >>> config.vocab_size, tuple(network.state_dict()["head.weight"].shape)
    (2000, (2000, 256))
    """
    config = replace(model.config, vocab_size=vocab_size)
    model_family = family(model_type_of(config))
    torch.manual_seed(seed)
    network = model_family.build(config)
    old = model.decoder.state_dict()
    old |= {name: record.dequantize() for name, record in stored_modules(model.decoder)}
    new = network.state_dict()
    network.load_state_dict({name: _extended(old[name], new[name]) for name in new})
    return network, config


def _extended(old: Tensor, new: Tensor) -> Tensor:
    """Return the old tensor with rows added until it has the shape of the new one."""
    if old.shape == new.shape:
        return old
    rows = torch.randn(new.shape[0] - old.shape[0], *old.shape[1:], dtype=old.dtype)
    return torch.cat([old, rows * old.std(0) + old.mean(0)])
