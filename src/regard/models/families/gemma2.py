"""Gemma 2: Gemma with caps on scores and logits, norms on either side, and a window in every other
layer, the first included.

Source: Gemma Team 2024 (arXiv 2408.00118); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.arguments import check_number
from regard.cost import layer_types
from regard.models.assembly import gemmas, grouped, rope
from regard.models.checkpoint.family import Family, Raw
from regard.models.decoder import Decoder


@dataclass(frozen=True)
class Config(gemmas.WindowedConfig):
    """The keys of a Gemma 2 config.json that shape the model.

    Raises:
        ArgumentError: attn_logit_softcapping is not above 0; or as
            `regard.models.assembly.gemmas.WindowedConfig`.
    """

    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        cap = self.attn_logit_softcapping
        check_number("attn_logit_softcapping", cap, 0, float("inf"), "above 0")

    def windows(self) -> tuple[int | None, ...]:
        """What `layer_types` say, or a window in layers 0, 2, 4, ..."""
        return layer_types.windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=2 if self.layer_types is None else None,
        )


def plain(raw: Raw) -> dict[str, Any]:
    """A file without head_dim means 256, whatever the model's size."""
    return rope.plain({"head_dim": 256, **raw})


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    rotary = config.rotary()
    mixers = [
        gemmas.attention(
            config,
            rotary,
            window,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        for window in config.windows()
    ]
    layers = [gemmas.sandwich(config, mixer) for mixer in mixers]
    return gemmas.decoder(config, layers, config.final_logit_softcapping)


FAMILY = Family(
    Config,
    build,
    gemmas.NAMES,
    fixed={
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    plain=plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
