"""MiniMax-Text-01: layers of lightning attention, layers of softmax attention, a mixture of experts
in each, and residual connections of weighted normalized states. Source: MiniMax 2025 (arXiv
2501.08313), section 2.
"""

from __future__ import annotations

from regard.configs.base import FULL
from regard.configs.minimax import MiniMaxConfig
from regard.configs.mistral import MIXTRAL_EXPERTS
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import HeadRows, NameTable, as_stored
from regard.nn import Block, NormedResidual, variants
from regard.nn.mixer import Mixer
from regard.positions import Rotary


def _layer(config: MiniMaxConfig, layer: int, rotary: Rotary | None, window: int | None) -> Block:
    if config.kinds()[layer] == FULL:
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
        llama_like.feed_forward(config),
        NormedResidual(llama_like.norm(config), alpha=alpha, beta=beta),
        NormedResidual(
            llama_like.norm(config), alpha=config.mlp_alpha_factor, beta=config.mlp_beta_factor
        ),
    )


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
    **llama_like.expert_names(MIXTRAL_EXPERTS),
}
BUFFERS = r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Decays, which follow from the number of the layer."""
FAMILIES = {
    "minimax": llama_like.family(
        MiniMaxConfig, _layer, NAMES, buffers=(*llama_like.BUFFERS, BUFFERS)
    )
}
