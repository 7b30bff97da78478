"""Small random models to convert, in float64, and how far two of them are apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from regard.models.convert.attention_maps import Checkpoint
from regard.models.families import family
from tests.models import small

LENGTH = 24


def llama(seed: int = 0, **change: Any) -> Checkpoint:
    made = small.model(seed, **change)
    return Checkpoint(made.decoder.double(), made.config)


def of(name: str, seed: int = 0, **change: Any) -> Checkpoint:
    """A model of another family with the sizes of the small Llama, or with its own."""
    found = family(name)
    known = {f.name for f in dataclasses.fields(found.config)}
    plain = {k: v for k, v in dataclasses.asdict(small.config()).items() if k in known}
    config = found.config(**{**plain, **change})
    network = found.build(config)
    small.randomize(network, seed)
    return Checkpoint(network.eval().requires_grad_(False).double(), config)


def own(seed: int = 0, *, position: str = "none", **options: Any) -> Checkpoint:
    """regard's grouped queries, without positions unless they are asked for."""
    return of(
        "regard",
        seed,
        attention="gqa",
        attention_options={"groups": 2, "head_dim": 10} | options,
        position=position,
    )


def ids(held: Checkpoint, length: int = LENGTH) -> Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randint(held.config.vocab_size, (2, length), generator=make)


def logits(held: Checkpoint, length: int = LENGTH) -> Tensor:
    return held.network(ids(held, length))


def distance(a: Checkpoint, b: Checkpoint, length: int = LENGTH) -> float:
    """The largest difference of logits over the largest logit."""
    x, y = logits(a, length), logits(b, length)
    return float((x - y).abs().max() / x.abs().max())


ROUNDING = 1e-12
"""fp64 against fp64: some thousand additions of 1e-16 each."""
FAR = 1e-3
"""What a wrong conversion moves at least."""
