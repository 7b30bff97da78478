"""Token-by-token generation for one prompt or a batch, with stop strings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.generation.cache_config import CacheConfig
from regard.models.generation.captured_step import CapturedSession, check_captured
from regard.models.generation.decode_session import (
    DecodeSession,
    PrefixCache,
    check_prefix,
    pad_left,
)
from regard.models.generation.sampling import Sampler, SamplingParams
from regard.models.generation.speculation import (
    DraftModel,
    Lookup,
    Proposer,
    Speculation,
    SpeculativeSession,
    check_proposals,
)
from regard.models.prompts import LanguageModel, Prompt, encode_prompt
from regard.units import plural


class StopStrings:
    """A filter that passes on streamed text up to the first stop string.

    What may begin a stop string is held back until that is decided. The stop string that is
    complete first ends the text; of several, the one that began first. How the text is cut into
    pieces does not matter.

    Args:
        stops: a string, or several, none of them empty.

    Attributes:
        matched: the stop string that ended the text, or None.

    Raises:
        ArgumentError, ArgumentTypeError: a stop string is empty, or not a string.

    >>> stops = StopStrings(["\\n\\n", "END"])
    >>> [stops.push(piece) for piece in ("one\\n", "two E", "N", "D three")]
    ['one', '\\ntwo ', '', '']
    >>> stops.matched
    'END'
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise ArgumentTypeError(
                    f"a stop string is {type(stop).__name__}; it must be a str", argument="stop"
                )
            if not stop:
                raise ArgumentError(
                    "a stop string is empty, and every text contains it; leave it out",
                    argument="stop",
                )
        self.stops = stops
        self.matched: str | None = None
        self._pending = ""

    def push(self, piece: str) -> str:
        """Add a piece of text, and return the text that cannot belong to a stop string.

        Args:
            piece: the text that follows.

        Returns:
            The text that is now certain; it is empty after a stop string.
        """
        if not self.stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._pending + piece
        matches = [
            (start + len(stop), start, stop)
            for stop in self.stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            _, start, self.matched = min(matches)
            self._pending = ""
            return text[:start]
        undecided = max(_partial_match(text, stop) for stop in self.stops)
        end = len(text) - undecided
        self._pending = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text that was held back, when no more text comes.

        Returns:
            The text, which turned out not to be a stop string.
        """
        pending, self._pending = self._pending, ""
        return pending


def _partial_match(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a generation.

    Args:
        max_tokens: the largest number of new tokens, 0 or more.
        stop: one or several strings that end the text; they are not part of it.
        chunk: the number of prompt tokens that one forward pass reads; None is one pass.
        sampling: how a token is chosen.
        cache_config: the kind of cache; None is the default, or that of a prefix.
        cuda_graph: whether the step that decodes a token is captured once as a CUDA graph
            (`CapturedSession`).
        special: whether names of special tokens in a prompt are these tokens; None is no, with a
            warning.
        speculate: "lookup" proposes tokens that followed the last ones before in the text, and the
            model reads several at once; None is one token after another.
        draft: a smaller model with the same tokens that proposes them instead.

    Raises:
        ArgumentError, ArgumentTypeError: an option has a wrong type or is out of its range.

    >>> GenerationOptions(max_tokens=3, stop=("end",)).chunk
    512
    """

    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    chunk: int | None = 512
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_config: CacheConfig | None = None
    cuda_graph: bool = False
    special: bool | None = None
    speculate: Literal["lookup"] | None = None
    draft: LanguageModel | None = None

    def __post_init__(self) -> None:
        if self.speculate not in (None, "lookup"):
            raise ArgumentError(
                argument="speculate", value=self.speculate, allowed='"lookup" or None'
            )
        if self.speculates and (self.cuda_graph or None not in (self.speculate, self.draft)):
            raise ArgumentError(
                "speculate, draft and cuda_graph are three ways to decode faster; give one of them",
                argument="speculate" if self.speculate else "draft",
            )
        if not isinstance(self.cuda_graph, bool):
            raise ArgumentTypeError(
                f"cuda_graph is {type(self.cuda_graph).__name__}; it must be True or False",
                argument="cuda_graph",
            )
        for name, n, least in (("max_tokens", self.max_tokens, 0), ("chunk", self.chunk, 1)):
            if n is None and name == "chunk":
                continue
            if isinstance(n, bool) or not isinstance(n, int):
                raise ArgumentTypeError(
                    f"{name} is {type(n).__name__}; it must be an int", argument=name
                )
            if n < least:
                raise ArgumentError(
                    f"{name} is {n}; it must be {least} or more", argument=name, value=n
                )
        StopStrings(self.stop)

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed, by lookup or by another model."""
        return self.speculate is not None or self.draft is not None

    def refuse_proposals(self, rows: str) -> None:
        """Raise if tokens are to be proposed for several rows.

        Args:
            rows: what the rows are, as the end of a sentence.
        """
        if self.speculates:
            name = "draft" if self.speculate is None else "speculate"
            raise ArgumentError(
                f"{name} proposes tokens for one text, and {rows}; leave {name} out, or generate "
                "one text at a time without beams",
                argument=name,
            )


class Continuation:
    """A prompt and the text that was generated for it so far.

    Args:
        model: the model that generates.
        prompt: the text to continue, or its ids.
        before: the ids of a prefix and of the prompt; the new text is decoded in their context.
        options: max_tokens and the stop strings.

    Attributes:
        prompt: the text of the prompt.
        ids: the new ids, with those of a stop string and without the id that ends a text.
        text: the new text, up to a stop string; empty if the model has no tokenizer.
        finished: "end" (an id of `eos_ids`), "stop" (a stop string), or "length" (max_tokens); None
            while generation continues.

    >>> import regard
    >>> batch = regard.load("tiny").generate(["Return the"], max_tokens=2)
    >>> batch.rows[0].finished, len(list(batch)), batch.rows[0].finished
    (None, 2, 'length')
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Prompt,
        before: Sequence[int],
        options: GenerationOptions,
    ) -> None:
        has_text = model.has_tokenizer or isinstance(prompt, str) or bool(options.stop)
        self._stream = model.tokenizer.stream(before) if has_text else None
        if isinstance(prompt, str):
            self.prompt = prompt
        else:
            self.prompt = model.tokenizer.decode(before) if has_text else ""
        self.ids: list[int] = []
        self.text = ""
        self.finished: Literal["end", "stop", "length"] | None = None
        self._stops = StopStrings(options.stop)
        self._eos_ids, self._max_tokens = model.eos_ids, options.max_tokens

    def append(self, token: int) -> str:
        """Append a token, and return the text that is now certain.

        Args:
            token: the id of the token.

        Returns:
            The new text, often one word and sometimes empty.
        """
        if token in self._eos_ids:
            return self._finish("end")
        self.ids.append(token)
        piece = "" if self._stream is None else self._stops.push(self._stream.push(token))
        if self._stops.matched is not None:
            self.finished = "stop"
        elif len(self.ids) >= self._max_tokens:
            return self._finish("length", piece)
        self.text += piece
        return piece

    def _finish(self, reason: Literal["end", "length"], piece: str = "") -> str:
        """Finish the text: add what was held back, half a character or a possible stop string."""
        if self._stream is not None:
            piece += self._stops.push(self._stream.flush())
        if self._stops.matched is None:
            piece += self._stops.flush()
        self.finished = reason if self._stops.matched is None else "stop"
        self.text += piece
        return piece


