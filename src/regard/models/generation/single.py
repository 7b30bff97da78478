"""Continuing one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from regard.models.generation.batch import Batch, Options
from regard.models.generation.reading import Reading

if TYPE_CHECKING:
    from regard.models.model import Model


class Generation:
    """The continuation of a prompt, made while it is iterated over, once: a `Batch` of one.

    Args:
        model, options, after: as in `Batch`.
        prompt: not empty, unless something was read before.

    Raises:
        ArgumentError: as `Batch`.

    >>> import regard
    >>> generation = regard.load("tiny").generate("Return the", max_tokens=3)
    >>> text = "".join(generation)
    >>> text == generation.text, len(generation.ids), generation.finished
    (True, 3, 'length')
    """

    def __init__(
        self, model: Model, prompt: str, options: Options, after: Reading | None = None
    ) -> None:
        self._batch = Batch(model, [prompt], options, after)
        (self._row,) = self._batch.rows

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._batch)[1]

    @property
    def ids(self) -> list[int]:
        """The new ids so far, those of a stop string included."""
        return self._row.ids

    @property
    def text(self) -> str:
        """The new text so far."""
        return self._row.text

    @property
    def finished(self) -> Literal["end", "stop", "length"] | None:
        """Why it ended: a token that ends a text, a stop string, or max_tokens; None while it goes on."""
        return self._row.finished

    @property
    def seconds(self) -> float:
        """The time in the model so far."""
        return self._batch.seconds

    @property
    def prefill_seconds(self) -> float:
        """The part of it that reading the prompt took."""
        return self._batch.prefill_seconds

    @property
    def decode_seconds(self) -> float:
        """The part of it behind the first token, which comes out of the prompt's pass."""
        return self._batch.decode_seconds

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; what was read before it is not counted."""
        return self._batch.prompt_tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt read per second."""
        return self._batch.prefill_tokens_per_second

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second behind the first; 0 where there was only one."""
        return self._batch.decode_tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of model time, the prompt's pass included."""
        return self._batch.tokens_per_second

    @property
    def cache_bytes(self) -> int:
        """The most bytes that the caches of all layers held so far."""
        return self._batch.cache_bytes

    @property
    def cache(self) -> str:
        """The kind of cache of the layers that keep everything."""
        return self._batch.cache
