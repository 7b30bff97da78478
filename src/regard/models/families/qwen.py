"""Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet, then one of attention with an output
gate, and dense feed-forward layers, or mixtures of experts with one for all tokens behind a gate.
Source: Qwen Team 2025, "Qwen3-Next"; Qwen Team 2026, "Qwen3.5"; Yang et al. 2024 (arXiv
2412.06464); Qiu et al. 2025 (arXiv 2505.06708).
"""

from __future__ import annotations

from regard.configs.qwen import (
    SHARING_EXPERTS,
    Qwen3NextConfig,
    Qwen35Config,
    Qwen35MoeConfig,
    QwenHybridConfig,
)
from regard.models.assembly import gated_delta, llama_like
from regard.models.assembly.gated_delta import DECAY, GATE, MIXER, QKV, STORED_DELTA, STRENGTH
from regard.models.assembly.llama_like import STORED_LAYER
from regard.models.checkpoint.family import (
    Family,
    HeadRows,
    NameTable,
    as_stored,
    stacked_rows,
)
from regard.nn import Attention, Block, HeadProjection
from regard.nn.projections.steps import GatedProjection
from regard.positions import Rotary


def _layer(config: QwenHybridConfig, layer: int, rotary: Rotary | None, _: int | None) -> Block:
    mixer = gated_delta.delta_net(config) if rotary is None else _attention(config, rotary)
    return llama_like.block(config, mixer, llama_like.feed_forward(config, layer))


def _attention(config: QwenHybridConfig, rotary: Rotary) -> Attention:
    """Build attention with an output gate."""
    plain = llama_like.attention(config, rotary)
    gate = HeadProjection(config.hidden_size, config.num_attention_heads, config.head_dim)
    return Attention(GatedProjection(plain.project, gate), plain.output, mask=plain.mask)


ATTENTION: NameTable = {
    STORED_LAYER + "self_attn.q_proj.weight": HeadRows(
        (MIXER + "project.project.q.linear.weight", MIXER + "project.gate.linear.weight"),
        MIXER + "project.project.q",
    ),
    STORED_LAYER + "self_attn.k_proj.weight": MIXER + "project.project.k.linear.weight",
    STORED_LAYER + "self_attn.v_proj.weight": MIXER + "project.project.v.linear.weight",
    STORED_LAYER + "self_attn.q_norm.weight": MIXER + "project.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MIXER + "project.project.k.steps.0.weight",
    STORED_LAYER + "self_attn.o_proj.weight": as_stored(
        MIXER + "output.weight", requires=MIXER + "project.gate.linear.weight"
    ),
}
"""The matrix of the queries also has the rows of the gate, head by head."""
DELTA: NameTable = {
    STORED_DELTA + "conv1d.weight": gated_delta.filters(MIXER + "project.convolution.weight"),
    STORED_DELTA + "A_log": MIXER + "rule.decay.A_log",
    STORED_DELTA + "dt_bias": MIXER + "rule.decay.dt_bias",
    STORED_DELTA + "norm.weight": MIXER + "norm.weight",
    STORED_DELTA + "out_proj.weight": as_stored(MIXER + "output.weight", requires=STRENGTH),
}
"""What Qwen3-Next and Qwen3.5 store alike of a layer of Gated DeltaNet."""
FUSED_EXPERTS: NameTable = {
    STORED_LAYER + "mlp.experts.gate_up_proj": llama_like.experts_in_one_tensor("gate", "up"),
    STORED_LAYER + "mlp.experts.down_proj": llama_like.experts_in_one_tensor("down"),
}
"""Further names of experts, with all matrices in one tensor, as in Qwen3.5."""
SEPARATE_MAPS: NameTable = {
    STORED_DELTA + "in_proj_qkv.weight": stacked_rows(*QKV),
    STORED_DELTA + "in_proj_z.weight": GATE,
    STORED_DELTA + "in_proj_b.weight": STRENGTH,
    STORED_DELTA + "in_proj_a.weight": DECAY,
}
"""The maps of Gated DeltaNet as Qwen3.5 stores them."""
PARTS: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **ATTENTION,
    **DELTA,
}
"""Everything but the maps of Gated DeltaNet and the feed-forward layers."""
KEYS = MIXER + "project.k"
JOINED_MAPS: NameTable = {
    STORED_DELTA + "in_proj_qkvz.weight": HeadRows((*QKV, GATE), KEYS),
    STORED_DELTA + "in_proj_ba.weight": HeadRows((STRENGTH, DECAY), KEYS),
}
"""The maps of Gated DeltaNet as Qwen3-Next stores them: key head by key head."""
EXPERTS = llama_like.expert_names(SHARING_EXPERTS)


def _family(config: type[QwenHybridConfig], names: NameTable) -> Family:
    """Return a family of these models."""
    return llama_like.family(config, _layer, names, keep_float32=gated_delta.DECAYS)


FAMILIES = {
    "qwen3_next": _family(Qwen3NextConfig, {**PARTS, **EXPERTS, **JOINED_MAPS}),
    "qwen3_5_text": _family(Qwen35Config, {**PARTS, **SEPARATE_MAPS, **llama_like.FEED_FORWARD}),
    "qwen3_5_moe_text": _family(
        Qwen35MoeConfig, {**PARTS, **SEPARATE_MAPS, **EXPERTS, **FUSED_EXPERTS}
    ),
}
