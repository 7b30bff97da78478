"""Qwen 3 with a mixture of experts in every layer.

Source: Yang et al. 2025 (arXiv 2505.09388), section 2; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Qwen3MoeConfig
from regard.models.assembly import llama_like
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SoftmaxRouter
from regard.positions import Rotary

Config = Qwen3MoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_experts, config.num_experts_per_tok

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.head_norm_attention(config, rotary, window)
        router = SoftmaxRouter(M, n, k, normalise=config.norm_topk_prob)
        experts = llama_like.mixture(M, config.moe_intermediate_size, router)
        return Block(mixer, experts, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block)


NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.HEAD_NORMS
    | llama_like.PRE_NORMS
    | llama_like.EXPERTS
)
FAMILY = llama_like.family(Config, build, NAMES)
