"""DeepSeek-V3, and R1: latent attention; experts by sigmoid, with a correction that balances their
use.

Source: DeepSeek-AI 2024 (arXiv 2412.19437); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.models.assembly import deepseek, grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn.feed_forward import SigmoidRouter
from regard.positions.rotary import Layout


@dataclass(frozen=True)
class Config(deepseek.Config):
    """The keys of a DeepSeek-V3 config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.deepseek.Config`.
    """

    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    rope_interleave: bool = True

    def layout(self) -> Layout:
        """Neighbours make a pair, unless rope_interleave is false."""
        return "interleaved" if self.rope_interleave else "half"

    def router(self) -> SigmoidRouter:
        """Sigmoid scores; groups are compared by their best two."""
        return SigmoidRouter(
            self.hidden_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            groups=deepseek.groups(self.n_group, self.topk_group, 2),
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return deepseek.decoder(config)


FAMILY = Family(
    Config,
    build,
    deepseek.NAMES,
    # how many layers behind the last predict a second token: they are not loaded
    ignored=deepseek.IGNORED | {"num_nextn_predict_layers"},
    fixed=deepseek.FIXED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    code=deepseek.CODE,
    plain=deepseek.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=deepseek.BUFFERS,
    # rounding a correction changes who is chosen
    exact=("*.router.correction",),
)
