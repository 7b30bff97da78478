"""Granite 3 MoE, Granite 4.0 H and Bamba: Granite 3 with mixtures of experts whose matrices are
stored in one tensor for all experts, and models with Mamba-2 in most layers and attention in a few.
Source: IBM 2024, "Granite 3.0 Language Models"; IBM 2025, "Granite 4.0 Language Models"; IBM,
Princeton, CMU and UIUC 2024, "Bamba".
"""

from __future__ import annotations

from torch import nn

from regard.configs.granite import BambaConfig, GraniteHybridConfig, GraniteMoeConfig
from regard.models.assembly import llama_like, state_space
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, stacked_rows
from regard.nn import Block, SoftmaxRouter, SwiGLU
from regard.positions import Rotary


def _bamba_layer(
    config: BambaConfig, layer: int, rotary: Rotary | None, window: int | None
) -> Block:
    mixer = state_space.mixer_of(config, layer, rotary, window)
    return llama_like.block(config, mixer, llama_like.feed_forward(config))


def _granite_layer(
    config: GraniteHybridConfig, layer: int, rotary: Rotary | None, window: int | None
) -> Block:
    mixer = state_space.mixer_of(config, layer, rotary, window)
    return llama_like.block(config, mixer, _feed_forward(config))


def _feed_forward(config: GraniteHybridConfig) -> nn.Module:
    """Build a layer for all tokens, beside a mixture of experts if there is one."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    shared = SwiGLU(M, config.shared_intermediate_size)
    if not n:
        return shared
    router = SoftmaxRouter(M, n, k, normalize=True)
    return llama_like.mixture(M, config.intermediate_size, router, shared)


def _shared(stored: str, *parts: str) -> NameTable:
    """Return the entry of the matrix for all tokens, in a mixture of experts if there is one."""
    places = ("feed_forward.", "feed_forward.shared.")
    rules = (stacked_rows(*(f"{MODEL_LAYER}{place}{part}" for part in parts)) for place in places)
    return {f"{STORED_LAYER}shared_mlp.{stored}": tuple(rules)}


STORED = STORED_LAYER + "block_sparse_moe."
EXPERTS: NameTable = {
    STORED + "router.layer.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
    STORED + "input_linear.weight": llama_like.experts_in_one_tensor("gate", "up"),
    STORED + "output_linear.weight": llama_like.experts_in_one_tensor("down"),
}
"""The router of a mixture, and the matrices of all its experts."""
FAMILIES = {
    "bamba": state_space.family(
        BambaConfig,
        _bamba_layer,
        {
            **state_space.NORMS_AND_ENDS,
            **state_space.hybrid_names(llama_like.ATTENTION),
            **state_space.FEED_FORWARD,
        },
    ),
    "granitemoe": llama_like.family(
        GraniteMoeConfig,
        names={
            **llama_like.EMBEDDING_AND_HEAD,
            **llama_like.ATTENTION,
            **llama_like.PRE_NORMS,
            **EXPERTS,
        },
    ),
    "granitemoehybrid": state_space.family(
        GraniteHybridConfig,
        _granite_layer,
        {
            **llama_like.EMBEDDING_AND_HEAD,
            **llama_like.PRE_NORMS,
            **state_space.hybrid_names(llama_like.ATTENTION),
            **EXPERTS,
            **_shared("input_linear.weight", "gate.weight", "up.weight"),
            **_shared("output_linear.weight", "down.weight"),
        },
    ),
}
