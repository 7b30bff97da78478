"""Mistral: Llama whose every layer looks through a sliding window, in its first version.

Source: Jiang et al. 2023 (arXiv 2310.06825); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost import layer_types
from regard.models.assembly import grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a Mistral config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`.
    """

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    def windows(self) -> tuple[int | None, ...]:
        """One window for all layers, or none."""
        return layer_types.windows(self.num_hidden_layers, sliding_window=self.sliding_window)


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return grouped.decoder(
        config,
        lambda rotary, window: grouped.block(config, grouped.attention(config, rotary, window)),
    )


FAMILY = Family(
    Config,
    build,
    grouped.NAMES,
    fixed={"hidden_act": ("silu",)},
    plain=grouped.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
