"""DeepSeek-V2, V3 and V3.2, GLM-5, and Kimi Linear: latent attention, and dense layers, then
mixtures of experts.

The released code of V3.2 turns index queries and keys by a Hadamard matrix, which changes no score,
and rounds them to 8 bits, which is not done here.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); DeepSeek-AI 2024 (arXiv 2412.19437); DeepSeek-AI 2025
(DeepSeek-V3.2-Exp); Kimi Team 2025 (arXiv 2510.26692).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from regard import masks
from regard.configs.base import FULL, ModelConfig
from regard.configs.deepseek import (
    DeepseekConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    KimiLinearConfig,
    LatentConfig,
    Mistral4Config,
)
from regard.configs.mistral import Ministral3Config
from regard.configs.rotary_decoder import Experts
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.assembly.gated_delta import DECAYS, filters
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import Family, NameTable, reshaped
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    ConvolvedQKV,
    HeadProjection,
    InputEmbedding,
    LatentProjection,
    PreNorm,
    QueryTemperature,
    Recurrent,
    RMSNorm,
    SwiGLU,
)
from regard.nn.attention.selected import EarlierChoice, IndexedLatentAttention, LatentIndexer
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.norms import L2Norm
from regard.nn.blocks.routers import ExpertGroups, Router, SigmoidRouter, SoftmaxRouter
from regard.nn.mixer import Mixer
from regard.nn.projections.latent import LowRankProjection
from regard.nn.recurrence.delta import BottleneckProjection, ChannelLogDecay, DeltaRule
from regard.nn.recurrence.projections import CausalConvolution, JoinedConvolution
from regard.nn.weights import Linear
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
    | llama_like.expert_names(Experts(""))
)
"""Stored name -> parameter name; the first {} is the layer, a second one the expert."""
BUFFERS = (*llama_like.BUFFERS, r"model\.layers\.(61|78)\..*")
"""Patterns of stored tensors that are not loaded; layer 61 of V3, or 78 of GLM-5, predicts a
second token.
"""


def groups(n_group: int | None, topk_group: int | None, best: int) -> ExpertGroups:
    """Return the groups of experts of a config."""
    if n_group is None or topk_group is None:
        raise ArgumentError(f"n_group is {n_group} and topk_group {topk_group}; groups need both")
    return ExpertGroups(n_group, topk_group, best)


def _check(config: LatentConfig, router: Callable[[], Router]) -> None:
    """Check the numbers of the rotary scaling, and the sizes of the router."""
    if isinstance(config, DeepseekConfig):
        building_blocks.rotary_module(config.rope)
    with torch.device("meta"):  # only sizes are checked, and nothing is allocated
        router()


def grouped_router(
    kind: Callable[..., Router], config: DeepseekV3Config | KimiLinearConfig
) -> Router:
    """Build a router whose groups are ranked by their best two experts."""
    return kind(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=groups(config.n_group, config.topk_group, 2),
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


sigmoid_router = partial(grouped_router, SigmoidRouter)


def tempered_attention(
    config: Mistral4Config, project: LatentProjection, output: nn.Module, _: int
) -> Mixer:
    """Build latent attention whose queries have a temperature."""
    if config.temperature is not None:
        scale, length = config.temperature
        up = project.q.up if isinstance(project.q, LowRankProjection) else project.q
        up.steps.append(QueryTemperature("ministral3", scale=scale, length=length))
    return causal_attention(project, output)


def causal_attention(project: LatentProjection, output: nn.Module) -> Mixer:
    """Build latent attention to all earlier keys."""
    return Attention(project, output, mask=masks.Causal(), scale=project.scale)


def _decoder(
    config: LatentConfig, router: Callable[[], Router], mixer: Callable[[int], Mixer]
) -> Decoder:
    """Build a decoder with initial weights: the first layers are dense, the others have experts."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    layers = [
        Block(
            mixer(layer),
            _feed_forward(config, router, layer),
            PreNorm(_norm(config)),
            PreNorm(_norm(config)),
        )
        for layer in range(config.num_hidden_layers)
    ]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def _attention_parts(config: LatentConfig, rotary: Rotary) -> tuple[LatentProjection, nn.Module]:
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


