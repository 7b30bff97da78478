"""GLM-4.5 to 4.7: first layers that are dense, then mixtures of experts with an expert for all
tokens, and rotary positions on a part of each head.

Source: GLM-4.5 Team 2025 (arXiv 2508.06471); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.configs.mixtures import Glm4MoeConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, ExpertGroups, PreNorm, SigmoidRouter, SwiGLU
from regard.positions import Rotary

Config = Glm4MoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    networks = iter([_feed_forward(config, layer) for layer in range(config.num_hidden_layers)])

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = (
            llama_like.head_norm_attention(config, rotary, window)
            if config.use_qk_norm
            else llama_like.attention(config, rotary, window, bias=config.attention_bias)
        )
        residuals = (PreNorm(llama_like.norm(config)) for _ in range(2))
        return Block(mixer, next(networks), *residuals)

    return llama_like.decoder(config, block)


def _feed_forward(config: Config, layer: int) -> nn.Module:
    M, hidden = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        return SwiGLU(M, config.intermediate_size)
    shared = SwiGLU(M, hidden * config.n_shared_experts)
    return llama_like.mixture(M, hidden, _router(config), shared)


def _router(config: Config) -> SigmoidRouter:
    groups = None if config.n_group == 1 else ExpertGroups(config.n_group, config.topk_group, 2)
    return SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        groups=groups,
        scale=config.routed_scaling_factor,
    )


def check(config: Config) -> None:
    """Check the rotary scaling, and the sizes of the router."""
    llama_like.check(config)
    _router(replace(config, hidden_size=1))


FEED_FORWARD = MODEL_LAYER + "feed_forward."
NAMES = (
    llama_like.NAMES
    | llama_like.HEAD_NORMS
    | llama_like.EXPERTS
    | {STORED_LAYER + "mlp.gate.e_score_correction_bias": FEED_FORWARD + "router.correction"}
    | {
        STORED_LAYER
        + f"mlp.shared_experts.{part}_proj.weight": f"{FEED_FORWARD}shared.{part}.weight"
        for part in ("gate", "up", "down")
    }
)
FAMILY = replace(
    llama_like.family(Config, build, NAMES), check=check, keep_float32=("*.router.correction",)
)
