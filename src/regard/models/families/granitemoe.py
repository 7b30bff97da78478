"""Granite 3 MoE: Granite 3 with a mixture of experts in every layer, whose matrices are stored in
one tensor for all experts.

Source: IBM 2024, "Granite 3.0 Language Models"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.mixtures import GraniteMoeConfig
from regard.models.assembly import granite, llama_like
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Block, SoftmaxRouter
from regard.positions import Rotary

Config = GraniteMoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok

    def layer(rotary: Rotary | None, window: int | None) -> Block:
        router = SoftmaxRouter(M, n, k, normalise=True)
        experts = llama_like.mixture(M, config.intermediate_size, router)
        return granite.block(config, granite.attention(config, rotary, window), experts)

    return granite.decoder(config, layer)


NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.ATTENTION,
    **llama_like.PRE_NORMS,
    **granite.EXPERTS,
}
FAMILY = llama_like.family(Config, build, NAMES)
