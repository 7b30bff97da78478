"""A prompt that is read once, for many continuations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.decoder import check_ids
from regard.models.generation.context import Context, padded
from regard.models.generation.room import Room

if TYPE_CHECKING:
    from regard.models.model import Model


class Reading:
    """A text that a model has read: its caches, which every continuation forks. `model.read` makes it.

    A continuation is the ids read here, and behind them those of its own text: the two texts are encoded apart, so that a
    word across the border has other tokens than in the joined text.

    Args:
        model: the model.
        prompt: not empty.
        after: None, or what was read before; it stays as it is.
        chunk: read in pieces of so many tokens; None is one piece.
        room: the kind of cache; None is that of `after`.

    Attributes:
        ids: the ids read.
        logits: for the token behind them [V].
        seconds: the time in the model.

    Raises:
        ArgumentError: the prompt is empty, or there is no room for it.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> read = model.read("Return the")
    >>> one, two = ("".join(model.generate(text, after=read, max_tokens=2)) for text in (" list", ""))
    >>> two == "".join(model.generate("Return the", max_tokens=2))
    True
    """

    def __init__(
        self,
        model: Model,
        prompt: str,
        *,
        after: Reading | None = None,
        chunk: int | None = None,
        room: Room | None = None,
    ) -> None:
        self.model, self.room = model, Room() if room is None else room
        if after is not None:
            check_after(after, model, room)
            self.room = after.room
        elif self.room.cache in ("fixed", "paged") and self.room.max_context is None:
            raise ArgumentError(
                f"cache={self.room.cache!r} needs max_context here: how many tokens the prompt and a continuation may have"
            )
        new = encoded(model, prompt, begun=after is not None)
        self.ids: tuple[int, ...] = (*(after.ids if after is not None else ()), *new)
        self.room.check(len(self.ids), 0)
        if not new:
            raise ArgumentError(f"the text {prompt!r} has no tokens; give at least one character")
        start = time.perf_counter()
        self._context = Context(model.decoder, self.room) if after is None else after.fork()
        ids, _ = padded([new])
        self.logits: Float[Tensor, " V"] = self._context.read(
            ids.to(self._context.device), chunk=chunk
        )[0]
        self.seconds = time.perf_counter() - start

    @property
    def cache_bytes(self) -> int:
        """What the caches hold."""
        return self._context.bytes

    def fork(self, rows: int = 1) -> Context:
        """A context with what was read, so many times."""
        return self._context.fork(rows)


def check_after(after: Reading, model: Model, room: Room | None) -> None:
    """See that a reading is of this model, and that no other cache is asked for.

    Raises:
        ArgumentError: it is not, or one is.
    """
    if after.model is not model:
        raise ArgumentError("after was read by another model; read it with this one")
    if room is not None:
        raise ArgumentError(
            f"after brings its caches, {after.room}; give max_context and cache to read(...) instead"
        )


def encoded(model: Model, text: str, *, begun: bool) -> list[int]:
    """The ids of a text; what the tokenizer puts around a text belongs to one that is not begun yet.

    Raises:
        ArgumentError: the text has no tokens and is not begun, or an id lies outside the vocabulary.
    """
    ids = model.tokenizer.encode(text) if begun else model.encode(text)[0].tolist()
    check_ids(padded([ids])[0], model.config.vocab_size)
    return ids
