"""A model as users hold it: a decoder, its tokenizer and its config."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_keyword_names
from regard.caches import Cache
from regard.errors import ArgumentError, FileError
from regard.models.decoder import Decoder, check_ids
from regard.models.generation.beam import Found, search
from regard.models.generation.context import Reading
from regard.models.generation.generate import Batch, Generation, Options
from regard.models.generation.room import Room
from regard.models.generation.sampling import Choices, Sampling
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Model:
    """A decoder with its tokenizer and its config; `regard.load` makes it.

    Attributes:
        decoder: ids [B,T] -> logits [B,T,V].
        config: the frozen config of its family.
        ends: the ids that end a text.
        fresh: names of weights that the folder lacked and was allowed to lack: they are not
            trained.
        ignored: what the folder holds and nobody looked at: keys of config.json, tensors, files;
            see `regard.load`.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: Any,
        *,
        ends: Collection[int] | None = None,
        fresh: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        self.decoder, self.config, self._tokenizer = decoder, config, tokenizer
        if ends is None:
            end = None if tokenizer is None else tokenizer.end_of_text
            ends = () if end is None else (end,)
        self.ends, self.fresh, self.ignored = frozenset(ends), tuple(fresh), tuple(ignored)

    @property
    def has_head(self) -> bool:
        """Whether there are logits: a base model that was saved alone, without a tied head, gives
        states only.
        """
        return self.decoder.head is not None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder had a tokenizer.json."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids.

        Raises:
            FileError: the folder had no tokenizer.json.
        """
        if self._tokenizer is None:
            raise FileError(
                "this model has no tokenizer: its folder holds no tokenizer.json; give ids to "
                "forward, or add the file "
                "(a tokenizer.model or vocab.txt alone is converted by transformers: "
                "save_pretrained of a fast tokenizer)"
            )
        return self._tokenizer

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Logits [B,T,V] for the token after each of ids [B,T].

        Args:
            ids: token ids; with caches, the ones that follow what the caches hold.
            positions: default: 0..T-1, or on from the caches.
            caches: one per layer, from `new_caches`.
            backend: the attention kernel, or "auto".

        Raises:
            ArgumentError: an id lies outside the vocabulary, the caches are not one per layer, or
                the model has no head.

        >>> import regard, torch
        >>> regard.load("tiny").forward(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 1024])
        """
        check_ids(ids, self.config.vocab_size)
        logits: Tensor = self.decoder(ids, positions, caches, backend=backend)
        return logits

    __call__ = forward

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M"]:
        """States [B,T,M] of ids [B,T] behind the last norm, from which the head makes logits.

        Args:
            ids, positions, caches, backend: as in `forward`.

        Raises:
            ArgumentError: an id lies outside the vocabulary, or the caches are not one per layer.

        >>> import regard, torch
        >>> regard.load("tiny").hidden(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 256])
        """
        check_ids(ids, self.config.vocab_size)
        return self.decoder.hidden(ids, positions, caches, backend=backend)

    def new_caches(self) -> list[Cache]:
        """An empty cache for each layer, of the kind that suits it."""
        return self.decoder.new_caches()

    def encode(self, text: str) -> Int[Tensor, "1 T"]:
        """The ids of a text, [1,T], with what the tokenizer puts around it; a text that gives none
        is refused.
        """
        ids = self.tokenizer.encode(text, template=True)
        if not ids:
            raise ArgumentError(f"the text {text!r} has no tokens; give at least one character")
        return torch.tensor([ids])

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        after: Reading | None = ...,
        chunk: int | None = ...,
        max_context: int | None = ...,
        cache: str | None = ...,
        **choices: Unpack[Choices],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        after: Reading | None = ...,
        chunk: int | None = ...,
        max_context: int | None = ...,
        cache: str | None = ...,
        **choices: Unpack[Choices],
    ) -> Batch: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        max_tokens: int = 64,
        stop: str | Sequence[str] = (),
        after: Reading | None = None,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
        **choices: Unpack[Choices],
    ) -> Generation | Batch:
        """Continue a prompt, or several at once: an iterator of pieces of text, each as soon as it
        is known.

        The likeliest token is taken unless `temperature` is above 0. What is written does not
        depend on `chunk`, nor on a cache that keeps everything exactly: it is what passes without a
        cache would give.

        Args:
            prompt: a text, or several, which are continued as one batch: see `Batch`. Not empty,
                unless with `after`.
            max_tokens: stop after as many; it stops earlier at a token that ends a text (`ends`),
                or a stop string.
            stop: strings that end the text, which they are left out of.
            after: what `read` has read, which the prompt goes on from; its caches are forked.
            chunk: the prompt is read in pieces of so many tokens.
            max_context: the most tokens of prompt and continuation; what is behind it depends on
                the cache.
            cache: "growing" (the default), "fixed", "paged", "quantised", "ring" or "streaming":
                see `generation.Room`.
            **choices: temperature, top_k, top_p, min_p, repetition_penalty and seed, as in
                `Sampling`. The seed is of generators of its own; the global one is not touched.

        Raises:
            ArgumentError, ArgumentTypeError: a prompt is empty, an option is out of range, or there
                is no room.

        >>> import regard
        >>> model = regard.load("tiny")
        >>> "".join(model.generate("Return the", max_tokens=9, stop=" of")).count(" of")
        0
        >>> prompts, choices = ["Return the", "If a"], {"temperature": 0.8, "top_p": 0.9, "seed": 1}
        >>> batch = model.generate(prompts, max_tokens=9, **choices)
        >>> sorted({row for row, piece in batch}), [row.finished for row in batch.rows]
        ([0, 1], ['length', 'length'])
        """
        check_keyword_names("generate", choices, Choices.__annotations__)
        options = Options(max_tokens, stop, chunk, Sampling(**choices), _room(cache, max_context))
        if isinstance(prompt, str):
            return Generation(self, prompt, options, after)
        return Batch(self, prompt, options, after)

    def read(
        self,
        prompt: str,
        *,
        after: Reading | None = None,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
    ) -> Reading:
        """Read a prompt once, for many continuations: `generate(text, after=reading)`.

        Args:
            prompt: not empty.
            after, chunk, max_context, cache: as in `generate`.

        Raises:
            ArgumentError: the prompt is empty, or there is no room for it.

        >>> import regard
        >>> model = regard.load("tiny")
        >>> read = model.read("Return the")
        >>> draw = {"after": read, "max_tokens": 3, "temperature": 1.0}
        >>> ["".join(model.generate("", seed=seed, **draw)) != "" for seed in (1, 2)]
        [True, True]
        """
        return Reading(self, prompt, after=after, chunk=chunk, room=_room(cache, max_context))

    def beam(
        self,
        prompt: str,
        *,
        beams: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        chunk: int | None = 512,
        max_context: int | None = None,
        cache: str | None = None,
    ) -> list[Found]:
        """The continuations that are likeliest as a whole, best first, by beam search: see
        `beam_search`.

        Args:
            prompt: not empty.
            beams: how many beginnings are kept at every step, and how many texts are found.
            max_tokens: the most new tokens, at least 1.
            length_penalty: score = sum of log p / n^length_penalty; 0 ranks by probability, more
                favours long texts.
            chunk, max_context, cache: as in `generate`.

        Raises:
            ArgumentError: the prompt is empty, an option is out of range, or there is no room.

        >>> import regard
        >>> best, second = regard.load("tiny").beam("Return the", beams=2, max_tokens=4)
        >>> len(best.ids), best.score > second.score
        (4, True)
        """
        options = Options(max_tokens, chunk=chunk, room=_room(cache, max_context))
        return search(self, prompt, options, beams=beams, length_penalty=length_penalty).found


def _room(cache: str | None, max_context: int | None) -> Room | None:
    """The room that was asked for, or None."""
    if cache is None and max_context is None:
        return None
    return Room(cache or "growing", max_context)
