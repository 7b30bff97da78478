"""Phi-3.5-MoE: pre-norm blocks with LayerNorms, and mixtures of two experts for each token, which
SparseMixer chooses.

Source: Abdin et al. 2024 (arXiv 2404.14219), section 2; Liu et al. 2024 (arXiv 2409.12136); key
names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.phimoe import PhimoeConfig
from regard.models.assembly import layer_norm_decoder, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm
from regard.nn.linear import Linear
from regard.nn.routers import SparseMixerRouter
from regard.positions import Rotary

Config = PhimoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, bias = config.hidden_size, config.attention_bias

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=bias, output_bias=bias)
        router = SparseMixerRouter(
            M, config.num_local_experts, tolerance=config.router_jitter_noise
        )
        experts = llama_like.mixture(M, config.intermediate_size, router)
        return Block(mixer, experts, *(PreNorm(layer_norm_decoder.norm(config)) for _ in range(2)))

    decoder = llama_like.decoder(config, block, final_norm=layer_norm_decoder.norm(config))
    if config.lm_head_bias:
        head = Linear(M, config.vocab_size)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        if config.tie_word_embeddings:
            head.weight = decoder.embed.embedding.weight
        decoder.head = head
    return decoder


NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | layer_norm_decoder.PRE_NORMS
    | llama_like.expert_names("block_sparse_moe.experts", "w1", "w3", "w2")
    | {
        "lm_head.bias": "head.bias",
        STORED_LAYER + "block_sparse_moe.gate.weight": MODEL_LAYER
        + "feed_forward.router.linear.weight",
    }
)
FAMILY = llama_like.family(Config, build, NAMES)
