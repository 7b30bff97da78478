"""`WhisperConfig`: the keys of a Whisper config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from regard.configs.bart import StackedConfig
from regard.cost.model import ModelSpec
from regard.cost.spec import ParameterCounts

NOTE = "the states of the encoder are counted with the same length as the decoder's text"


@dataclass(frozen=True)
class WhisperConfig(StackedConfig):
    """The keys of Whisper: BART's, without a bias in the maps to keys, and the sizes of the input.

    Attributes:
        num_mel_bins: the number of log-mel features of a frame.
        max_source_positions: the length of the encoder's table of positions; the input has twice as
            many frames at most.
        max_target_positions: the length of the decoder's table of positions.

    Raises:
        ArgumentError: as in `StackedConfig`.
    """

    pad_token_id: int = 50256
    eos_token_id: int = 50256
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448

    model_types: ClassVar[tuple[str, ...]] = ("whisper",)
    key_bias: ClassVar[bool] = False
    ignored: ClassVar[frozenset[str]] = StackedConfig.ignored | {
        # of a classifier, which is refused by the names of its weights
        "classifier_proj_size",
        "use_weighted_layer_sum",
        # which ids generation begins with; here `target_prefix`
        "forced_decoder_ids",
        # training, and the times of words
        "apply_spec_augment",
        "mask_feature_length",
        "mask_feature_min_masks",
        "mask_feature_prob",
        "mask_time_length",
        "mask_time_min_masks",
        "mask_time_prob",
        "median_filter_width",
    }
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **StackedConfig.fixed,
        "scale_embedding": (False,),
    }

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of both stacks, each with a table of positions and a last norm, and of
        the two convolutions in front of the encoder.
        """
        M, width = self.d_model, 3  # of both convolutions
        return replace(
            super().sizes(name),
            positions=(self.max_source_positions + self.max_target_positions) * M,
            position_rows=1,
            norms=ParameterCounts(norms=4 * M),
            pooler=ParameterCounts(width * M * (self.num_mel_bins + M), 2 * M),
            max_context=self.max_target_positions,
            notes=(NOTE,),
        )