def _feed_forward(config: LatentConfig, router: Callable[[], Router], layer: int) -> SwiGLU | MoE:
    M, width = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        return SwiGLU(M, config.intermediate_size)
    experts = [SwiGLU(M, width) for _ in range(config.n_routed_experts)]
    return MoE(router(), experts, SwiGLU(M, width * config.n_shared_experts))


def _norm(config: LatentConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


METHODS = ("greedy", "group_limited_greedy")


def softmax_router(config: DeepseekV2Config) -> SoftmaxRouter:
    """Build the router: softmax over all experts, or those of topk_method's best groups."""
    if config.topk_method not in METHODS:
        raise ArgumentError(
            f"topk_method is {config.topk_method!r}; supported are "
            f"{' and '.join(map(repr, METHODS))}"
        )
    limited = config.topk_method == "group_limited_greedy"
    limits = groups(config.n_group, config.topk_group, 1) if limited else None
    return SoftmaxRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=limits,
        scale=config.routed_scaling_factor,
    )


def indexed_attention(
    config: DeepseekV32Config, project: LatentProjection, output: nn.Module, layer: int
) -> IndexedLatentAttention:
    """Build latent attention with its indexer, which has a layout of rotary pairs of its own, or to
    the keys that an earlier layer chose.
    """
    passes = any(config.shares_choice(i) for i in range(config.num_hidden_layers))
    if config.shares_choice(layer):
        choice = EarlierChoice(config.index_topk)
        return IndexedLatentAttention(project, choice, output, scale=project.scale)
    M, J, d = config.hidden_size, config.index_n_heads, config.index_head_dim
    latent = project.q
    assert isinstance(latent, LowRankProjection), "the config refuses q_lora_rank null"
    of_attention = building_blocks.rotary_module(config.rope)
    rotary = Rotary(
        d,
        config.rope_theta,
        scaling=of_attention.scaling,
        rotary_dim=config.qk_rope_head_dim,
        layout=config.indexer_layout,
    )
    selector = LatentIndexer(
        HeadProjection(latent.down.out_features, J, d, rotary),
        HeadProjection(M, 1, d, rotary, flat=nn.LayerNorm(d, eps=1e-6)),
        Linear(M, J, bias=False),
        latent,
        topk=config.index_topk,
    )
    return IndexedLatentAttention(
        project, selector, output, scale=project.scale, passes_choice=passes
    )


INDEXER, SELECTOR = STORED_LAYER + "self_attn.indexer.", MODEL_LAYER + "attention.selector."
V32_NAMES: NameTable = {
    **NAMES,
    INDEXER + "wq_b.weight": SELECTOR + "q.linear.weight",
    INDEXER + "wk.weight": SELECTOR + "k.linear.weight",
    INDEXER + "k_norm.weight": SELECTOR + "k.flat.weight",
    INDEXER + "k_norm.bias": SELECTOR + "k.flat.bias",
    INDEXER + "weights_proj.weight": SELECTOR + "weight.weight",
}
"""Stored name -> parameter name, as in `NAMES`."""


