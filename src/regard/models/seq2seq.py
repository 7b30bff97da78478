"""An encoder-decoder as users hold it: a text in, a text out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cross
from regard.errors import ArgumentError
from regard.models.decoder import check_ids
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.generation.beam import Hypothesis, beam_search
from regard.models.tokenized import Tokenized, beside, several
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Seq2Seq(Tokenized):
    """An encoder-decoder with its tokenizer and its config; `regard.load` makes it.

    Args:
        network: source ids, target ids -> logits.
        tokenizer: None: `encode` and `generate` are refused; `search` takes ids.
        config: the frozen config of its family, with vocab_size.
        start: the id that every target begins with.
        ends: the ids that end a text.
        fresh: stored names that were missing, and allowed to be.
        ignored: what the folder holds and nobody looked at.

    Attributes:
        network, config, start, ends, fresh, ignored: as given.

    >>> from regard.models.families import t5
    >>> import regard
    >>> config = t5.Config(1024, 8, 4, 16, 1, 2)
    >>> network, tokenizer = t5.build(config).eval(), regard.load("tiny").tokenizer
    >>> model = Seq2Seq(network, tokenizer, config, start=0, ends=[1])
    >>> len(model.generate(["to be", "or not"], max_tokens=3, beams=2))
    2
    >>> ids, positions = model.encode("to be")
    >>> len(model.search(ids, positions, max_tokens=3)[0][0].ids) <= 3
    True
    """

    def __init__(
        self,
        network: EncoderDecoder,
        tokenizer: Tokenizer | None,
        config: Any,
        *,
        start: int,
        ends: Collection[int],
        fresh: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, fresh, ignored)
        self.network, self.start, self.ends = network, start, frozenset(ends)

    def encode(self, texts: str | Sequence[str]) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
        """The ids [B,S] of texts, with what the tokenizer puts around them, and their positions, -1
        behind a shorter one.

        Raises:
            ArgumentError: there is no text, or one has no tokens.
            ArgumentTypeError: a text is no str.
        """
        rows = [self.tokenizer.encode_pair(text)[0] for text in several(texts)]
        for i, row in enumerate(rows):
            if not row:
                raise ArgumentError(f"text {i} has no tokens; give at least one character")
        return beside(rows, self.device)

    def forward(
        self,
        source_ids: Int[Tensor, "B S"],
        target_ids: Int[Tensor, "B T"],
        source_positions: Positions | None = None,
        target_positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Logits [B,T,V] for the token after each of target_ids [B,T], the first of which is
        `start`; -1 marks padding.

        Raises:
            ArgumentError: an id lies outside of the vocabulary.
        """
        for ids, positions in ((source_ids, source_positions), (target_ids, target_positions)):
            self._check(ids, positions)
        logits: Tensor = self.network(
            source_ids, target_ids, source_positions, target_positions, backend=backend
        )
        return logits

    __call__ = forward

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, and means one text
        self, texts: str, *, max_tokens: int = ..., beams: int = ..., length_penalty: float = ...
    ) -> str: ...

    @overload
    def generate(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int = ...,
        beams: int = ...,
        length_penalty: float = ...,
    ) -> list[str]: ...

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        max_tokens: int = 64,
        beams: int = 1,
        length_penalty: float = 1.0,
    ) -> str | list[str]:
        """What the model answers to a text, or to several at once; the same for each as alone.

        Args:
            texts: one, or several.
            max_tokens: stop after as many; it stops earlier at a token that ends a text.
            beams: 1 takes the likeliest token at each step; more search for the likeliest text.
            length_penalty: of the search: 0 ranks by probability, more favours long texts.

        Raises:
            ArgumentError, ArgumentTypeError: as `encode`; a number is out of range.
        """
        found = self.search(
            *self.encode(texts), max_tokens=max_tokens, beams=beams, length_penalty=length_penalty
        )
        said = [self.tokenizer.decode(row[0].ids, skip_special=True) for row in found]
        return said[0] if isinstance(texts, str) else said

    @torch.no_grad()
    def search(
        self,
        ids: Int[Tensor, "B S"],
        positions: Positions | None = None,
        *,
        max_tokens: int = 64,
        beams: int = 1,
        length_penalty: float = 1.0,
    ) -> list[list[Hypothesis]]:
        """The best answers to each source, best first: `beam_search` over cached steps, which with
        one beam is greedy.

        Args:
            ids, positions: as `encode` gives them; padding may stand on either side.
            max_tokens, beams, length_penalty: as in `generate`.

        Raises:
            ArgumentError: an id lies outside of the vocabulary, or a number is out of range.
        """
        self._check(ids, positions)
        step, reorder = self._steps(ids, positions)
        first = torch.full((ids.shape[0],), self.start, dtype=torch.int64, device=ids.device)
        return beam_search(
            step,
            first,
            end=self.ends,
            limit=max_tokens,
            reorder=reorder,
            beams=beams,
            length_penalty=length_penalty,
        )

    def _steps(
        self, ids: Tensor, positions: Positions | None
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]:
        """One cached step of the decoder, and the change of its rows."""
        caches = self.network.new_caches()
        begun = cast("Cross", caches[0].cross)
        memory: dict[str, Any] = {}

        def step(ids: Tensor) -> Tensor:
            if not begun.written:  # here, so that a refused number costs no pass
                memory.update(
                    memory=self.network.encode(source, positions), memory_positions=positions
                )
            logits = self.network.decode(ids, caches, **memory)
            memory.clear()
            return logits

        def reorder(rows: Tensor) -> None:
            if not torch.equal(
                rows, torch.arange(caches[0].self_attention.batch or 0, device=rows.device)
            ):
                for cache in (cache for pair in caches for cache in pair):
                    cache.select(rows)

        source = ids
        return step, reorder

    def _check(self, ids: Tensor, positions: Positions | None) -> None:
        real = ids if not isinstance(positions, Tensor) else ids.masked_fill(positions < 0, 0)
        check_ids(real, self.config.vocab_size)
