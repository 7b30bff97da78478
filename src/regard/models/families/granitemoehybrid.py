"""Granite 4.0 H: Mamba-2 in most layers and attention without positions in a few, with a SwiGLU or
a mixture of experts, and the factors of Granite 3.

Source: IBM 2025, "Granite 4.0 Language Models"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.state_space_hybrids import GraniteHybridConfig
from regard.models.assembly import granite, llama_like, state_space
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, stacked_rows
from regard.models.decoder import Decoder
from regard.nn import SoftmaxRouter, SwiGLU

Config = GraniteHybridConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    layer = state_space.by_kind(
        config,
        lambda rotary, window: granite.block(
            config, granite.attention(config, rotary, window), feed_forward(config)
        ),
        lambda: granite.block(config, state_space.hybrid_mixer(config), feed_forward(config)),
    )
    return granite.decoder(config, layer)


def feed_forward(config: Config) -> nn.Module:
    """Build a layer for all tokens, beside a mixture of experts if there is one."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    shared = SwiGLU(M, config.shared_intermediate_size)
    if not n:
        return shared
    router = SoftmaxRouter(M, n, k, normalise=True)
    return llama_like.mixture(M, config.intermediate_size, router, shared)


def _shared(stored: str, *parts: str) -> NameTable:
    """Return the entry of a matrix of the layer for all tokens, which is a part of the mixture of
    experts if there is one.
    """
    places = ("feed_forward.", "feed_forward.shared.")
    rules = (stacked_rows(*(f"{MODEL_LAYER}{place}{part}" for part in parts)) for place in places)
    return {f"{STORED_LAYER}shared_mlp.{stored}": tuple(rules)}


NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **state_space.hybrid_names(llama_like.ATTENTION),
    **granite.EXPERTS,
    **_shared("input_linear.weight", "gate.weight", "up.weight"),
    **_shared("output_linear.weight", "down.weight"),
}
FAMILY = state_space.family(Config, build, NAMES)
