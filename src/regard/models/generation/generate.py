"""Generation token by token: one prompt or a batch, with stop strings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.generation.context import (
    Context,
    LanguageModel,
    Reading,
    check_after,
    encoded,
    padded,
)
from regard.models.generation.room import Room
from regard.models.generation.sampling import Sampler, Sampling


class Stops:
    """Lets text through up to the first stop string; what may be the beginning of one is held back
    until that is known.

    The stop string that is complete first ends the text, and of several that are complete at the
    same letter the one that began first. The answer depends on the letters, not on the pieces that
    they came in.

    Args:
        stops: a string, or several, none of them empty.

    Attributes:
        found: the stop string that ended the text, or None.

    Raises:
        ArgumentError, ArgumentTypeError: a stop string is empty, or no string.

    >>> stops = Stops(["\\n\\n", "END"])
    >>> [stops.push(piece) for piece in ("one\\n", "two E", "N", "D three")]
    ['one', '\\ntwo ', '', '']
    >>> stops.found
    'END'
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise ArgumentTypeError(f"a stop is {type(stop).__name__}; it must be a string")
            if not stop:
                raise ArgumentError("a stop string is empty; every text ends with it: leave it out")
        self.stops = stops
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string, now that this piece has come."""
        if not self.stops:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max(_begun(text, stop) for stop in self.stops)
        at = len(text) - keep
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """What was held back, when no more text comes: it was no stop string."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many letters at the end of the text are the beginning of the stop string."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


@dataclass(frozen=True)
class Options:
    """What is asked of a continuation.

    Args:
        max_tokens: the most new tokens, 0 or more.
        stop: strings that end the text, which they are left out of.
        chunk: the prompt is read in pieces of so many tokens; None is one piece.
        sampling: how a token is chosen.
        room: the kind of cache; None is the usual one, or that of a reading.

    Raises:
        ArgumentError, ArgumentTypeError: a number is no int, or out of its range; a stop string is
            empty.

    >>> Options(max_tokens=3, stop=("end",)).chunk
    512
    """

    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    chunk: int | None = 512
    sampling: Sampling = field(default_factory=Sampling)
    room: Room | None = None

    def __post_init__(self) -> None:
        for name, n, least in (("max_tokens", self.max_tokens, 0), ("chunk", self.chunk, 1)):
            if n is None and name == "chunk":
                continue
            if isinstance(n, bool) or not isinstance(n, int):
                raise ArgumentTypeError(f"{name} is {type(n).__name__}; it must be an int")
            if n < least:
                raise ArgumentError(f"{name} is {n}; it must be {least} or more")
        Stops(self.stop)


class Continuation:
    """A prompt and what follows it so far.

    Attributes:
        prompt: the text that was given.
        ids: the new ids, those of a stop string included, that of an end not.
        text: the new text, up to a stop string.
        finished: "end" (a token that ends a text), "stop" (a stop string), "length" (max_tokens);
            None while it goes on.

    >>> import regard
    >>> batch = regard.load("tiny").generate(["Return the"], max_tokens=2)
    >>> batch.rows[0].finished, len(list(batch)), batch.rows[0].finished
    (None, 2, 'length')
    """

    def __init__(self, model: LanguageModel, prompt: str, options: Options) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self.text = ""
        self.finished: Literal["end", "stop", "length"] | None = None
        self._stream, self._stops = model.tokenizer.stream(), Stops(options.stop)
        self._ends, self._most = model.ends, options.max_tokens

    def take(self, token: int) -> str:
        """Go on by a token: the text that is now certain, often a word, sometimes nothing."""
        if token in self._ends:
            return self._finish("end")
        self.ids.append(token)
        piece = self._stops.push(self._stream.push(token))
        if self._stops.found is not None:
            self.finished = "stop"
        elif len(self.ids) >= self._most:
            return self._finish("length", piece)
        self.text += piece
        return piece

    def _finish(self, why: Literal["end", "length"], piece: str = "") -> str:
        """With what was held back: half a character, or what might have become a stop string."""
        piece += self._stops.push(self._stream.flush())
        if self._stops.found is None:
            piece += self._stops.flush()
        self.finished = why if self._stops.found is None else "stop"
        self.text += piece
        return piece


