"""Qwen 3: Qwen 2 with a norm on each head of queries and keys, before they are rotated, in place of
the bias.

Source: Yang et al. 2025 (arXiv 2505.09388); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.cost import layer_types
from regard.models.assembly import grouped
from regard.models.assembly.grouped import OURS, THEIRS
from regard.models.checkpoint.family import Family, Raw
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.positions import Rotary


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a Qwen 3 config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`.
    """

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def windows(self) -> tuple[int | None, ...]:
        """What `layer_types` say, or a window from layer `max_window_layers` on, if windows are
        used.
        """
        return layer_types.windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            max_window_layers=self.max_window_layers,
            use_sliding_window=self.use_sliding_window,
        )


def plain(raw: Raw) -> dict[str, Any]:
    """A file without head_dim means 128, whatever the model's size."""
    return grouped.plain({"head_dim": 128, **raw})


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""

    def block(rotary: Rotary, window: int | None) -> Block:
        mixer = grouped.attention(
            config,
            rotary,
            window,
            q_steps=[grouped.norm(config, config.head_dim)],
            k_steps=[grouped.norm(config, config.head_dim)],
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        return grouped.block(config, mixer)

    return grouped.decoder(config, block)


HEAD_NORMS = {
    THEIRS + "self_attn.q_norm.weight": OURS + "attention.project.q.steps.0.weight",
    THEIRS + "self_attn.k_norm.weight": OURS + "attention.project.k.steps.0.weight",
}
FAMILY = Family(
    Config,
    build,
    grouped.NAMES | HEAD_NORMS,
    fixed={"hidden_act": ("silu",)},
    plain=plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
