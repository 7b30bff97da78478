"""The configs of Command R, R7B and A."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import SILU, DecoderRecipe, RotaryDecoderConfig


@dataclass(frozen=True)
class CohereConfig(RotaryDecoderConfig):
    """The keys of Command R: parallel sublayers that share a norm without biases, rotary pairs of
    neighbours, and a factor on the logits.
    """

    layer_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False

    model_types = ("cohere",)
    recipe = DecoderRecipe(
        norm="layer, no bias",
        eps="layer_norm_eps",
        parallel=True,
        layout="interleaved",
        logit_scale="logit_scale",
    )
    fixed = {
        **SILU,
        "use_qk_norm": (False,),
    }


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """The keys of Command R7B and A: three of four layers have a window, the others no
    positions.
    """

    rope_theta: float = 10000.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: int | None = None

    model_types = ("cohere2",)
    recipe = replace(CohereConfig.recipe, window_pattern=4)
    ignored = frozenset(
        {
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
        }
    )
    fixed = {
        **SILU,
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (False,),
        "use_qk_norm": (False,),
        "layer_switch": (4,),
    }

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer; None for a layer without a window."""
        return tuple(None if window is None else self.rope for window in self.windows())
