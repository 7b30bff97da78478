"""DeepSeek-V2: multi-head latent attention, and mixtures of experts with softmax scores, selected
from all experts or from the best groups.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from functools import partial

from regard.configs.deepseek import DeepseekV2Config
from regard.errors import ArgumentError
from regard.models.assembly import deepseek, llama_like
from regard.models.checkpoint.family import Family
from regard.models.decoder import Decoder
from regard.nn.routers import SoftmaxRouter

Config = DeepseekV2Config
METHODS = ("greedy", "group_limited_greedy")


def router(config: Config) -> SoftmaxRouter:
    """Build the router: softmax over all experts, which topk_method may limit to the best groups.

    Groups are ranked by their best expert.
    """
    if config.topk_method not in METHODS:
        raise ArgumentError(
            f"topk_method is {config.topk_method!r}; supported are "
            f"{' and '.join(map(repr, METHODS))}"
        )
    limited = config.topk_method == "group_limited_greedy"
    groups = deepseek.groups(config.n_group, config.topk_group, 1) if limited else None
    return SoftmaxRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=groups,
        scale=config.routed_scaling_factor,
    )


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return deepseek.decoder(config, partial(router, config))


FAMILY = Family(
    Config,
    build,
    deepseek.NAMES,
    check=lambda config: deepseek.check(config, partial(router, config)),
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    buffers=deepseek.BUFFERS,
)
