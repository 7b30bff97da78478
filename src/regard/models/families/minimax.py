"""MiniMax-Text-01: layers of lightning attention, layers of softmax attention, a mixture of experts
in each, and residual connections of weighted normalized states; MiniMax-M3: layers that attend to
the blocks of keys which index heads choose. Source: MiniMax 2025 (arXiv 2501.08313), section 2;
MiniMax 2026 (MiniMax-M3), and its code in transformers.
"""

from __future__ import annotations

import re

from regard.configs.base import FULL
from regard.configs.minimax import MiniMaxConfig, MiniMaxM3Config
from regard.configs.mistral import MIXTRAL_EXPERTS
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import HeadRows, NameTable, as_stored, stacked_rows
from regard.nn import Block, HeadProjection, NormedResidual, SelectedAttention, variants
from regard.nn.attention.selected import BlockMaximum
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


def _indexed_layer(
    config: MiniMaxM3Config, layer: int, rotary: Rotary | None, window: int | None
) -> Block:
    """Build a layer of MiniMax-M3, whose index heads rotate as many dims as the attention."""
    plain = llama_like.attention(config, rotary, window)
    mixer: Mixer = plain
    if config.kinds()[layer] != FULL:
        M, J, d = config.hidden_size, config.index_n_heads, config.index_head_dim
        share = config.head_dim * config.partial_rotary_factor / d
        turned = building_blocks.rotary_module(config.rope._replace(head_dim=d, partial=share))
        q, k = (HeadProjection(M, heads, d, llama_like.norm(config, d), turned) for heads in (J, 1))
        blocks = BlockMaximum(
            q,
            k,
            heads=config.num_attention_heads,
            size=config.index_block_size,
            topk=config.index_topk_blocks,
            local=config.index_local_blocks,
        )
        mixer = SelectedAttention(plain.project, blocks, plain.output)
    return llama_like.block(config, mixer, llama_like.feed_forward(config, layer))


NETWORK = MODEL_LAYER + "feed_forward."
M3_NAMES: NameTable = {
    # what is written has these names, and what is read the makers' ones of single maps, too
    **{
        f"{STORED_LAYER}mlp.{theirs}gate_up_proj.weight": stacked_rows(
            *(f"{NETWORK}{ours}{part}.weight" for part in ("gate", "up"))
        )
        for theirs, ours in (("", ""), ("shared_experts.", "shared."))
    },
    **llama_like.stacked_experts(STORED_LAYER + "mlp."),
    **llama_like.recipe_names(MiniMaxM3Config.recipe),
    **{
        f"{STORED}indexer.{part}_{theirs}.weight": f"{MIXER}selector.{part}.{ours}.weight"
        for part in "qk"
        for theirs, ours in (("proj", "linear"), ("norm", "steps.0"))
    },
}
"""Stored name, as `_m3_name` spells it -> parameter name."""
M3_SPELLINGS = (
    (r"\.self_attn\.index_([qk])_", r".self_attn.indexer.\1_"),
    (r"\.block_sparse_moe\.e_score", ".mlp.gate.e_score"),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
"""Pattern of a name of the makers -> its spelling in transformers, one after the other."""


def _m3_name(name: str) -> str:
    """Return transformers' spelling of a stored name of the language model."""
    name = llama_like.rename_language_model(name)
    for pattern, spelling in M3_SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return name


FAMILIES = {
    "minimax": llama_like.family(
        MiniMaxConfig, _layer, NAMES, buffers=(*llama_like.BUFFERS, BUFFERS)
    ),
    "minimax_m3_vl_text": llama_like.family(
        MiniMaxM3Config, _indexed_layer, M3_NAMES, rename_stored=_m3_name
    ),
}
