"""What a model has read so far: it reads on, forks, drops rows, and serves as a shared prefix of
several continuations.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cache
from regard.errors import ArgumentError
from regard.models.decoder import Decoder, check_ids
from regard.models.generation.room import Room, follows_length
from regard.models.tokenizer import Tokenizer
from regard.nn import PrefixRecomputer
from regard.span import Positions, slice_positions, slot_count


class LanguageModel(Protocol):
    """What generation needs of a model; `regard.models.Model` has it."""

    config: Any
    """The config of its family, with vocab_size."""
    decoder: Decoder
    """ids [B,T] -> logits [B,T,V]."""
    ends: frozenset[int]
    """The ids that end a text."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids."""
        ...

    def encode(self, text: str) -> Int[Tensor, "1 T"]:
        """The ids [1,T] of a text, with what the tokenizer puts around it."""
        ...


class Context:
    """A decoder and the caches of a batch of texts; every token is read once.

    A model whose rotary frequencies follow the length is run through
    `regard.nn.PrefixRecomputer`: its prefix is read again when they change, so that what is cached
    equals one pass there, too. Its prompt is read in one piece.

    Args:
        decoder: a `Decoder`.
        room: which caches, and how large.
        rows: the most rows that the batch will have.

    Raises:
        ArgumentError: the decoder has no head; or as `Room.narrow`.

    >>> import regard, torch
    >>> context = Context(regard.load("tiny").decoder)
    >>> context.read(torch.tensor([[1, 2, 3, 4]]), chunk=3).shape
    torch.Size([1, 1024])
    >>> context.read(torch.tensor([[5]])).shape
    torch.Size([1, 1024])
    """

    def __init__(self, decoder: Decoder, room: Room | None = None, rows: int = 1) -> None:
        decoder.require_head()
        self._room = Room() if room is None else room
        self._decoder = self._room.narrow(decoder)
        self._prefix = PrefixRecomputer(self._decoder) if follows_length(decoder) else None
        self._caches = self._room.caches(self._decoder, rows)
        parameter = next(decoder.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device

    @property
    def caches(self) -> list[Cache]:
        """One per layer."""
        return self._caches if self._prefix is None else self._prefix.caches

    @property
    def bytes(self) -> int:
        """Bytes that the caches of all layers hold."""
        return sum(cache.bytes for cache in self.caches)

    @torch.inference_mode()
    def read(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        *,
        chunk: int | None = None,
    ) -> Float[Tensor, "B V"]:
        """Read ids [B,T], which continue what was read, in pieces of at most `chunk`: the logits of
        the last slot [B,V].

        Args:
            ids: T is at least 1.
            positions: default: on from the last token of each row. -1 is padding.
            chunk: None is one piece. What is read does not depend on it.
        """
        if self._prefix is not None:
            return self._prefix(ids, positions, last=1)[:, -1]
        T = ids.shape[1]
        logits: Tensor | None = None
        step = T if chunk is None else chunk
        for a in range(0, T, step):
            where = (
                None
                if positions is None
                else slice_positions(positions, slice(a, min(T, a + step)))
            )
            logits = self._decoder(ids[:, a : a + step], where, self._caches, last=1)
        assert logits is not None, "there is something to read"
        return logits[:, -1]

    @torch.inference_mode()
    def fork(self, rows: int = 1) -> Context:
        """Another context with what this one, of one row, has read, so many times; this one stays
        as it is.
        """
        other = copy.copy(self)
        if self._prefix is None:
            other._caches = [self._room.fork(cache, rows) for cache in self._caches]
        else:
            other._prefix = self._prefix.fork()
            if rows > 1:
                other._prefix.select(torch.zeros(rows, dtype=torch.int64))
        return other

    @torch.inference_mode()
    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        batch = self.caches[0].batch if self.caches else None
        if len(rows) == batch and torch.equal(rows.cpu(), torch.arange(batch)):
            return None  # beams that stay where they are cost nothing
        if self._prefix is not None:
            return self._prefix.select(rows)
        for cache in self._caches:
            cache.select(rows)
        return None


def padded(
    rows: Sequence[Sequence[int]], start: int = 0
) -> tuple[Int[Tensor, "B T"], Positions | None]:
    """Rows of ids, padded on the left to one length, and their positions from start on: -1 in
    front; None without padding.

    >>> ids, positions = padded([[7, 8, 9], [5]])
    >>> ids.tolist(), positions.tolist()
    ([[7, 8, 9], [0, 0, 5]], [[0, 1, 2], [-1, -1, 0]])
    """
    T = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (T - len(row)) + list(row) for row in rows], dtype=torch.int64)
    if all(len(row) == T for row in rows):
        return ids, None
    gaps = torch.tensor([[T - len(row)] for row in rows])
    slots = torch.arange(T)[None] - gaps
    positions = torch.where(slots >= 0, slots + start, -1)
    assert slot_count(positions) == T
    return ids, positions


class Reading:
    """A text that a model has read: its caches, which every continuation forks. `model.read` makes
    it.

    A continuation is the ids read here, and behind them those of its own text: the two texts are
    encoded apart, so that a word across the border has other tokens than in the joined text.

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
    >>> texts = " list", ""
    >>> one, two = ("".join(model.generate(text, after=read, max_tokens=2)) for text in texts)
    >>> two == "".join(model.generate("Return the", max_tokens=2))
    True
    """

    def __init__(
        self,
        model: LanguageModel,
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
        elif self.room.kind.needs_slots and self.room.max_context is None:
            raise ArgumentError(
                f"cache={self.room.cache!r} needs max_context here: how many tokens the prompt "
                "and a continuation may have"
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


def check_after(after: Reading, model: LanguageModel, room: Room | None) -> None:
    """See that a reading is of this model, and that no other cache is asked for.

    Raises:
        ArgumentError: it is not, or one is.
    """
    if after.model is not model:
        raise ArgumentError("after was read by another model; read it with this one")
    if room is not None:
        raise ArgumentError(
            f"after brings its caches, {after.room}; give max_context and cache to read(...) "
            "instead"
        )


def encoded(model: LanguageModel, text: str, *, begun: bool) -> list[int]:
    """The ids of a text; what the tokenizer puts around a text belongs to one that is not begun
    yet.

    Raises:
        ArgumentError: the text has no tokens and is not begun, or an id lies outside the
            vocabulary.
    """
    ids = model.tokenizer.encode(text) if begun else model.encode(text)[0].tolist()
    check_ids(padded([ids])[0], model.config.vocab_size)
    return ids
