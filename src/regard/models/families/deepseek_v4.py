"""DeepSeek-V4: attention to compressed tokens beside a window, several residual streams
(hyper-connections), and experts that the first layers choose by token ids.

Source: DeepSeek-AI 2026 (DeepSeek-V4), and its code in transformers.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from regard.configs.base import SLIDING
from regard.configs.deepseek_v4 import CSA, HASHED, DeepseekV4Config
from regard.masks import Causal, Window
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family, NameTable, stacked_rows
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    BlockPooling,
    ClippedSwiGLU,
    CompressedAttention,
    EntryIndexer,
    FinishedProjection,
    HeadProjection,
    InverseRotary,
    MoE,
    RMSNorm,
    SharedKeyValue,
    SigmoidRouter,
    WeightlessRMSNorm,
)
from regard.nn.blocks.blocks import TokenIdBlock
from regard.nn.blocks.residual_streams import HyperConnection, StreamsEmbedding, StreamsMerge
from regard.nn.blocks.routers import HashRouter, Router
from regard.nn.projections.factored import GroupedOutput
from regard.nn.projections.latent import LowRankProjection
from regard.nn.weights import Linear
from regard.positions import TrailingRotary


def _build(config: DeepseekV4Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, eps = config.hidden_size, config.hc_mult, config.rms_norm_eps
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)
    layers: list[Block] = []
    for i, kind in enumerate(config.layer_types):
        residuals = (
            HyperConnection(
                RMSNorm(M, eps=eps),
                M,
                n,
                iterations=config.hc_sinkhorn_iters,
                eps=config.hc_eps,
                norm_eps=eps,
            )
            for _ in range(2)
        )
        hashed = config.mlp_layer_types[i] == HASHED
        block = TokenIdBlock if hashed else Block
        layers.append(block(_attention(config, kind), _experts(config, hashed=hashed), *residuals))
    merge = StreamsMerge(RMSNorm(M, eps=eps), M, n, eps=config.hc_eps, norm_eps=eps)
    return initialize_weights(Decoder(StreamsEmbedding(embedding, n), layers, merge, head))


def _attention(config: DeepseekV4Config, kind: str) -> Attention:
    """Build the attention of a layer: to a window alone, or also to entries."""
    M, D, H = config.hidden_size, config.head_dim, config.num_attention_heads
    eps, rank = config.rms_norm_eps, config.q_lora_rank
    turned = building_blocks.rotary_module(config.rope(kind))
    rotary = TrailingRotary(turned)
    up = HeadProjection(rank, H, D, WeightlessRMSNorm(eps=eps), rotary)
    q = LowRankProjection(M, rank, up, eps=eps)
    kv = HeadProjection(M, 1, D, RMSNorm(D, eps=eps), rotary)
    project = FinishedProjection(SharedKeyValue(q, kv), InverseRotary(turned))
    output = GroupedOutput(H * D, M, config.o_groups, config.o_lora_rank)
    sink = nn.Parameter(torch.zeros(H))
    if kind == SLIDING:
        mask = Causal() & Window(config.sliding_window)
        return Attention(project, output, mask=mask, sink=sink)
    m, indexer = config.block(kind), None

    def pooling(width: int) -> BlockPooling:
        return BlockPooling(M, width, m, RMSNorm(width, eps=eps), rotary, overlap=kind == CSA)

    if kind == CSA:
        J, d = config.index_n_heads, config.index_head_dim
        indexer = EntryIndexer(
            HeadProjection(rank, J, d, rotary),
            pooling(d),
            Linear(M, J, bias=False),
            topk=config.index_topk,
            latent=q,
        )
    return CompressedAttention(
        project, pooling(D), output, window=config.sliding_window, indexer=indexer, sink=sink
    )


def _experts(config: DeepseekV4Config, *, hashed: bool) -> MoE:
    """Build the mixture of experts of a layer, with one expert for all tokens."""
    M, width = config.hidden_size, config.moe_intermediate_size
    options: Any = {"limit": config.swiglu_limit, "alpha": 1.0, "offset": 0.0}
    network = partial(ClippedSwiGLU, M, width, bias=False, **options)
    experts = [network() for _ in range(config.n_routed_experts)]
    return MoE(_router(config, hashed=hashed), experts, network())


def _router(config: DeepseekV4Config, *, hashed: bool) -> Router:
    sizes = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
    scale = config.routed_scaling_factor
    if hashed:
        return HashRouter(
            *sizes,
            vocabulary=config.vocab_size,
            normalize=True,
            scale=scale,
            scoring="sqrtsoftplus",
        )
    return SigmoidRouter(*sizes, normalize=True, scale=scale, scoring="sqrtsoftplus")


def _check(config: DeepseekV4Config) -> None:
    """Check the numbers of both rotary settings."""
    for kind in (SLIDING, CSA):
        building_blocks.rotary_module(config.rope(kind))


LAYER, MIXER = "layers.{}.", "layers.{}.attention."
EXPERTS = LAYER + "feed_forward."
ATTENTION = {
    "attn_sink": "sink",
    "wq_a.weight": "project.project.q.down.weight",
    "q_norm.weight": "project.project.q.norm.weight",
    "wq_b.weight": "project.project.q.up.linear.weight",
    "wkv.weight": "project.project.kv.linear.weight",
    "kv_norm.weight": "project.project.kv.steps.0.weight",
    "wo_b.weight": "output.down.weight",
    "indexer.wq_b.weight": "indexer.q.linear.weight",
    "indexer.weights_proj.weight": "indexer.weight.weight",
    **{
        f"{theirs}compressor.{name}": f"{ours}pooling.{part}"
        for theirs, ours in (("", ""), ("indexer.", "indexer."))
        for name, part in {
            "wkv.weight": "content.weight",
            "wgate.weight": "gate.weight",
            "ape": "places",
            "norm.weight": "steps.0.weight",
        }.items()
    },
}
"""Name of a part of the attention in the makers' files -> its name in the network."""
NETWORK = {"w1": "gate", "w2": "down", "w3": "up"}
STREAMS = {"fn": "linear.weight", "base": "base", "scale": "scale"}
NAMES: NameTable = {
    "embed.weight": "embed.embedding.weight",
    "norm.weight": "norm.norm.weight",
    "head.weight": "head.weight",
    **{f"hc_head_{name}": f"norm.mixes.{part}" for name, part in STREAMS.items()},
    **{
        f"{LAYER}hc_{theirs}_{name}": f"{LAYER}{ours}_residual.mixes.{part}"
        for theirs, ours in (("attn", "attention"), ("ffn", "feed_forward"))
        for name, part in STREAMS.items()
    },
    LAYER + "attn_norm.weight": LAYER + "attention_residual.norm.weight",
    LAYER + "ffn_norm.weight": LAYER + "feed_forward_residual.norm.weight",
    **{f"{LAYER}attn.{theirs}": MIXER + ours for theirs, ours in ATTENTION.items()},
    LAYER + "attn.wo_a.weight": stacked_rows(MIXER + "output.groups.*.weight"),
    LAYER + "ffn.gate.weight": EXPERTS + "router.linear.weight",
    LAYER + "ffn.gate.bias": EXPERTS + "router.correction",
    LAYER + "ffn.gate.tid2eid": EXPERTS + "router.table",
    **{
        f"{LAYER}ffn.{theirs}.{w}.weight": f"{EXPERTS}{ours}.{part}.weight"
        for theirs, ours in (("experts.{}", "experts.{}"), ("shared_experts", "shared"))
        for w, part in NETWORK.items()
    },
}
"""Stored name -> parameter name; the first {} is the layer, a second one the expert."""
SPELLINGS = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.position_bias$", ".ape"),
    (r"\.([qo])_([ab])_proj\.", r".w\1_\2."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.kv_proj\.", ".wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)
"""Pattern of a name in transformers -> the spelling of the makers, one after the other."""


def makers_name(name: str) -> str:
    """Return the makers' spelling of a stored name that transformers wrote."""
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return name


FAMILIES = {
    "deepseek_v4": Family(
        DeepseekV4Config,
        _build,
        NAMES,
        # the head is tied where the key says it
        complete_config=lambda config, raw, stored: config,
        buffers=(r"mtp\..*",),  # the layers that predict a second token
        rename_stored=makers_name,
        keep_float32=("*.mixes.*", "*.sink", "*.places", "*.correction", "*norm.weight"),
        keep_int64=("*.router.table",),
        check=_check,
    )
}
