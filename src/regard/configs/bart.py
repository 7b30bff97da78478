"""The configs of BART, Marian and Whisper, which share the keys of their two stacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from regard.argument_checks import resolve_head_dim
from regard.configs.base import ModelConfig, Raw, check_activation, check_sizes
from regard.cost.model import DenseSpec, LayerSpec, ModelSpec
from regard.cost.softmax import CrossSpec, SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError

TOKENS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class StackedConfig(ModelConfig):
    """The keys that BART, Marian and Whisper share: the sizes of an encoder and of a decoder."""

    vocab_size: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: str = "gelu"
    pad_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int | None = None

    renamed = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    ignored = frozenset({"classif_dropout", "decoder_layerdrop", "encoder_layerdrop", "init_std"})
    fixed = {
        "is_encoder_decoder": (True,),
        "tie_word_embeddings": (True,),
    }
    family_file = "bart"
    key_bias: ClassVar[bool] = True
    """Whether the maps to keys have a bias, as all others have."""

    def __post_init__(self) -> None:
        check_sizes(self, zero=TOKENS)
        for heads in (self.encoder_attention_heads, self.decoder_attention_heads):
            resolve_head_dim(self.d_model, heads, None)
        check_activation(self.activation_function, "activation_function")

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of both stacks, without positions and without norms around them."""
        M, norm = self.d_model, ParameterCounts(norms=2 * self.d_model)
        biases = ParameterCounts(biases=(4 if self.key_bias else 3) * M)
        mixers, feeds = [], []
        for heads, width, causal in (
            (self.encoder_attention_heads, self.encoder_ffn_dim, False),
            (self.decoder_attention_heads, self.decoder_ffn_dim, True),
        ):
            shape = HeadShape(heads, heads, M // heads, M // heads)
            own = SoftmaxSpec.of(M, shape, causal=causal)
            mixers.append(replace(own, weights=own.weights + biases))
            feeds.append(DenseSpec(M, width, gated=False, bias=True))
        cross = CrossSpec.of(M, mixers[1].shape)
        cross = replace(cross, weights=cross.weights + biases)
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (LayerSpec(mixers[1], feeds[1], norm + norm + norm, cross),) * self.decoder_layers,
            (LayerSpec(mixers[0], feeds[0], norm + norm),) * self.encoder_layers,
            tied=True,
            notes=(
                "the encoder reads the prompt; the decoder's text is counted with the same length",
            ),
        )


@dataclass(frozen=True)
class BartConfig(StackedConfig):
    """The keys of BART, and a flag that only the stored tensors determine: `logits_bias`."""

    max_position_embeddings: int = 1024
    scale_embedding: bool = False
    logits_bias: bool = False

    model_types = ("bart",)
    ignored = StackedConfig.ignored | {"force_bos_token_to_be_generated"}
    fixed = {
        **StackedConfig.fixed,
        # of the first files, in which one class served several models
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "extra_pos_embeddings": (2,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
    }
    offset: ClassVar[int] = 2
    """The number of unused rows in front of the tables of positions."""

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of both stacks, each with a table of positions and a norm behind its
        embedding; a bias for the logits is not counted.
        """
        M = self.d_model
        return replace(
            super().sizes(name),
            positions=2 * (self.max_position_embeddings + self.offset) * M,
            position_rows=1,
            norms=ParameterCounts(norms=4 * M),
            max_context=self.max_position_embeddings,
        )


@dataclass(frozen=True)
class MarianConfig(StackedConfig):
    """The keys of Marian; `logits_bias` follows from the stored tensors, and nothing depends on
    `max_position_embeddings`, the rows of transformers' table of sinusoids.
    """

    pad_token_id: int = 58100
    eos_token_id: int = 0
    max_position_embeddings: int = 1024
    scale_embedding: bool = False
    logits_bias: bool = False

    model_types = ("marian",)
    fixed = {
        **StackedConfig.fixed,
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "share_encoder_decoder_embeddings": (True,),
        "static_position_embeddings": (True,),
    }

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for BART, without decoder_vocab_size, which repeats vocab_size."""
        keys = super().normalize_keys(raw)
        own, both = keys.pop("decoder_vocab_size", None), keys.get("vocab_size")
        if own not in (None, both):
            raise ArgumentError(
                f"decoder_vocab_size is {own!r} and vocab_size is {both!r}; only one vocabulary "
                "for both stacks is supported for marian"
            )
        return keys


NOTE = "the states of the encoder are counted with the same length as the decoder's text"


@dataclass(frozen=True)
class WhisperConfig(StackedConfig):
    """The keys of Whisper: BART's, without a bias in the maps to keys; the input has at most 2
    `max_source_positions` frames.
    """

    pad_token_id: int = 50256
    eos_token_id: int = 50256
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448

    model_types = ("whisper",)
    key_bias = False
    ignored = StackedConfig.ignored | {
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
    fixed = {
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
