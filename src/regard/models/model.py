"""A model as users hold it: a decoder, its tokenizer and its config."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cache
from regard.errors import ArgumentError, FileError
from regard.models.decoder import Decoder, check_ids
from regard.models.generate import Generation
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Model:
    """A decoder with its tokenizer and its config; `regard.load` makes it.

    Attributes:
        decoder: ids [B,T] -> logits [B,T,V].
        config: the frozen config of its family.
        ends: the ids that end a text.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        config: Any,
        *,
        ends: Collection[int] | None = None,
    ) -> None:
        self.decoder, self.config, self._tokenizer = decoder, config, tokenizer
        if ends is None:
            end = None if tokenizer is None else tokenizer.end_of_text
            ends = () if end is None else (end,)
        self.ends = frozenset(ends)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids.

        Raises:
            FileError: the folder had no tokenizer.json.
        """
        if self._tokenizer is None:
            raise FileError(
                "this model has no tokenizer: its folder holds no tokenizer.json; give ids to forward, or add the file "
                "(a tokenizer.model or vocab.txt alone is converted by transformers: save_pretrained of a fast tokenizer)"
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
            ArgumentError: an id lies outside the vocabulary, or the caches are not one per layer.

        >>> import regard, torch
        >>> regard.load("tiny").forward(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 1024])
        """
        check_ids(ids, self.config.vocab_size)
        return self.decoder(ids, positions, caches, backend=backend)

    __call__ = forward

    def new_caches(self) -> list[Cache]:
        """An empty cache for each layer, of the kind that suits it."""
        return self.decoder.new_caches()

    def encode(self, text: str) -> Int[Tensor, "1 T"]:
        """The ids of a text, [1,T], with what the tokenizer puts around it; a text that gives none is refused."""
        ids = self.tokenizer.encode(text, template=True)
        if not ids:
            raise ArgumentError(f"the text {text!r} has no tokens; give at least one character")
        return torch.tensor([ids])

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Generation:
        """Continue a prompt: an iterator of pieces of text, each as soon as it is known.

        Args:
            prompt: not empty.
            max_tokens: stop after as many; it stops earlier at the end-of-text token.
            temperature: 0 takes the most likely token; else logits are divided by it and sampled.
            top_k: sample from the k most likely tokens only.
            seed: of a generator of its own; the global one is not touched.

        Raises:
            ArgumentError: the prompt is empty, or a number is out of range.

        >>> import regard
        >>> len("".join(regard.load("tiny").generate("Return the", max_tokens=3))) > 0
        True
        """
        return Generation(self, prompt, max_tokens, temperature, top_k, seed)
