"""An encoder as users hold it: texts in, states of their tokens or one vector for each text out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.decoder import check_ids
from regard.models.encoder import HeadedEncoder
from regard.models.pooling import Mode, Pooling, pool
from regard.models.tokenized import Tokenized, beside, several
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Tokens(NamedTuple):
    """Texts beside one another.

    Attributes:
        ids: [B,S].
        positions: [B,S], -1 behind the end of a shorter text.
        segments: [B,S], 0 for a text, 1 for the second one of a pair.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor


class TextEncoder(Tokenized):
    """An encoder with its tokenizer and its config; `regard.load` makes it.

    Args:
        network: ids -> states.
        tokenizer: None: `encode` and `embed` are refused.
        config: the frozen config of its family, with vocab_size.
        pooling: how `embed` makes one vector of a text; None is the mean over its tokens, normalised.
        longest: the most tokens of a text.
        fresh: stored names that were missing, and allowed to be.
        ignored: what the folder holds and nobody looked at.

    Attributes:
        network, config, pooling, longest, fresh, ignored: as given.

    >>> import regard
    >>> from regard.models.families import bert
    >>> config = bert.Config(1024, 8, 1, 2, 16, 32)
    >>> model = TextEncoder(bert.build(config).eval(), regard.load("tiny").tokenizer, config, longest=32)
    >>> tokens = model.encode(["to be", "or not to be"])
    >>> states = model.hidden(*tokens)
    >>> model.pool(states, tokens.positions, mode="max").shape
    torch.Size([2, 8])
    >>> model.embed(["to be", "or not to be"]).norm(dim=1)
    tensor([1., 1.])
    """

    def __init__(
        self,
        network: HeadedEncoder,
        tokenizer: Tokenizer | None,
        config: Any,
        *,
        pooling: Pooling | None = None,
        longest: int | None = None,
        fresh: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, fresh, ignored)
        self.network = network
        self.pooling = Pooling() if pooling is None else pooling
        self.longest = longest

    def encode(
        self,
        texts: str | Sequence[str],
        seconds: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
    ) -> Tokens:
        """The ids of texts with what the tokenizer puts around them, [CLS] and [SEP] in BERT; shorter ones are padded behind.

        Args:
            texts: one, or several.
            seconds: the second text of each pair, if the model is to read pairs.
            truncate: whether the end of a text that is too long is left out, and not refused; not for pairs.

        Raises:
            ArgumentError: there is no text, seconds are not as many, or a text is longer than the model reads.
            ArgumentTypeError: a text is no str.
        """
        firsts = several(texts)
        others: Sequence[str | None] = [None] * len(firsts)
        if seconds is not None:
            others = several(seconds, "seconds")
            if len(others) != len(firsts):
                raise ArgumentError(
                    f"{len(firsts)} texts and {len(others)} seconds; give one second for each text"
                )
        rows = []
        for i, pair in enumerate(zip(firsts, others, strict=True)):
            row = self.tokenizer.encode_pair(*pair)
            over = 0 if self.longest is None else len(row[0]) - self.longest
            if over > 0 and truncate and pair[1] is None:
                row = self._shorter(pair[0], row, over)
            elif over > 0:
                way = "split it, or leave out its end with truncate=True"
                raise ArgumentError(
                    f"text {i} has {len(row[0])} tokens, and this model reads {self.longest}; "
                    f"{way if pair[1] is None else 'shorten it'}"
                )
            rows.append(row)
        ids, positions = beside([row[0] for row in rows], self.device)
        return Tokens(ids, positions, beside([row[1] for row in rows], self.device)[0])

    def _shorter(
        self, text: str, row: tuple[list[int], list[int]], over: int
    ) -> tuple[list[int], list[int]]:
        """A row without the last tokens of its text; what stands behind the text stays."""
        ids, segments = row
        own = self.tokenizer.encode(text)
        if over > len(own):
            raise ArgumentError(f"longest is {self.longest}, less than what stands around a text")
        end = next(e for e in range(len(ids), 0, -1) if ids[:e][-len(own) :] == own)
        return ids[: end - over] + ids[end:], segments[: end - over] + segments[end:]

    def hidden(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """The states of the last block, [B,S,M]: `model.hidden(*model.encode(texts))`.

        Args:
            ids, positions, segments: as `encode` gives them; a slot at position -1 is padding, and its state means nothing.
            backend: the attention kernel, or "auto".

        Raises:
            ArgumentError: an id lies outside of the vocabulary, or a position has no vector.
        """
        real = ids if not isinstance(positions, Tensor) else ids.masked_fill(positions < 0, 0)
        check_ids(real, self.config.vocab_size)
        return self.network(ids, positions, segments, backend=backend)

    def pool(
        self,
        states: Float[Tensor, "B S M"],
        positions: Positions | None = None,
        *,
        mode: Mode | None = None,
        normalise: bool | None = None,
    ) -> Float[Tensor, "B M"]:
        """One vector for each text, over its tokens only.

        Args:
            states: from `hidden`.
            positions: from `encode`.
            mode: "mean", "cls", "max" or "mean_sqrt_len"; None is the model's own.
            normalise: whether to divide it by its length; None is the model's own.

        Raises:
            ArgumentError: the mode is unknown.
        """
        own = self.pooling
        chosen = Pooling(
            own.mode if mode is None else mode, own.normalise if normalise is None else normalise
        )
        return pool(states, positions, chosen)

    @torch.no_grad()
    def embed(
        self, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
    ) -> Float[Tensor, "N M"]:
        """A vector for each text, pooled as the model was trained to be; texts of like length are read together.

        Args:
            texts: one, or several.
            batch: how many are read at once; it changes nothing but the time and the memory.
            truncate: as in `encode`.

        Raises:
            ArgumentError, ArgumentTypeError: as `encode`; batch is less than 1.
        """
        if batch < 1:
            raise ArgumentError(f"batch is {batch}; it must be at least 1")
        tokens = self.encode(texts, truncate=truncate)
        sizes = (tokens.positions >= 0).sum(1)
        order = sizes.argsort(stable=True)
        parts = []
        for rows in order.split(batch):
            some = Tokens(*(x[rows, : int(sizes[rows].max())] for x in tokens))
            parts.append(self.pool(self.hidden(*some), some.positions))
        return torch.cat(parts)[order.argsort()]
