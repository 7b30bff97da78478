"""Phi 3, 3.5 and 4-mini: Llama with fused stored matrices: queries, keys and values in one, gate
and up projection in another.

Source: Abdin et al. 2024 (arXiv 2404.14219); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.llama import Phi3Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, stacked_rows
from regard.models.decoder import Decoder

Config = Phi3Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.pre_norm_decoder(config)


IN = MODEL_LAYER + "attention.project."
FUSED: NameTable = {
    STORED_LAYER + "self_attn.qkv_proj.weight": stacked_rows(
        *(f"{IN}{part}.linear.weight" for part in "qkv")
    ),
    STORED_LAYER + "self_attn.o_proj.weight": MODEL_LAYER + "attention.output.weight",
    STORED_LAYER + "mlp.gate_up_proj.weight": stacked_rows(
        MODEL_LAYER + "feed_forward.gate.weight", MODEL_LAYER + "feed_forward.up.weight"
    ),
    STORED_LAYER + "mlp.down_proj.weight": MODEL_LAYER + "feed_forward.down.weight",
}
FAMILY = llama_like.family(
    Config, build, {**llama_like.EMBEDDING_AND_HEAD, **llama_like.PRE_NORMS, **FUSED}
)