class _GenerationLoop:
    """The generation loop of `BatchGeneration` and `Generation`, with its measurements.

    Attributes:
        prefill_seconds: the part of it for reading the prompts.
        decode_seconds: the part of it after the first token of each row, which the pass over the
            prompt gives.
        prompt_tokens: the number of tokens of all prompts, without those of a prefix.
        speculation: the numbers of proposed and accepted tokens, if there is `speculate` or
            `draft`, and generation has begun; otherwise None.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        prefix: PrefixCache | None = None,
    ) -> None:
        if not prompts:
            raise ArgumentError("prompts is empty; give at least one prompt", argument="prompts")
        if prefix is not None:
            check_prefix(prefix, model, options.cache_config)
        self._prefix_ids = () if prefix is None else prefix.ids
        before = None if prefix is None else prefix.ids
        self._prompt_ids = [
            encode_prompt(model, prompt, before, special=options.special) for prompt in prompts
        ]
        if len(prompts) > 1:
            options.refuse_proposals(f"there are {plural(len(prompts), 'prompt')}")
        self._options, self._prefix = options, prefix
        self._cache_config = self._checked_config()
        rows = [[*self._prefix_ids, *ids] for ids in self._prompt_ids]
        self._sampler = Sampler(options.sampling, rows, model.config.vocab_size)
        self.rows = [
            Continuation(model, prompt, row, options)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        self.seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.prompt_tokens = sum(map(len, self._prompt_ids))
        self._decoded_tokens = 0
        self._max_bytes = 0
        # created here, so that a cache that does not suit the model raises before the start
        session = (
            DecodeSession(model.decoder, self._cache_config, len(prompts))
            if prefix is None
            else prefix.session
        )
        if options.cuda_graph:
            check_captured(session)
        self._session: DecodeSession | CapturedSession | SpeculativeSession | None = None
        if prefix is None:
            self._session = session
        self._proposer: Proposer | None = None
        if options.speculates:
            check_proposals(session, "draft" if options.draft else "speculate")
            self._proposer = (
                Lookup()
                if options.draft is None
                else DraftModel(model, options.draft, self._sampler)
            )
        self.speculation: Speculation | None = None
        self._pieces = self._run()

    def __iter__(self) -> Self:
        return self

    @property
    def cache_bytes(self) -> int:
        """The largest number of bytes in the caches of all layers so far."""
        current = 0 if self._session is None else self._session.bytes
        return max(self._max_bytes, current)

    @property
    def cache(self) -> str:
        """The kind of cache of the layers that keep every token."""
        return self._cache_config.cache

    @property
    def tokens_per_second(self) -> float:
        """The new tokens of all rows per second of model time, prompts included."""
        tokens = sum(len(row.ids) for row in self.rows)
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """The number of prompt tokens read per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """The tokens per second after the first of each row; 0 if there was only one."""
        return self._decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def _checked_config(self) -> CacheConfig:
        cache_config = self._options.cache_config or CacheConfig()
        if self._prefix is not None:
            cache_config = self._prefix.cache_config
        longest = len(self._prefix_ids) + max(len(ids) for ids in self._prompt_ids)
        return cache_config.with_capacity(longest, self._options.max_tokens)

    def _run(self) -> Iterator[tuple[int, str]]:
        if not self._options.max_tokens:
            for row in self.rows:
                row.finished = "length"
            return
        start = time.perf_counter()
        logits = self._prefill()
        if self._options.cuda_graph and self._options.max_tokens > 1:
            self._capture_steps()
        if self._proposer is not None:
            assert isinstance(self._session, DecodeSession), "prompts are read first"
            ids = [*self._prefix_ids, *self._prompt_ids[0]]
            most = len(ids) + self._options.max_tokens - 1
            self._session = SpeculativeSession(self._session, ids, most, self._proposer)
            self.speculation = self._session.speculation
        self.prefill_seconds = time.perf_counter() - start
        active, is_decoding = list(range(len(self.rows))), False
        while True:
            tokens = self._sampler(logits)
            elapsed = time.perf_counter() - start
            self.seconds += elapsed
            if is_decoding:
                self.decode_seconds += elapsed
                self._decoded_tokens += len(active)
            for i, token in zip(active, tokens, strict=True):
                piece = self.rows[i].append(token)
                if piece:
                    yield i, piece
            unfinished = [j for j, i in enumerate(active) if self.rows[i].finished is None]
            if not unfinished:
                return
            start = time.perf_counter()
            if len(unfinished) < len(active):
                self._keep_rows(unfinished)
            active, is_decoding = [active[j] for j in unfinished], True
            logits = self._step([tokens[j] for j in unfinished])

    def _prefill(self) -> Tensor:
        """Read the prompts, and return the logits [B, V] for their next tokens."""
        prefix, rows, session = self._prefix, len(self.rows), self._session
        if prefix is not None:
            self._session = session = prefix.fork(rows)
        assert isinstance(session, DecodeSession), "the constructor created it, or it was forked"
        session.prepare()
        if prefix is not None and not any(self._prompt_ids):
            return prefix.logits.expand(rows, -1)
        ids, positions = pad_left(self._prompt_ids, start=len(self._prefix_ids))
        device = session.device
        positions = positions.to(device) if isinstance(positions, Tensor) else positions
        logits = session.append(ids.to(device), positions, chunk=self._options.chunk)
        if prefix is None or all(self._prompt_ids):
            return logits
        empty = torch.tensor([[not new] for new in self._prompt_ids], device=device)
        return torch.where(empty, prefix.logits, logits)

    def _capture_steps(self) -> None:
        """Let a captured step decode all tokens after the first one."""
        assert isinstance(self._session, DecodeSession), "prompts are read first"
        self._max_bytes = self.cache_bytes
        self._session = CapturedSession(self._session, self._options.max_tokens - 1)

    def _step(self, tokens: list[int]) -> Tensor:
        assert self._session is not None, "prompts are read first"
        ids = torch.tensor(tokens, device="cpu")[:, None]
        return self._session.append(ids.to(self._session.device, non_blocking=True))

    def _keep_rows(self, indices: list[int]) -> None:
        """Keep only the rows with these indices, in the session and in the sampler."""
        assert self._session is not None, "prompts are read first"
        self._max_bytes = self.cache_bytes
        assert not isinstance(self._session, SpeculativeSession), "it has one row"
        self._session.select(torch.tensor(indices, device="cpu"))
        self._sampler.select(indices)


