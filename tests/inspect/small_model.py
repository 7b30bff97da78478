"""A small model with the architecture of `tiny` and random weights, for the tests of `inspect`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.configs.reader import parse
from regard.models import Model
from regard.models.families import family
from regard.models.tokenizer import Tokenizer
from tests.cost.tiny import TINY

TEXT = "a fluffy blue creature roamed the verdant forest"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT, "the blue forest", "a creature of the forest"] * 9, 300)


def model(*, seed: int = 0, sharp: float = 30.0, **changes: int) -> Model:
    """A decoder of 3 layers, H 4, G 2, D 8, M 32; `sharp` makes its patterns uneven, as a trained
    model's are.
    """
    sizes = {
        "vocab_size": tokenizer().vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(seed)
    llama = family("llama")
    config = llama.config(**{**sizes, **changes})
    decoder = llama.build(config).eval().requires_grad_(requires_grad=False)
    for name, parameter in decoder.named_parameters():  # the same whatever `build` starts from
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        else:
            large = name.endswith(("q.linear.weight", "k.linear.weight", "v.linear.weight"))
            parameter.copy_(0.02 * (sharp if large else 1.0) * torch.randn_like(parameter))
    return Model(decoder, tokenizer(), config)


def wide_model() -> Model:
    """The same in fp64, where orders of sums differ by far less than fp32's eps."""
    small = model()
    return Model(small.decoder.double(), small.tokenizer, small.config)


def shaken(network: nn.Module, by: float = 0.1) -> Any:
    """With other weights than those of the start, among which are zeros and ones."""
    with torch.no_grad():
        for each in network.parameters():
            each.add_(by * torch.randn_like(each))
    return network.eval()


def model_of(name: str, by: float = 0.1, **changes: int) -> Model:
    """A small model of a family with random weights."""
    own = family(TINY[name]["model_type"])
    torch.manual_seed(1)
    config = parse(own.config, {**TINY[name], **changes})
    return Model(shaken(own.build(config), by), None, config)


def wide_model_of(name: str, by: float = 0.1) -> Model:
    """The same in fp64."""
    small = model_of(name, by)
    return Model(small.decoder.double(), None, small.config)


PAIR = (11, 40)


def difference(logits: Tensor) -> Tensor:
    """The difference of two logits, as a metric written as a function."""
    return logits[0, -1, PAIR[0]] - logits[0, -1, PAIR[1]]
