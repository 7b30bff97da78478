"""Qwen1.5-MoE and Qwen2-57B: Qwen 2 with a mixture of experts in every layer, and an expert for all
tokens behind a gate.

Source: Yang et al. 2024 (arXiv 2407.10671), section 2.2.2; key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from regard.configs.mixtures import Qwen2MoeConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SoftmaxRouter, SwiGLU
from regard.nn.feed_forward import GatedSharedExpert
from regard.positions import Rotary

Config = Qwen2MoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_experts, config.num_experts_per_tok

    def block(rotary: Rotary | None, window: int | None) -> Block:
        mixer = llama_like.attention(config, rotary, window, bias=True)
        router = SoftmaxRouter(M, n, k, normalise=config.norm_topk_prob)
        shared = GatedSharedExpert(M, SwiGLU(M, config.shared_expert_intermediate_size))
        experts = llama_like.mixture(M, config.moe_intermediate_size, router, shared)
        return Block(mixer, experts, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block)


SHARED = MODEL_LAYER + "feed_forward.shared."
NAMES = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.PRE_NORMS
    | llama_like.EXPERTS
    | {
        STORED_LAYER + f"mlp.shared_expert.{part}_proj.weight": f"{SHARED}expert.{part}.weight"
        for part in ("gate", "up", "down")
    }
    | {STORED_LAYER + "mlp.shared_expert_gate.weight": SHARED + "gate.weight"}
)
FAMILY = llama_like.family(Config, build, NAMES)
