"""Falcon, with attention and feed-forward in parallel, and Falcon-H1, with attention and Mamba-2
beside each other. Source: Almazrouei et al. 2023 (arXiv 2311.16867); Falcon-LLM Team 2025 (arXiv
2507.22448).
"""

from __future__ import annotations

from regard.configs.falcon import FalconConfig, FalconH1Config
from regard.configs.hybrid import step_limits
from regard.models.assembly import layer_norm, llama_like, state_space
from regard.models.checkpoint.family import (
    NameTable,
    TensorRule,
    as_stored,
    weight_and_bias,
    weights_and_biases,
)
from regard.nn import Block, HeadProjection, Recurrent, SwiGLU
from regard.nn.blocks.mixer_block import ParallelMixers
from regard.nn.recurrence.decays import Mamba2Rule
from regard.nn.weights import scaled_map
from regard.positions import Rotary

STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
PARTS = {
    "self_attention.query_key_value": "attention.project.linear",
    "self_attention.dense": "attention.output",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NAMES: dict[str, str | TensorRule] = {
    "transformer.word_embeddings.weight": "embed.embedding.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(PARTS, STORED_LAYER, MODEL_LAYER),
}
FIRST, SECOND = (MODEL_LAYER + f"{part}_residual.norm." for part in ("attention", "feed_forward"))
for end in ("weight", "bias"):
    NAMES |= {
        f"{STORED_LAYER}input_layernorm.{end}": as_stored(FIRST + end, unless=SECOND + end),
        f"{STORED_LAYER}ln_attn.{end}": as_stored(FIRST + end, requires=SECOND + end),
        f"{STORED_LAYER}ln_mlp.{end}": SECOND + end,
    }
"""Stored name -> parameter name; {} is the layer. A shared norm has its own name."""


def _h1_layer(config: FalconH1Config, _: int, rotary: Rotary | None, window: int | None) -> Block:
    mixers = ParallelMixers(
        [llama_like.attention(config, rotary, window), _state_space_mixer(config)],
        in_scales=[config.attention_in_multiplier, config.ssm_in_multiplier],
        out_scales=[config.attention_out_multiplier, config.ssm_out_multiplier],
    )
    return llama_like.block(config, mixers, _feed_forward(config))


def _state_space_mixer(config: FalconH1Config) -> Recurrent:
    """Build the Mamba-2 of a layer, with a factor on each part of its input map."""
    mixer = state_space.mixer(
        config.mixer_sizes(),
        eps=config.rms_norm_eps,
        step_limits=step_limits(config.time_step_limit),
        gate_before_norm=not config.mamba_norm_before_gate,
    )
    # in the order of the stored rows
    parts = ("gate", "project.v", "project.k", "project.q", "rule")
    for name, scale in zip(parts, config.ssm_multipliers, strict=True):
        part = mixer.get_submodule(name)
        assert isinstance(part, (HeadProjection, Mamba2Rule))
        part.linear = scaled_map(part.linear, scale)
    return mixer


def _feed_forward(config: FalconH1Config) -> SwiGLU:
    """Build a SwiGLU with factors on the results of its gate and of its output."""
    network = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    gate, down = config.mlp_multipliers
    network.gate = scaled_map(network.gate, gate)
    network.down = scaled_map(network.down, down)
    return network


H1_ATTENTION: NameTable = {
    stored: ours.replace("attention.", "attention.mixers.0.")
    for stored, ours in llama_like.ATTENTION.items()
}
H1_NAMES: NameTable = {
    **state_space.NORMS_AND_ENDS,
    **H1_ATTENTION,
    **state_space.names(llama_like.STORED_LAYER + "mamba.", MODEL_LAYER + "attention.mixers.1."),
    **state_space.FEED_FORWARD,
}
FAMILIES = {
    "falcon": layer_norm.family(
        FalconConfig,
        NAMES,
        buffers=(r"(transformer\.)?h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    ),
    "falcon_h1": state_space.family(FalconH1Config, _h1_layer, H1_NAMES),
}
