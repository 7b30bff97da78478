"""Mixtral: Mistral whose feed-forward layers are mixtures of experts.

Source: Jiang et al. 2024 (arXiv 2401.04088); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import MixtralConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SoftmaxRouter
from regard.positions import Rotary

Config = MixtralConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window)
        router = SoftmaxRouter(M, n, k, normalise=True)
        experts = llama_like.mixture(M, config.intermediate_size, router)
        return Block(mixer, experts, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block)


NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.PRE_NORMS
    | llama_like.expert_names("block_sparse_moe.experts", "w1", "w3", "w2")
    | {
        STORED_LAYER + "block_sparse_moe.gate.weight": MODEL_LAYER
        + "feed_forward.router.linear.weight"
    }
)
FAMILY = llama_like.family(Config, build, NAMES)
