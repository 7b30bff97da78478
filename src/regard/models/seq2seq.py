"""`Seq2Seq`: an encoder-decoder with its tokenizer and its config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.caches import Cross
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.decoder import check_ids
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.generation.beam_search import Hypothesis, beam_search
from regard.models.text_model import TextModel, as_text_list, pad_right
from regard.models.tokenizer import Tokenizer
from regard.span import Positions


class Seq2Seq(TextModel):
    """An encoder-decoder with its tokenizer and its config, as `regard.load` returns it.

    Args:
        network: the encoder-decoder: source ids and target ids -> logits.
        tokenizer: converts texts to ids; None takes only ids.
        config: the frozen config of its family, with vocab_size.
        start: the id with which every target begins.
        eos_ids: the ids that end a text.
        newly_initialized: names of weights that the checkpoint lacked and was allowed to lack.
        ignored: parts of the checkpoint that were not used.

    >>> from regard.models.families import family
    >>> t5 = family("t5")
    >>> import regard
    >>> config = t5.config(1024, 8, 4, 16, 1, 2)
    >>> network, tokenizer = t5.build(config).eval(), regard.load("tiny").tokenizer
    >>> model = Seq2Seq(network, tokenizer, config, start=0, eos_ids=[1])
    >>> len(model.generate(["to be", "or not"], max_tokens=3, beams=2))
    2
    >>> ids, positions = model.encode("to be")
    >>> len(model.beam_search(ids, positions, max_tokens=3)[0][0].ids) <= 3
    True
    """

    def __init__(
        self,
        network: EncoderDecoder,
        tokenizer: Tokenizer | None,
        config: object,
        *,
        start: int,
        eos_ids: Collection[int],
        newly_initialized: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        super().__init__(network, tokenizer, config, newly_initialized, ignored)
        self.network, self.start, self.eos_ids = network, start, frozenset(eos_ids)

    def encode(
        self, texts: str | Sequence[str] | Float[Tensor, "B F L"]
    ) -> tuple[Int[Tensor, "B S"] | Float[Tensor, "B F L"], Int[Tensor, "B S"]]:
        """Convert texts to ids, with the special tokens that the tokenizer adds.

        Args:
            texts: one text, or B texts; a `SpeechToText` takes log-mel features.

        Returns:
            The ids [B, S], and their positions [B, S], -1 in the padding after a shorter text.

        Raises:
            ArgumentError: there is no text, or one has no tokens.
            ArgumentTypeError: a text is not a str.
            FileError: the model has no tokenizer.
        """
        if isinstance(texts, Tensor):
            raise ArgumentTypeError("texts is a tensor; it must be a str, or several")
        rows = [self.tokenizer.encode_pair(text)[0] for text in as_text_list(texts)]
        for i, row in enumerate(rows):
            if not row:
                raise ArgumentError(f"text {i} has no tokens; give at least one character")
        return pad_right(rows, self.device)

    def forward(
        self,
        source_ids: Int[Tensor, "B S"] | Float[Tensor, "B F L"],
        target_ids: Int[Tensor, "B T"],
        source_positions: Positions | None = None,
        target_positions: Positions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B T V"]:
        """Compute the logits for the token after each target token. `model(...)` does the same.

        Args:
            source_ids: ids [B, S] of the source, or log-mel features [B, F, L] of speech.
            target_ids: ids [B, T] of the target so far, the first of which is `start`.
            source_positions: positions [B, S], -1 for padding; None is 0 to S - 1.
            target_positions: positions [B, T], -1 for padding; None is 0 to T - 1.
            backend: the attention kernel, or "auto".

        Returns:
            Logits [B, T, V].

        Raises:
            ArgumentError: an id is outside the vocabulary.
        """
        self._check_source(source_ids, source_positions)
        check_ids(target_ids, self.config.vocab_size, target_positions)
        logits: Tensor = self.network(
            source_ids, target_ids, source_positions, target_positions, backend=backend
        )
        return logits

    __call__ = forward

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, and means one text
        self,
        texts: str,
        *,
        max_tokens: int = ...,
        beams: int = ...,
        length_penalty: float = ...,
        target_prefix: Sequence[int] = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        texts: Sequence[str] | Float[Tensor, "B F L"],
        *,
        max_tokens: int = ...,
        beams: int = ...,
        length_penalty: float = ...,
        target_prefix: Sequence[int] = ...,
    ) -> list[str]: ...

    def generate(
        self,
        texts: str | Sequence[str] | Float[Tensor, "B F L"],
        *,
        max_tokens: int = 64,
        beams: int = 1,
        length_penalty: float = 1.0,
        target_prefix: Sequence[int] = (),
    ) -> str | list[str]:
        """Generate the target text for each source text.

        A text gets the same answer alone and in a batch.

        Args:
            texts: one source text, or several; a `SpeechToText` takes log-mel features [B, F, L].
            max_tokens: the largest number of new tokens.
            beams: the number of beams; 1 takes the most likely token at each step.
            length_penalty: exponent of the length in the score; 0 ranks by probability.
            target_prefix: ids with which every target begins, after `start`, such as a language's.

        Returns:
            The generated text; a list of texts where several were given.

        Raises:
            ArgumentError, ArgumentTypeError: as in `encode`; or a number is out of range.
        """
        hypotheses = self.beam_search(
            *self.encode(texts),
            max_tokens=max_tokens,
            beams=beams,
            length_penalty=length_penalty,
            target_prefix=target_prefix,
        )
        answers = [self.tokenizer.decode(row[0].ids, skip_special=True) for row in hypotheses]
        return answers[0] if isinstance(texts, str) else answers

    @torch.no_grad()
    def beam_search(
        self,
        ids: Int[Tensor, "B S"] | Float[Tensor, "B F L"],
        positions: Positions | None = None,
        *,
        max_tokens: int = 64,
        beams: int = 1,
        length_penalty: float = 1.0,
        target_prefix: Sequence[int] = (),
    ) -> list[list[Hypothesis]]:
        """Search the best targets of each source with cached decoder steps; one beam is greedy.

        Args:
            ids: source ids [B, S], or log-mel features, as `encode` returns them.
            positions: their positions [B, S], -1 for padding, which may be on either side.
            max_tokens, beams, length_penalty, target_prefix: as in `generate`.

        Returns:
            For each source its hypotheses, best first, without the prefix.

        Raises:
            ArgumentError: an id is outside the vocabulary, or a number is out of range.
        """
        self._check_source(ids, positions)
        before = torch.tensor([[self.start, *target_prefix]], device=ids.device)
        check_ids(before, self.config.vocab_size)
        step, reorder = self._steps(ids, positions, before[:, :-1])
        first = before[0, -1].expand(ids.shape[0])
        return beam_search(
            step,
            first,
            end=self.eos_ids,
            limit=max_tokens,
            reorder=reorder,
            beams=beams,
            length_penalty=length_penalty,
        )

    def _steps(
        self, source: Tensor, positions: Positions | None, before: Tensor
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]:
        """Return a function for one cached decoder step, and one that reorders the cached rows. The
        first step also reads the ids [1, n] of `before`.
        """
        caches = self.network.new_caches()
        source_cache = caches[0].cross
        assert isinstance(source_cache, Cross)
        memory: dict[str, Any] = {}

        def step(ids: Tensor) -> Tensor:
            if not source_cache.written:  # only now, so that a bad argument costs no encoder pass
                memory.update(
                    memory=self.network.run_encoder(source, positions), memory_positions=positions
                )
                ids = torch.cat([before.expand(ids.shape[0], -1), ids], 1)
            logits = self.network.run_decoder(ids, caches, **memory)
            memory.clear()
            return logits

        def reorder(rows: Tensor) -> None:
            if not torch.equal(
                rows, torch.arange(caches[0].self_attention.batch or 0, device=rows.device)
            ):
                for cache in (cache for pair in caches for cache in pair):
                    cache.select(rows)

        return step, reorder

    def _check_source(self, source: Tensor, positions: Positions | None) -> None:
        """Check the source before it is encoded: here ids, as those of the target."""
        check_ids(source, self.config.vocab_size, positions)

    def _example_run(self) -> Callable[[], object]:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        return lambda: self.forward(ids, ids)

    def _files(self) -> Mapping[str, object]:
        return {
            "generation_config.json": {
                "decoder_start_token_id": self.start,
                "eos_token_id": sorted(self.eos_ids),
            }
        }
