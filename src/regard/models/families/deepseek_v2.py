"""DeepSeek-V2: latent attention; experts by softmax, chosen from all or from the best groups of
them.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.errors import ArgumentError
from regard.models.assembly import deepseek, grouped
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn.feed_forward import SoftmaxRouter

METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True)
class Config(deepseek.Config):
    """The keys of a DeepSeek-V2 config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.deepseek.Config`; or topk_method is unknown.
    """

    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    def router(self) -> SoftmaxRouter:
        """Softmax over all experts; groups are compared by their best expert, and count only where
        topk_method says so.
        """
        if self.topk_method not in METHODS:
            raise ArgumentError(
                f"topk_method is {self.topk_method!r}; supported are "
                f"{' and '.join(map(repr, METHODS))}"
            )
        limited = self.topk_method == "group_limited_greedy"
        groups = deepseek.groups(self.n_group, self.topk_group, 1) if limited else None
        return SoftmaxRouter(
            self.hidden_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            groups=groups,
            scale=self.routed_scaling_factor,
        )


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return deepseek.decoder(config)


FAMILY = Family(
    Config,
    build,
    deepseek.NAMES,
    ignored=deepseek.IGNORED,
    # the authors' code scales weights only where it does not renormalise them, and transformers
    # never does the latter
    fixed=deepseek.FIXED
    | {"mlp_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
    code=deepseek.CODE,
    plain=deepseek.plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=deepseek.BUFFERS,
)
