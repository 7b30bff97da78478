"""Continuing a prompt token by token, with a cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.arguments import check_number
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.models.model import Model


class Generation:
    """The continuation of a prompt, made while it is iterated over; it can be iterated once.

    Attributes:
        ids: the new token ids so far.
        text: the new text so far.
        seconds: the time spent in the model so far.
        cache_bytes: what the caches hold now.
    """

    def __init__(
        self,
        model: Model,
        prompt: str,
        max_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int,
    ) -> None:
        check_number("temperature", temperature, -1e-300, float("inf"), "0 or more")
        if max_tokens < 0:
            raise ArgumentError(f"max_tokens is {max_tokens}; it must be 0 or more")
        if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
            raise ArgumentError(
                f"top_k is {top_k}; it must be 1 to {model.config.vocab_size}, or None"
            )
        self.ids: list[int] = []
        self.text = ""
        self.seconds = 0.0
        self._model, self._max = model, max_tokens
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self._next = model.encode(prompt)
        self._caches = model.new_caches()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values held by the caches of all layers."""
        return sum(cache.bytes for cache in self._caches)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of model time, the prompt's pass included."""
        return len(self.ids) / self.seconds if self.seconds else 0.0

    def _run(self) -> Iterator[str]:
        stream = self._model.tokenizer.stream()
        for _ in range(self._max):
            start = time.perf_counter()
            token = self._step()
            self.seconds += time.perf_counter() - start
            if token == self._model.tokenizer.end_of_text:
                break
            self.ids.append(token)
            piece = stream.push(token)
            self.text += piece
            if piece:
                yield piece
        piece = stream.flush()
        self.text += piece
        if piece:
            yield piece

    @torch.inference_mode()
    def _step(self) -> int:
        logits = self._model.forward(self._next, caches=self._caches)[0, -1]
        token = pick(logits, self._temperature, self._top_k, self._generator)
        self._next = torch.tensor([[token]])
        return token


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """A token id from logits [V]: the most likely one at temperature 0, else a sample."""
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits.float() - logits.max()) / temperature  # a tiny temperature must not overflow
    if top_k is not None:
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
