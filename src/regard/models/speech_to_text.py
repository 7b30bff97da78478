"""`SpeechToText`: an encoder-decoder whose source is log-mel features, and its encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.encoder import Encoder
from regard.models.seq2seq import Seq2Seq
from regard.nn.blocks.embedding import LogMelEmbedding
from regard.span import Positions, Span


class SpeechEncoder(Encoder):
    """An encoder of speech: log-mel features -> convolutions and positions -> blocks -> norm.

    >>> from regard.positions import LearnedPositions
    >>> embed = LogMelEmbedding(80, 4, LearnedPositions(1500, 4))
    >>> SpeechEncoder(embed, [], torch.nn.Identity())(torch.zeros(1, 80, 6)).shape
    torch.Size([1, 3, 4])

    Source: Radford et al. 2022 (arXiv 2212.04356), figure 1.
    """

    embed: LogMelEmbedding

    def forward(
        self,
        ids: Float[Tensor, "B F L"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B S"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "B S M"]:
        """Compute the hidden states of log-mel features."""
        if segments is not None:
            raise ArgumentError("segments are given, and frames have none; leave them out")
        x = self.embed(ids, positions)
        positions = Span(0, x.shape[1]) if positions is None else positions
        return self.run_blocks(x, positions, backend=backend)


class SpeechToText(Seq2Seq):
    """An encoder-decoder that writes what is said, as `regard.load` returns it for Whisper.

    Its sources are log-mel features [B, F, L], which transformers' `WhisperFeatureExtractor`
    computes from a sound. Whisper was trained with 30 seconds, padded with silence, which are 3000
    frames.

    `record` and `explain` take texts; run this model within a `regard.inspect.Recorder` instead.

    Args:
        network, tokenizer, config, start, eos_ids, newly_initialized, ignored: as in `Seq2Seq`; the
            network's encoder is a `SpeechEncoder`.

    >>> from regard.models.families import family
    >>> whisper = family("whisper")
    >>> config = whisper.config(99, 8, 1, 2, 16, 1, 2, 16, max_source_positions=10)
    >>> network = whisper.build(config).eval()
    >>> model = SpeechToText(network, None, config, start=3, eos_ids=[2])
    >>> features = torch.zeros(2, 80, 20)
    >>> len(model.beam_search(features, max_tokens=4, target_prefix=[5, 6]))
    2
    """

    def encode(
        self, texts: str | Sequence[str] | Float[Tensor, "B F L"]
    ) -> tuple[Float[Tensor, "B F L"], Int[Tensor, "B S"]]:
        """Return log-mel features and the positions of their states.

        Args:
            texts: log-mel features [B, F, L].

        Returns:
            The features on the device and in the dtype of the model, and positions [B, S].

        Raises:
            ArgumentTypeError: it is a text.
            ArgumentError: the features are not [B, F, L].
        """
        if not isinstance(texts, Tensor):
            raise ArgumentTypeError(
                f"the source is {type(texts).__name__}; a SpeechToText takes log-mel features "
                "[batch, bins, frames], as transformers' WhisperFeatureExtractor computes them"
            )
        self._check_source(texts, None)
        features = texts.to(self.device, self.dtype)
        S = LogMelEmbedding.states(features)
        return features, torch.arange(S, device=self.device).expand(features.shape[0], -1)

    def _check_source(self, source: Tensor, positions: Positions | None) -> None:
        """Check that the source is features of as many bins, and not longer than the positions."""
        embed = cast("LogMelEmbedding", self.network.encoder.embed)
        if not source.is_floating_point() or source.ndim != 3 or source.shape[1] != embed.bins:
            raise ArgumentError(
                f"the source is {tuple(source.shape)} of {source.dtype}; it must be log-mel "
                f"features [batch, {embed.bins}, frames]"
            )

    def _example_run(self) -> Callable[[], object]:
        embed = cast("LogMelEmbedding", self.network.encoder.embed)
        features = torch.zeros(1, embed.bins, 4, device=self.device, dtype=self.dtype)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        return lambda: self.forward(features, ids)