class BatchGeneration(_GenerationLoop):
    """Continuations of several prompts, generated while the object is iterated over, once.

    It yields pairs (index of the prompt, piece of text). A finished row leaves the batch. Row i
    gets what its prompt alone gets with seed + i, up to the rounding of a batch.

    Args:
        model: the model.
        prompts: texts, ids or messages of each; only with `prefix` may one be empty.
        options: the options of the generation.
        prefix: a prompt that was read before and that all prompts continue, or None.

    Attributes:
        rows: a `Continuation` for each prompt.
        seconds, prefill_seconds, decode_seconds: the time in the model so far, its part for reading
            the prompts, and its part for all tokens of a row after its first.
        prompt_tokens: the number of tokens of all prompts, without those of a prefix.

    Raises:
        ArgumentError: there is no prompt or an empty one, an option does not suit the model, or the
            tokens do not fit into max_context.

    >>> import regard
    >>> batch = regard.load("tiny").generate(["Return the", "If"], max_tokens=3)
    >>> [row for row, piece in batch]
    [0, 1, 0, 1, 0, 1]
    """

    def __next__(self) -> tuple[int, str]:
        return next(self._pieces)


class Generation(_GenerationLoop):
    """The continuation of one prompt, generated while the object is iterated over, once.

    It yields pieces of text, and has the same measurements as a `BatchGeneration`.

    Args:
        model, options, prefix: as in `BatchGeneration`.
        prompt: the text to continue, its ids, or messages; only with `prefix` may it be empty.

    Attributes:
        read: the ids that the model has read so far, those of a prefix included.

    Raises:
        ArgumentError: as in `BatchGeneration`.

    >>> import regard
    >>> generation = regard.load("tiny").generate("Return the", max_tokens=3)
    >>> text = "".join(generation)
    >>> text == generation.text, len(generation.ids), generation.finished
    (True, 3, 'length')
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Prompt,
        options: GenerationOptions,
        prefix: PrefixCache | None = None,
    ) -> None:
        super().__init__(model, [prompt], options, prefix)
        self.read = list(self._prefix_ids)

    def __next__(self) -> str:
        return next(self._pieces)[1]

    def _prefill(self) -> Tensor:
        logits = super()._prefill()
        self.read += self._prompt_ids[0]
        return logits

    def _step(self, tokens: list[int]) -> Tensor:
        logits = super()._step(tokens)
        self.read += tokens
        return logits

    @property
    def ids(self) -> list[int]:
        """The new ids so far, with those of a stop string."""
        return self.rows[0].ids

    @property
    def text(self) -> str:
        """The new text so far."""
        return self.rows[0].text

    @property
    def finished(self) -> Literal["end", "stop", "length"] | None:
        """Why generation ended: "end" (an id of `eos_ids`), "stop" (a stop string), "length"
        (max_tokens); None while it continues.
        """
        return self.rows[0].finished
