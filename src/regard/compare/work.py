"""What is timed: a prompt, one more token behind a cache, a training step; each as a function of no arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from regard.caches import Cache
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.models.generation.room import Room
from regard.tap import Trace
from regard.train.losses import next_token_loss
from regard.train.settings import Settings, optimiser

Step = Callable[[], object]
RATE = 1e-4
"""Learning rate of timed steps: weights must move, not far."""

ITEM = 4
"""Bytes of a number: all is measured in fp32."""


class Kernels(Trace):
    """Notes which kernel computes each call of softmax attention.

    >>> from regard import attend
    >>> with Kernels() as seen:
    ...     _ = attend(*torch.zeros(3, 1, 1, 2, 4), backend="reference")
    >>> seen.names
    ['reference']
    """

    watches: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """One call more."""
        name = kernel.partition(",")[0]
        if name not in self.names:
            self.names.append(name)


def ids(config: Config, batch: int, length: int) -> Int[Tensor, "batch length"]:
    """Random tokens [B,T], the same for a length each time.

    >>> from regard.compare.mechanisms import Contestant, Shape
    >>> ids(Contestant("mqa", "mqa").config(Shape(dim=32)), 2, 3).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(length)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def read(model: Decoder, prompt: Int[Tensor, "B T"], room: int | None = None) -> list[Cache]:
    """Caches that hold a prompt [B,T]; those that keep all are allocated once, for `room` tokens.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> [type(c).__name__ for c in read(decoder(config), ids(config, 1, 3), 4)]
    ['Fixed']
    """
    rows, length = prompt.shape
    caches = Room("fixed", room or length).caches(model, rows)
    with torch.inference_mode():
        model(prompt, None, caches, last=1)
    return caches


def prefill(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Read a prompt of `context` tokens into new caches, and give the logits behind its last.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> len(prefill(decoder(config), config, 5)())
    1
    """
    prompt = ids(config, batch, context)
    return lambda: read(model, prompt)


def decode(model: Decoder, config: Config, context: int, batch: int = 1) -> Step:
    """Decode the token at position context - 1, behind caches that hold all before; then take it back.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> step = decode(decoder(config), config, 5)
    >>> bool((step() == step()).all())
    True
    """
    prompt = ids(config, batch, context)
    caches = read(model, prompt[:, : context - 1], context) if context > 1 else model.new_caches()
    last = prompt[:, context - 1 :]

    def step() -> Tensor:
        marks = [cache.mark() for cache in caches]
        with torch.inference_mode():
            logits: Tensor = model(last, None, caches)
            for cache, mark in zip(caches, marks, strict=True):
                cache.restore(mark)
        return logits

    return step


def training(model: Decoder, config: Config, length: int, batch: int) -> Step:
    """One optimiser step on rows of `length` predicted tokens: forward, backward, AdamW.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> step = training(decoder(config), config, 5, 2)
    >>> step() > step()
    True
    """
    rows = ids(config, batch, length + 1)
    update = optimiser(model, Settings(steps=1, lr=RATE))

    def step() -> float:
        update.zero_grad(set_to_none=True)
        loss = next_token_loss(model, rows)
        loss.backward()
        update.step()
        return loss.item()

    return step


def kernels(step: Step) -> list[str]:
    """The kernels of softmax attention that a step runs; empty where it runs none, as a recurrence does.

    >>> kernels(lambda: None)
    []
    """
    with Kernels() as seen:
        step()
    return seen.names


def cache_bytes(model: Decoder, config: Config, context: int, batch: int = 1) -> int:
    """Bytes that the caches of all layers really hold behind so many tokens, each of the kind that suits its layer.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> cache_bytes(decoder(config), config, 10)  # one key and one value of 8 numbers, 4 bytes each
    640
    """
    caches = model.new_caches()
    with torch.inference_mode():
        model(ids(config, batch, context), None, caches, last=1)
    return sum(cache.bytes for cache in caches)


def described_bytes(model: Decoder, context: int, batch: int = 1) -> int:
    """Bytes that caches hold in fp32 by the formulas of `regard describe`.

    >>> from regard.compare.mechanisms import Contestant, Shape, decoder
    >>> config = Contestant("mqa", "mqa").config(Shape(dim=32, layers=1))
    >>> described_bytes(decoder(config), 10)
    640
    """
    layers = [layer.get_submodule("attention") for layer in model.layers]
    return batch * sum(ITEM * layer.describe(context).kept for layer in layers)  # type: ignore[operator]
