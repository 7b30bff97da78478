"""Granite 3 MoE: Granite 3 with a mixture of experts in every layer, whose matrices are stored in
one tensor for all experts.

Source: IBM 2024, "Granite 3.0 Language Models"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.mixtures import GraniteMoeConfig
from regard.models.assembly import granite, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import SoftmaxRouter

Config = GraniteMoeConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    return granite.decoder(
        config,
        lambda: llama_like.mixture(
            M, config.intermediate_size, SoftmaxRouter(M, n, k, normalise=True)
        ),
    )


STORED = STORED_LAYER + "block_sparse_moe."
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.ATTENTION,
    **llama_like.PRE_NORMS,
    STORED + "router.layer.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
    STORED + "input_linear.weight": llama_like.experts_in_one_tensor("gate", "up"),
    STORED + "output_linear.weight": llama_like.experts_in_one_tensor("down"),
}
FAMILY = llama_like.family(Config, build, NAMES)
