"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention without
positions, and mixtures of experts after the first layers.

Source: Kimi Team 2025 (arXiv 2510.26692); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn

from regard import masks
from regard.configs.base import FULL
from regard.configs.kimi_linear import KimiLinearConfig
from regard.models.assembly import deepseek, llama_like
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.assembly.gated_delta import DECAYS, filters
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import Family, NameTable, TensorRule
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    ConvolvedQKV,
    ExpertGroups,
    HeadProjection,
    InputEmbedding,
    LatentProjection,
    PreNorm,
    Recurrent,
    RMSNorm,
    SigmoidRouter,
    SwiGLU,
)
from regard.nn.delta_rules import BottleneckProjection, ChannelLogDecay, DeltaRule
from regard.nn.linear import Linear
from regard.nn.mixer import Mixer
from regard.nn.norms import L2Norm
from regard.nn.recurrent_projections import CausalConvolution, JoinedConvolution
from regard.positions import Rotary

Config = KimiLinearConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    layers = []
    for layer, kind in enumerate(config.kinds()):
        mixer: Mixer = latent_attention(config) if kind == FULL else delta_attention(config)
        norms = (PreNorm(_norm(config)) for _ in range(2))
        layers.append(Block(mixer, _feed_forward(config, layer), *norms))
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, _norm(config), head))


def latent_attention(config: Config) -> Attention:
    """Build latent attention; no dim of the keys is rotated."""
    M, H, E = config.hidden_size, config.num_attention_heads, config.v_head_dim
    project = LatentProjection(
        M,
        H,
        Rotary(config.qk_rope_head_dim, rotary_dim=0),
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        value_dim=E,
        q_rank=config.q_lora_rank,
        bias=config.attention_bias,
    )
    output = Linear(H * E, M, bias=config.attention_bias)
    return Attention(project, output, mask=masks.Causal(), scale=project.scale)


def delta_attention(config: Config) -> Recurrent:
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


def _feed_forward(config: Config, layer: int) -> nn.Module:
    M, hidden = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        return SwiGLU(M, config.intermediate_size)
    shared = SwiGLU(M, hidden * config.num_shared_experts)
    return llama_like.mixture(M, hidden, _router(config), shared)


def _router(config: Config) -> SigmoidRouter:
    n = config.num_expert_group
    return SigmoidRouter(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_token,
        normalise=config.moe_renormalize,
        groups=None if n == 1 else ExpertGroups(n, config.topk_group, 2),
        scale=config.routed_scaling_factor,
    )


def _norm(config: Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def check(config: Config) -> None:
    """Check the sizes of the router."""
    with torch.device("meta"):  # only sizes are checked, and nothing is allocated
        _router(config)


def reshaped(parameter_name: str, *sizes: int) -> TensorRule:
    """Return the rule of a parameter that is stored with other sizes, one of which may be -1.

    >>> reshaped("w", 1, -1).pack([torch.zeros(2, 3)]).shape
    torch.Size([1, 6])
    """
    return TensorRule(
        (parameter_name,),
        lambda stored, own: (stored.reshape(own[0]),),
        lambda parts: parts[0].reshape(sizes),
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
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **deepseek.LATENT_ATTENTION,
    **DELTA,
    **llama_like.FEED_FORWARD,
    # transformers writes a dense layer under the name of the experts
    **{
        EXPERTS + f"{part}_proj.weight": f"{FEED_FORWARD}{part}.weight"
        for part in ("gate", "up", "down")
    },
    **llama_like.expert_names("block_sparse_moe.experts", "w1", "w3", "w2"),
    EXPERTS + "gate.weight": FEED_FORWARD + "router.linear.weight",
    EXPERTS + "gate.e_score_correction_bias": FEED_FORWARD + "router.correction",
    **{
        EXPERTS + f"shared_experts.{part}_proj.weight": f"{FEED_FORWARD}shared.{part}.weight"
        for part in ("gate", "up", "down")
    },
}
FAMILY = Family(
    Config,
    build,
    NAMES,
    check=check,
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    keep_float32=(*DECAYS, "*.router.correction"),
)
