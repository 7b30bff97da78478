"""MiniMax-M2: mixtures of experts whose scores are sigmoids with a correction, rotary positions on
a part of each head, and a norm over all query heads and one over all key heads.

Source: MiniMax 2025, "MiniMax-M2"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from regard.configs.mixtures import MiniMaxM2Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SigmoidRouter
from regard.positions import Rotary

Config = MiniMaxM2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.flat_norm_attention(config, rotary, window)
        router = SigmoidRouter(M, n, k, normalise=True)
        experts = llama_like.mixture(M, config.intermediate_size, router)
        return Block(mixer, experts, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block)


ROUTER = MODEL_LAYER + "feed_forward.router."
NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.FLAT_NORMS
    | llama_like.PRE_NORMS
    | llama_like.expert_names("block_sparse_moe.experts", "w1", "w3", "w2")
    | {
        STORED_LAYER + "block_sparse_moe.gate.weight": ROUTER + "linear.weight",
        STORED_LAYER + "block_sparse_moe.e_score_correction_bias": ROUTER + "correction",
    }
)
FAMILY = replace(llama_like.family(Config, build, NAMES), keep_float32=("*.router.correction",))
