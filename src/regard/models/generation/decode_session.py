"""`DecodeSession`, a decoder with the caches of a batch, and `PrefixCache`, a prompt that is read
once and continued several times.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cache
from regard.errors import ArgumentError
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.models.generation.cache_config import CacheConfig, has_dynamic_rotary
from regard.models.prompts import LanguageModel, Prompt, encode_prompt
from regard.nn import PrefixRecomputer
from regard.nn.weights import device_of
from regard.sequence_scope import SequenceScope, current_scope
from regard.span import Positions, slice_positions, slot_count


class DecodeSession:
    """A decoder with the caches of a batch; each token is computed once.

    Where rotary frequencies depend on the length, it runs in a `regard.nn.PrefixRecomputer`, which
    computes the prefix again when they change, so that decoding equals one pass.

    Args:
        decoder: the network.
        cache_config: the kind of cache and its size; None is the default of `CacheConfig`.
        rows: the largest number of rows of the batch.

    Raises:
        ArgumentError: the decoder has no head; or as in `CacheConfig.restrict`.

    >>> import regard, torch
    >>> session = DecodeSession(regard.load("tiny").decoder)
    >>> session.append(torch.tensor([[1, 2, 3, 4]]), chunk=3).shape
    torch.Size([1, 1920])
    >>> session.append(torch.tensor([[5]])).shape
    torch.Size([1, 1920])
    """

    def __init__(
        self, decoder: Decoder, cache_config: CacheConfig | None = None, rows: int = 1
    ) -> None:
        decoder.require_head()
        self._cache_config = CacheConfig() if cache_config is None else cache_config
        self._decoder = self._cache_config.restrict(decoder)
        self._network: Decoder | PreparedDecoder = self._decoder
        self._prefix = PrefixRecomputer(self._decoder) if has_dynamic_rotary(decoder) else None
        self._caches = self._cache_config.new_caches(self._decoder, rows)
        self._rank_progress: object = None  # inside regard.parallel.generation
        self.device = device_of(decoder)

    @property
    def decoder(self) -> Decoder:
        """The network that runs, with the masks that the cache needs."""
        return self._decoder

    @property
    def caches(self) -> list[Cache]:
        """The caches, one per layer."""
        return self._caches if self._prefix is None else self._prefix.caches

    @property
    def bytes(self) -> int:
        """The number of bytes in the caches of all layers."""
        return sum(cache.bytes for cache in self.caches)

    @property
    def follows_length(self) -> bool:
        """Whether rotary frequencies depend on the length, so that no token can be taken back."""
        return self._prefix is not None

    def prepare(self) -> None:
        """Read the modules of the decoder once, for single tokens in one compiled call where it is
        possible: until the next call of this method no part of the decoder may be replaced.
        """
        self._network = PreparedDecoder(self._decoder)

    @torch.inference_mode()
    def append(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        *,
        chunk: int | None = None,
    ) -> Float[Tensor, "B V"]:
        """Read tokens that continue the ones read before, and return the logits after the last one.

        Args:
            ids: token ids [B, T], T at least 1.
            positions: positions [B, T], -1 for padding; None continues each row.
            chunk: the number of tokens per forward pass, without influence on the result; None is
                one.

        Returns:
            Logits [B, V] for the token after the last slot of each row.
        """
        if (scope := current_scope()) is not None:
            return self._append_over_ranks(scope, ids, positions)
        if self._rank_progress is not None:
            raise ArgumentError(
                "this generation began inside regard.parallel.generation and must end there: read "
                "all its text inside the with block"
            )
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
            logits = self._network(ids[:, a : a + step], where, self._caches, last=1)
        assert logits is not None, "ids has at least one column"
        return logits[:, -1]

    @torch.inference_mode()
    def read(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Read tokens as `append` in one pass, and return the logits after each of them.

        Args:
            ids: token ids [B, T].

        Returns:
            Logits [B, T, V].
        """
        logits: Tensor = self._network(ids, None, self._caches)
        return logits

    def _append_over_ranks(
        self, scope: SequenceScope, ids: Tensor, positions: Positions | None
    ) -> Tensor:
        """Read tokens over the ranks of an open `regard.parallel.generation`."""
        if self._prefix is not None or self._cache_config != CacheConfig():
            raise ArgumentError(
                'over several ranks, generation needs cache="growing" without max_context, and '
                "rotary frequencies that do not depend on the length",
                argument="cache",
            )
        logits, self._rank_progress = scope.append_tokens(
            self._decoder, self._caches, ids, positions, self._rank_progress
        )
        result: Tensor = logits
        return result

    @torch.inference_mode()
    def fork(self, rows: int = 1) -> DecodeSession:
        """Copy this session, which has one row, to a session with several rows.

        Args:
            rows: how many rows the copy has.

        Returns:
            The copy; this session stays as it is.
        """
        other = copy.copy(self)
        if self._prefix is None:
            other._caches = [self._cache_config.fork_cache(cache, rows) for cache in self._caches]
        else:
            other._prefix = self._prefix.fork()
            if rows > 1:
                other._prefix.select(torch.zeros(rows, dtype=torch.int64, device="cpu"))
        return other

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later.

        Args:
            length: the number of positions to keep.

        Raises:
            ArgumentError: a cache cannot do so; the session is then of no more use.
        """
        if self._prefix is not None:
            raise ArgumentError(
                "a session whose frequencies depend on the length cannot be cut off"
            )
        for cache in self._caches:
            cache.crop(length)

    @torch.inference_mode()
    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in this order; a row may appear several times, or not at all.

        Args:
            rows: indices of rows.
        """
        batch = self.caches[0].batch if self.caches else None
        if len(rows) == batch and torch.equal(rows.cpu(), torch.arange(batch, device="cpu")):
            return None  # beams that keep their order cost nothing
        if self._prefix is not None:
            return self._prefix.select(rows)
        for cache in self._caches:
            cache.select(rows)
        return None