def _build_kimi(config: KimiLinearConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    unrotated = Rotary(config.qk_rope_head_dim, rotary_dim=0)

    def mixer(layer: int) -> Mixer:
        if config.kinds()[layer] == FULL:
            return causal_attention(*_attention_parts(config, unrotated))
        return delta_attention(config)

    return _decoder(config, partial(sigmoid_router, config), mixer)


def delta_attention(config: KimiLinearConfig) -> Recurrent:
    """Build Kimi Delta Attention; the bottlenecks of decay and gate are as wide as a head."""
    M, H, D = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    kernel = config.linear_conv_kernel_dim
    project = ConvolvedQKV(
        HeadProjection(M, H, D, L2Norm()),
        HeadProjection(M, H, D, L2Norm()),
        HeadProjection(M, H, D),
        JoinedConvolution([CausalConvolution(H * D, kernel) for _ in "qkv"]),
    )
    return Recurrent(
        project,
        DeltaRule(M, H, decay=ChannelLogDecay(M, H, D, D)),
        Linear(H * D, M, bias=False),
        norm=RMSNorm(D, eps=config.rms_norm_eps),
        gate=BottleneckProjection(M, D, H, D),
        gate_activation="sigmoid",
    )


STORED, MIXER = STORED_LAYER + "self_attn.", MODEL_LAYER + "attention."
FEED_FORWARD, DECAY = MODEL_LAYER + "feed_forward.", MIXER + "rule.decay."
DELTA: NameTable = {
    STORED + "k_proj.weight": MIXER + "project.k.linear.weight",
    STORED + "v_proj.weight": MIXER + "project.v.linear.weight",
    **{
        STORED + f"{part}_conv1d.weight": filters(f"{MIXER}project.convolution.parts.{i}.weight")
        for i, part in enumerate("qkv")
    },
    STORED + "b_proj.weight": MIXER + "rule.beta_proj.weight",
    STORED + "f_a_proj.weight": DECAY + "project.down.weight",
    STORED + "f_b_proj.weight": DECAY + "project.linear.weight",
    STORED + "A_log": reshaped(DECAY + "A_log", 1, 1, -1, 1),
    STORED + "dt_bias": reshaped(DECAY + "dt_bias", -1),
    STORED + "g_a_proj.weight": MIXER + "gate.down.weight",
    STORED + "g_b_proj.weight": MIXER + "gate.linear.weight",
    STORED + "o_norm.weight": MIXER + "norm.weight",
}
"""What a layer of Kimi Delta Attention has besides the maps of queries and of the output, which
have the same names in both kinds of layers.
"""
EXPERTS = STORED_LAYER + "block_sparse_moe."
KIMI_NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **LATENT_ATTENTION,
    **DELTA,
    **llama_like.FEED_FORWARD,
    # transformers writes a dense layer under the name of the experts
    **{
        EXPERTS + f"{part}_proj.weight": f"{FEED_FORWARD}{part}.weight"
        for part in ("gate", "up", "down")
    },
    **llama_like.expert_names(Experts("", stored="block_sparse_moe", parts=("w1", "w3", "w2"))),
}


def _rename(name: str) -> str:
    """Return the name without prefix; transformers writes the layers of Kimi K2.5 as blocks."""
    return llama_like.rename_language_model(name).replace("model.blocks.", "model.layers.")


def _family(
    config: type[ModelConfig],
    router: Callable[[Any], Router],
    names: NameTable = NAMES,
    attention: Callable[..., Mixer] | None = None,
    keep_float32: tuple[str, ...] = (),
    towers: str = "",
) -> Family:
    def build(own: Any) -> Decoder:
        parts = partial(_attention_parts, own, building_blocks.rotary_module(own.rope))

        def mixer(layer: int) -> Mixer:
            if attention is None:
                return causal_attention(*parts())
            return attention(own, *parts(), layer)

        return _decoder(own, partial(router, own), mixer)

    return Family(
        config,
        build,
        names,
        check=lambda own: _check(own, partial(router, own)),
        prefixes=llama_like.PREFIXES,
        head=llama_like.HEAD,
        keep_float32=keep_float32,
        buffers=(*BUFFERS, *llama_like.tower_tensors(towers)),
        rename_stored=_rename if towers else str,
    )


CORRECTION = "*.router.correction"
"""The bias of the experts, which stays in float32: rounding it would change which are selected."""
FAMILIES = {
    "deepseek_v2": _family(DeepseekV2Config, softmax_router),
    "deepseek_v3": _family(
        DeepseekV3Config,
        sigmoid_router,
        keep_float32=(CORRECTION,),
        towers="vision_tower mm_projector",
    ),
    "mistral4": _family(
        Mistral4Config,
        partial(grouped_router, SoftmaxRouter),
        {**llama_like.stacked_experts(STORED_LAYER + "mlp."), **NAMES},
        tempered_attention,
        towers=Ministral3Config.towers,
    ),
    "glm4_moe_lite": _family(Glm4MoeLiteConfig, sigmoid_router, keep_float32=(CORRECTION,)),
    **{
        name: _family(
            config,
            sigmoid_router,
            V32_NAMES,
            indexed_attention,
            # rounding the weights of the indexer would change which keys are selected
            keep_float32=(CORRECTION, "*.selector.weight.weight"),
        )
        for name, config in (("deepseek_v32", DeepseekV32Config), ("glm_moe_dsa", GlmMoeDsaConfig))
    },
    "kimi_linear": Family(
        KimiLinearConfig,
        _build_kimi,
        KIMI_NAMES,
        check=lambda own: _check(own, partial(sigmoid_router, own)),
        prefixes=llama_like.PREFIXES,
        head=llama_like.HEAD,
        keep_float32=(*DECAYS, CORRECTION),
    ),
}
