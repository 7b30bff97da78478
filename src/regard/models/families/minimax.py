"""MiniMax-Text-01: layers of lightning attention, layers of softmax attention, a mixture of experts
in each, and residual connections of weighted normalised states.

Source: MiniMax 2025 (arXiv 2501.08313), section 2; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from regard.configs.base import FULL
from regard.configs.lightning_hybrids import MiniMaxConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import HeadRows, NameTable, as_stored
from regard.models.decoder import Decoder
from regard.nn import Block, MoE, NormedResidual, SoftmaxRouter, variants
from regard.nn.mixer import Mixer
from regard.positions import Rotary

Config = MiniMaxConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    layers = iter(enumerate(config.kinds()))

    def block(rotary: Rotary | None, window: int | None) -> Block:
        layer, kind = next(layers)
        if kind == FULL:
            mixer: Mixer = llama_like.attention(config, rotary, window)
            alpha, beta = config.full_attn_alpha_factor, config.full_attn_beta_factor
        else:
            mixer = variants.lightning(
                config.hidden_size,
                config.num_attention_heads,
                head_dim=config.head_dim,
                layer=layer,
                layers=config.num_hidden_layers,
            )
            alpha, beta = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        return Block(
            mixer,
            _experts(config),
            NormedResidual(llama_like.norm(config), alpha=alpha, beta=beta),
            NormedResidual(
                llama_like.norm(config), alpha=config.mlp_alpha_factor, beta=config.mlp_beta_factor
            ),
        )

    return llama_like.decoder(config, block)


def _experts(config: Config) -> MoE:
    M, n, k = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    router = SoftmaxRouter(M, n, k, normalise=True)
    return llama_like.mixture(M, config.intermediate_size, router)


STORED, MIXER = STORED_LAYER + "self_attn.", MODEL_LAYER + "attention."
QKV = tuple(f"{MIXER}project.{part}.linear.weight" for part in "qkv")
OUTPUT, GATE = MIXER + "output.weight", MIXER + "gate.linear.weight"
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **{
        STORED + f"{part}_proj.weight": as_stored(parameter, unless=GATE)
        for part, parameter in zip("qkvo", (*QKV, OUTPUT), strict=True)
    },
    STORED + "qkv_proj.weight": HeadRows(QKV, MIXER + "project.q", requires=GATE),
    STORED + "output_gate.weight": GATE,
    STORED + "norm.weight": MIXER + "norm.weight",
    STORED + "out_proj.weight": as_stored(OUTPUT, requires=GATE),
    **llama_like.expert_names("block_sparse_moe.experts", "w1", "w3", "w2"),
    STORED_LAYER + "block_sparse_moe.gate.weight": MODEL_LAYER
    + "feed_forward.router.linear.weight",
}
BUFFERS = r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Decays, which follow from the number of the layer."""
FAMILY = llama_like.family(Config, build, NAMES)
FAMILY = replace(FAMILY, buffers=(*FAMILY.buffers, BUFFERS))