def pad_left(
    rows: Sequence[Sequence[int]], start: int = 0
) -> tuple[Int[Tensor, "B T"], Positions | None]:
    """Stack rows of ids into one tensor, padded on the left."""
    T = max(len(row) for row in rows)
    ids = torch.tensor(
        [[0] * (T - len(row)) + list(row) for row in rows], dtype=torch.int64, device="cpu"
    )
    if all(len(row) == T for row in rows):
        return ids, None
    gaps = torch.tensor([[T - len(row)] for row in rows], device="cpu")
    slots = torch.arange(T, device="cpu")[None] - gaps
    positions = torch.where(slots >= 0, slots + start, -1)
    assert slot_count(positions) == T
    return ids, positions


class PrefixCache:
    """A prompt that a model has read, whose caches several continuations share (prefix caching).

    `model.cache_prefix` creates it. Prefix and continuation are tokenized separately, so that a
    word across the border may have other tokens than in the joined text.

    Args:
        model: the model that reads.
        prompt: the text to read, its ids, or messages; not empty.
        prefix: a prompt that was read before, which this one continues; it stays as it is.
        chunk: the number of tokens per forward pass; None is one pass.
        cache_config: the kind of cache; None is that of `prefix`, or the default.
        special: as in `regard.models.Model.generate`.

    Attributes:
        model, cache_config: the arguments.
        ids: all ids read.
        logits: logits [V] for the next token.
        seconds: the model's time for reading the prompt.

    Raises:
        ArgumentError: the prompt is empty, or it does not fit into max_context.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> prefix = model.cache_prefix("Return the")
    >>> texts = " list", ""
    >>> one, two = ("".join(model.generate(text, prefix=prefix, max_tokens=2)) for text in texts)
    >>> two == "".join(model.generate("Return the", max_tokens=2))
    True
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Prompt,
        *,
        prefix: PrefixCache | None = None,
        chunk: int | None = None,
        cache_config: CacheConfig | None = None,
        special: bool | None = None,
    ) -> None:
        self.model, self.cache_config = model, cache_config or CacheConfig()
        if prefix is not None:
            check_prefix(prefix, model, cache_config)
            self.cache_config = prefix.cache_config
        elif self.cache_config.kind.needs_slots and self.cache_config.max_context is None:
            raise ArgumentError(
                f"cache={self.cache_config.cache!r} needs max_context here: the number of tokens "
                "of the prompt and a continuation together",
                argument="max_context",
            )
        new = encode_prompt(model, prompt, None if prefix is None else prefix.ids, special=special)
        self.ids: tuple[int, ...] = (*(prefix.ids if prefix is not None else ()), *new)
        self.cache_config.check(len(self.ids), 0)
        if not new:
            raise ArgumentError(f"the prompt {prompt!r} has no tokens; give at least one")
        start = time.perf_counter()
        self._session = (
            DecodeSession(model.decoder, self.cache_config) if prefix is None else prefix.fork()
        )
        ids, _ = pad_left([new])
        self.logits: Float[Tensor, " V"] = self._session.append(
            ids.to(self._session.device), chunk=chunk
        )[0]
        self.seconds = time.perf_counter() - start

    @property
    def cache_bytes(self) -> int:
        """The number of bytes in the caches of all layers."""
        return self._session.bytes

    @property
    def session(self) -> DecodeSession:
        """The session that has read the prefix, which must stay as it is: `fork` copies it."""
        return self._session

    def fork(self, rows: int = 1) -> DecodeSession:
        """Create a session that has read this prefix in every row.

        Args:
            rows: the number of rows.

        Returns:
            The session; this prefix stays as it is.
        """
        return self._session.fork(rows)


def check_prefix(
    prefix: PrefixCache, model: LanguageModel, cache_config: CacheConfig | None
) -> None:
    """Check that a prefix was read by this model, and that no other cache is asked for."""
    if prefix.model is not model:
        raise ArgumentError(
            "prefix was read by another model; create it with this one: model.cache_prefix(...)"
        )
    if cache_config is not None:
        raise ArgumentError(
            f"prefix has its own caches, {prefix.cache_config}; give max_context and cache to "
            "cache_prefix(...) instead"
        )
