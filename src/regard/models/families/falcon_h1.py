"""Falcon-H1: attention and Mamba-2 beside each other in every layer, then a SwiGLU; most linear
maps have a factor.

Source: Falcon-LLM Team 2025 (arXiv 2507.22448); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.state_space import step_limits
from regard.configs.state_space_hybrids import FalconH1Config
from regard.models.assembly import llama_like, state_space
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, HeadProjection, PreNorm, Recurrent, SwiGLU
from regard.nn.decay_rules import Mamba2Rule
from regard.nn.linear import scaled_map
from regard.nn.mixer_block import ParallelMixers
from regard.positions import Rotary

Config = FalconH1Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def layer(rotary: Rotary | None, window: int | None) -> Block:
        mixers = ParallelMixers(
            [attention(config, rotary, window), state_space_mixer(config)],
            in_scales=[config.attention_in_multiplier, config.ssm_in_multiplier],
            out_scales=[config.attention_out_multiplier, config.ssm_out_multiplier],
        )
        residuals = (PreNorm(llama_like.norm(config)) for _ in range(2))
        return Block(mixers, feed_forward(config), *residuals)

    return llama_like.decoder(
        config,
        layer,
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.lm_head_multiplier,
    )


def attention(config: Config, rotary: Rotary | None, window: int | None) -> Attention:
    """Build the attention of a layer; the factor on the keys is one on the scores."""
    bias, output_bias = config.biases
    scale = config.head_dim**-0.5 * config.key_multiplier
    return llama_like.attention(
        config, rotary, window, bias=bias, output_bias=output_bias, scale=scale
    )


def state_space_mixer(config: Config) -> Recurrent:
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


def feed_forward(config: Config) -> SwiGLU:
    """Build a SwiGLU with factors on the results of its gate and of its output."""
    network = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    gate, down = config.mlp_multipliers
    network.gate = scaled_map(network.gate, gate)
    network.down = scaled_map(network.down, down)
    return network


ATTENTION: NameTable = {
    stored: ours.replace("attention.", "attention.mixers.0.")
    for stored, ours in llama_like.ATTENTION.items()
}
NAMES: NameTable = {
    **state_space.NORMS_AND_ENDS,
    **ATTENTION,
    **state_space.names(STORED_LAYER + "mamba.", MODEL_LAYER + "attention.mixers.1."),
    **state_space.FEED_FORWARD,
}
FAMILY = state_space.family(Config, build, NAMES)
