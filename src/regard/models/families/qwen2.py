"""Qwen 2 and 2.5: Llama with a bias on queries, keys and values; the upper layers may look through
a sliding window.

Source: Yang et al. 2024 (arXiv 2407.10671); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost import layer_types
from regard.models.assembly import grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a Qwen 2 config.json that shape the model. The biases are not among them: they
    are always there.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`.
    """

    max_position_embeddings: int = 32768
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


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return grouped.decoder(
        config,
        lambda rotary, window: grouped.block(
            config, grouped.attention(config, rotary, window, bias=True)
        ),
    )


FAMILY = Family(
    Config,
    build,
    grouped.NAMES,
    fixed={"hidden_act": ("silu",), "use_mrope": (False,)},
    plain=grouped.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