class Batch:
    """Continuations of several prompts, made while it is iterated over, once: pairs (row, piece of
    text).

    Prompts of different length are padded on the left, at position -1. A row that has finished
    leaves the batch. What a row gets does not depend on the others: row i is what its prompt alone
    gives with seed + i, up to the rounding of a batch.

    Args:
        model: the model.
        prompts: none of them empty, unless something was read before.
        options: what is asked for.
        after: what was read before all of them, or None.

    Attributes:
        rows: a `Continuation` for each prompt.
        seconds: the time in the model so far.
        prefill_seconds: the part of it that reading the prompts took.
        decode_seconds: the part of it behind the first token of each row, which comes out of the
            prompts' pass.
        prompt_tokens: of all prompts; what was read before them is not counted.
        cache_bytes: the most that the caches of all layers held.

    Raises:
        ArgumentError: there is no prompt or an empty one, an option does not fit the model, or
            there is no room.

    >>> import regard
    >>> batch = regard.load("tiny").generate(["Return the", "If"], max_tokens=3)
    >>> [row for row, piece in batch]
    [0, 1, 0, 1, 0, 1]
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[str],
        options: Options,
        after: Reading | None = None,
    ) -> None:
        if not prompts:
            raise ArgumentError("there are no prompts; give at least one")
        if after is not None:
            check_after(after, model, options.room)
        self._read = () if after is None else after.ids
        self._new = [encoded(model, prompt, begun=after is not None) for prompt in prompts]
        self._options, self._after = options, after
        self._room = self._checked_room()
        rows = [[*self._read, *ids] for ids in self._new]
        self._sampler = Sampler(options.sampling, rows, model.config.vocab_size)
        self.rows = [Continuation(model, prompt, options) for prompt in prompts]
        self.seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.prompt_tokens = sum(map(len, self._new))
        self._stepped = 0
        self._most_bytes = 0
        # here, so that a model which the room does not fit is refused before it starts
        self._context = Context(model.decoder, self._room, len(prompts)) if after is None else None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        return next(self._pieces)

    @property
    def cache_bytes(self) -> int:
        """The most bytes that the caches of all layers held so far."""
        held = 0 if self._context is None else self._context.bytes
        return max(self._most_bytes, held)

    @property
    def cache(self) -> str:
        """The kind of cache of the layers that keep everything."""
        return self._room.cache

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of model time, the prompts' pass included."""
        tokens = sum(len(row.ids) for row in self.rows)
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompts read per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of all rows per second behind the first of each; 0 where there was only one."""
        return self._stepped / self.decode_seconds if self.decode_seconds else 0.0

    def _checked_room(self) -> Room:
        room = self._options.room or Room()
        if self._after is not None:
            room = self._after.room
        longest = len(self._read) + max(len(ids) for ids in self._new)
        return room.sized(longest, self._options.max_tokens)

    def _run(self) -> Iterator[tuple[int, str]]:
        if not self._options.max_tokens:
            for row in self.rows:
                row.finished = "length"
            return
        start = time.perf_counter()
        logits = self._prefill()
        self.prefill_seconds = time.perf_counter() - start
        going, stepping = list(range(len(self.rows))), False
        while True:
            tokens = self._sampler(logits)
            taken = time.perf_counter() - start
            self.seconds += taken
            if stepping:
                self.decode_seconds += taken
                self._stepped += len(going)
            for i, token in zip(going, tokens, strict=True):
                piece = self.rows[i].take(token)
                if piece:
                    yield i, piece
            kept = [j for j, i in enumerate(going) if self.rows[i].finished is None]
            if not kept:
                return
            start = time.perf_counter()
            if len(kept) < len(going):
                self._leave(kept)
            going, stepping = [going[j] for j in kept], True
            logits = self._step([tokens[j] for j in kept])

    def _prefill(self) -> Tensor:
        """Read the prompts: the logits behind them [B,V]."""
        after, rows = self._after, len(self.rows)
        if after is not None:
            self._context = after.fork(rows)
            if not any(self._new):
                return after.logits.expand(rows, -1)
        assert self._context is not None, "made by the constructor, or forked"
        ids, positions = padded(self._new, start=len(self._read))
        device = self._context.device
        positions = positions.to(device) if isinstance(positions, Tensor) else positions
        logits = self._context.read(ids.to(device), positions, chunk=self._options.chunk)
        if after is None or all(self._new):
            return logits
        empty = torch.tensor([[not new] for new in self._new], device=device)
        return torch.where(empty, after.logits, logits)

    def _step(self, tokens: list[int]) -> Tensor:
        assert self._context is not None, "prompts are read first"
        return self._context.read(torch.tensor(tokens, device=self._context.device)[:, None])

    def _leave(self, kept: list[int]) -> None:
        """Keep these rows only."""
        assert self._context is not None, "prompts are read first"
        self._most_bytes = self.cache_bytes
        self._context.select(torch.tensor(kept))
        self._sampler.select(kept)


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
        self, model: LanguageModel, prompt: str, options: Options, after: Reading | None = None
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
        """Why it ended: a token that ends a text, a stop string, or max_tokens; None while it goes
        on.
        """
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
