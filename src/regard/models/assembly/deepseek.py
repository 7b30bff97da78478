"""Parts and checkpoint names of DeepSeek-V2, V3 and V3.2: multi-head latent attention, and dense
layers followed by mixtures of experts.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); DeepSeek-AI 2024 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from regard import masks
from regard.configs.deepseek import DeepseekConfig, DeepseekV3Config
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, LatentProjection, PreNorm, RMSNorm, SwiGLU
from regard.nn.experts import MoE
from regard.nn.linear import Linear
from regard.nn.mixer import Mixer
from regard.nn.routers import ExpertGroups, Router, SigmoidRouter
from regard.positions import Rotary

PROJECT = MODEL_LAYER + "attention.project."
LATENT_ATTENTION = {
    STORED_LAYER + "self_attn.q_proj.weight": PROJECT + "q.linear.weight",
    STORED_LAYER + "self_attn.q_a_proj.weight": PROJECT + "q.down.weight",
    STORED_LAYER + "self_attn.q_a_proj.bias": PROJECT + "q.down.bias",
    STORED_LAYER + "self_attn.q_a_layernorm.weight": PROJECT + "q.norm.weight",
    STORED_LAYER + "self_attn.q_b_proj.weight": PROJECT + "q.up.linear.weight",
    STORED_LAYER + "self_attn.kv_a_proj_with_mqa.weight": PROJECT + "kv_down.weight",
    STORED_LAYER + "self_attn.kv_a_proj_with_mqa.bias": PROJECT + "kv_down.bias",
    STORED_LAYER + "self_attn.kv_a_layernorm.weight": PROJECT + "kv_norm.weight",
    STORED_LAYER + "self_attn.kv_b_proj.weight": PROJECT + "kv_up.linear.weight",
    STORED_LAYER + "self_attn.o_proj.weight": MODEL_LAYER + "attention.output.weight",
    STORED_LAYER + "self_attn.o_proj.bias": MODEL_LAYER + "attention.output.bias",
}
NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.PRE_NORMS
    | llama_like.FEED_FORWARD
    | LATENT_ATTENTION
    | {
        STORED_LAYER + "mlp.gate.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
        STORED_LAYER + "mlp.gate.e_score_correction_bias": MODEL_LAYER
        + "feed_forward.router.correction",
    }
    | {
        STORED_LAYER + f"mlp.{stored}.{part}_proj.weight": MODEL_LAYER
        + f"feed_forward.{parameter}.{part}.weight"
        for stored, parameter in (("experts.{}", "experts.{}"), ("shared_experts", "shared"))
        for part in ("gate", "up", "down")
    }
)
"""Stored name -> parameter name; the first {} is the number of the layer, a second one that of the
expert.
"""
BUFFERS = (*llama_like.BUFFERS, r"model\.layers\.61\..*")
"""Patterns of stored tensors that are not loaded. Layer 61 of V3 predicts a second token
(multi-token prediction).
"""


def groups(n_group: int | None, topk_group: int | None, best: int) -> ExpertGroups:
    """Return the groups of experts of a config.

    >>> groups(8, 4, 2)
    ExpertGroups(count=8, topk=4, best=2)
    """
    if n_group is None or topk_group is None:
        raise ArgumentError(f"n_group is {n_group} and topk_group {topk_group}; groups need both")
    return ExpertGroups(n_group, topk_group, best)


def check(config: DeepseekConfig, router: Callable[[], Router]) -> None:
    """Check the numbers of the rotary scaling, and the sizes of the router."""
    building_blocks.rotary_module(config.rope)
    with torch.device("meta"):  # only sizes are checked, and nothing is allocated
        router()


def sigmoid_router(config: DeepseekV3Config) -> SigmoidRouter:
    """Build the router of V3 with sigmoid scores; groups are ranked by their best two experts."""
    return SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=groups(config.n_group, config.topk_group, 2),
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def causal_attention(project: LatentProjection, output: nn.Module) -> Mixer:
    """Build latent attention to all earlier keys."""
    return Attention(project, output, mask=masks.Causal(), scale=project.scale)


def decoder(
    config: DeepseekConfig,
    router: Callable[[], Router],
    attention: Callable[[LatentProjection, nn.Module], Mixer] = causal_attention,
) -> Decoder:
    """Build a decoder with initial weights: the first layers are dense, the others have experts."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    rotary = building_blocks.rotary_module(config.rope)
    layers = [
        Block(
            attention(*_attention_parts(config, rotary)),
            _feed_forward(config, router, layer),
            PreNorm(_norm(config)),
            PreNorm(_norm(config)),
        )
        for layer in range(config.num_hidden_layers)
    ]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def _attention_parts(config: DeepseekConfig, rotary: Rotary) -> tuple[LatentProjection, nn.Module]:
    M, H, E = config.hidden_size, config.num_attention_heads, config.v_head_dim
    project = LatentProjection(
        M,
        H,
        rotary,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        value_dim=E,
        q_rank=config.q_lora_rank,
        bias=config.attention_bias,
    )
    return project, Linear(H * E, M, bias=config.attention_bias)


def _feed_forward(config: DeepseekConfig, router: Callable[[], Router], layer: int) -> SwiGLU | MoE:
    M, width = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        return SwiGLU(M, config.intermediate_size)
    experts = [SwiGLU(M, width) for _ in range(config.n_routed_experts)]
    return MoE(router(), experts, SwiGLU(M, width * config.n_shared_experts))


def _norm(config: DeepseekConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
