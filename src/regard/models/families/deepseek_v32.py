"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads only the keys that a lightning indexer selects.

The released code turns the index queries and keys by a Hadamard matrix and rounds them to 8 bits.
The turn changes no score; the rounding is not done here.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from regard.configs.deepseek import DeepseekV32Config
from regard.models.assembly import building_blocks, deepseek, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import Family, NameTable
from regard.models.decoder import Decoder
from regard.nn import HeadProjection
from regard.nn.latent_projection import LatentProjection, LowRankProjection
from regard.nn.linear import Linear
from regard.nn.selected_attention import IndexedLatentAttention, LatentIndexer
from regard.positions import Rotary

Config = DeepseekV32Config


def attention(
    config: Config, project: LatentProjection, output: nn.Module
) -> IndexedLatentAttention:
    """Build latent attention with its indexer, whose rotary pairs are in two halves."""
    M, J, d = config.hidden_size, config.index_n_heads, config.index_head_dim
    latent = project.q
    assert isinstance(latent, LowRankProjection), "the config refuses q_lora_rank null"
    of_attention = building_blocks.rotary_module(config.rope)
    rotary = Rotary(
        d, config.rope_theta, scaling=of_attention.scaling, rotary_dim=config.qk_rope_head_dim
    )
    selector = LatentIndexer(
        HeadProjection(latent.down.out_features, J, d, rotary),
        HeadProjection(M, 1, d, rotary, flat=nn.LayerNorm(d, eps=1e-6)),
        Linear(M, J, bias=False),
        latent,
        topk=config.index_topk,
    )
    return IndexedLatentAttention(project, selector, output, scale=project.scale)


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    router = partial(deepseek.sigmoid_router, config)
    return deepseek.decoder(config, router, partial(attention, config))


INDEXER, SELECTOR = STORED_LAYER + "self_attn.indexer.", MODEL_LAYER + "attention.selector."
NAMES: NameTable = {
    **deepseek.NAMES,
    INDEXER + "wq_b.weight": SELECTOR + "q.linear.weight",
    INDEXER + "wk.weight": SELECTOR + "k.linear.weight",
    INDEXER + "k_norm.weight": SELECTOR + "k.flat.weight",
    INDEXER + "k_norm.bias": SELECTOR + "k.flat.bias",
    INDEXER + "weights_proj.weight": SELECTOR + "weight.weight",
}
"""Stored name -> parameter name, as in `deepseek.NAMES`."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    check=lambda config: deepseek.check(config, partial(deepseek.sigmoid_router, config)),
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    buffers=deepseek.BUFFERS,
    # rounding the bias would change which experts are selected, and the weights which keys
    keep_float32=("*.router.correction", "*.selector.weight.weight"),
)
