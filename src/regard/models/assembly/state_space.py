"""Layers of Mamba-2, as several families have them: the module, its checkpoint names, and those of
decoders that mix such layers with attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from regard import masks
from regard.configs.base import FULL
from regard.configs.granite import BambaConfig, GraniteHybridConfig
from regard.configs.hybrid import Mamba2Keys, Mamba2Sizes, step_limits
from regard.configs.mamba import Mamba2Config, MambaConfig, PositionlessConfig
from regard.configs.rotary_decoder import RotaryDecoderConfig
from regard.models.assembly import llama_like
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.assembly.gated_delta import filters
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import (
    Family,
    NameEntry,
    NameTable,
    only,
    stacked_rows,
)
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    CausalConvolution,
    ConvolvedQKV,
    HeadProjection,
    InputEmbedding,
    Recurrent,
    SeparateQKV,
)
from regard.nn.blocks.norms import JoinedHeadsRMSNorm
from regard.nn.mixer import Mixer
from regard.nn.recurrence.decays import Mamba2Rule
from regard.nn.weights import Linear
from regard.positions import Rotary

Mamba2Hybrid: TypeAlias = BambaConfig | GraniteHybridConfig
FLOAT32 = ("*.rule.A_log", "*.rule.dt_bias", "*.rule.skip")
"""Parameters that stay in float32 or better: errors of decays grow with the tokens."""


def mixer(
    sizes: Mamba2Sizes,
    *,
    eps: float,
    step_limits: tuple[float, float] = (0.0, math.inf),
    gate_before_norm: bool = True,
) -> Recurrent:
    """Build a layer of Mamba-2 with initial weights."""
    M, N, E = sizes.dim, sizes.heads, sizes.head_dim
    q, k = (HeadProjection(M, sizes.groups, sizes.state, bias=sizes.bias) for _ in "qk")
    v, gate = (HeadProjection(M, N, E, bias=sizes.bias) for _ in "vg")
    channels = N * E + 2 * sizes.groups * sizes.state
    convolution = CausalConvolution(channels, sizes.kernel, bias=sizes.conv_bias)
    norm = JoinedHeadsRMSNorm(N, E, groups=sizes.groups, eps=eps) if sizes.normed else None
    return Recurrent(
        ConvolvedQKV(q, k, v, convolution, order="vkq"),
        Mamba2Rule(M, N, bias=sizes.bias, step_limits=step_limits),
        Linear(N * E, M, bias=sizes.output_bias),
        norm=norm,
        gate=gate,
        gate_before_norm=gate_before_norm,
    )


def decoder(
    config: MambaConfig | Mamba2Config | PositionlessConfig,
    layers: Sequence[Block],
    last: nn.Module,
) -> Decoder:
    """Build a decoder without positions, with initial weights."""
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, last, head))


def attention(config: PositionlessConfig) -> Attention:
    """Build causal attention without positions."""
    M, H, D = config.hidden_size, config.num_attention_heads, config.attention_head_dim
    counts = (H, config.num_key_value_heads, config.num_key_value_heads)
    project = SeparateQKV(*(HeadProjection(M, n, D) for n in counts))
    return Attention(project, Linear(H * D, M, bias=False), mask=masks.Causal())


def hybrid_mixer(config: Mamba2Keys) -> Recurrent:
    """Build a layer of Mamba-2 of a model that also has attention, with initial weights."""
    return mixer(
        config.mixer_sizes(),
        eps=config.rms_norm_eps,
        step_limits=step_limits(config.time_step_limit),
    )


def mixer_of(config: Mamba2Hybrid, layer: int, rotary: Rotary | None, window: int | None) -> Mixer:
    """Build attention or Mamba-2, as the config says for this layer."""
    if config.kinds()[layer] == FULL:
        return llama_like.attention(config, rotary, window)
    return hybrid_mixer(config)


def names(stored: str, ours: str) -> NameTable:
    """Return the table entries of a layer of Mamba-2."""
    parts = ("gate", "project.v", "project.k", "project.q", "rule")
    taps = ours + "project.convolution."
    table: dict[str, NameEntry] = {
        f"{stored}in_proj.{end}": stacked_rows(*(f"{ours}{part}.linear.{end}" for part in parts))
        for end in ("weight", "bias")
    }
    return table | {
        stored + "A_log": ours + "rule.A_log",
        stored + "D": ours + "rule.skip",
        stored + "dt_bias": ours + "rule.dt_bias",
        stored + "conv1d.weight": filters(taps + "weight"),
        stored + "conv1d.bias": taps + "bias",
        stored + "norm.weight": ours + "norm.weight",
        stored + "out_proj.weight": ours + "output.weight",
        stored + "out_proj.bias": ours + "output.bias",
    }


_RULE = MODEL_LAYER + "attention.rule.A_log"
"""A parameter that only the layers of Mamba have."""


def hybrid_names(attention: NameTable) -> NameTable:
    """Return the table entries of the mechanisms of a model with Mamba-2 and attention."""
    recurrent = names(STORED_LAYER + "mamba.", MODEL_LAYER + "attention.")
    return {**only(attention, unless=_RULE), **only(recurrent, requires=_RULE)}


NORMS_AND_ENDS: NameTable = {
    "model.embed_tokens.weight": "embed.embedding.weight",
    "model.final_layernorm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "pre_ff_layernorm.weight": MODEL_LAYER + "feed_forward_residual.norm.weight",
}
"""The norms, the embedding and the head of Bamba, Falcon-H1 and Jamba."""
FEED_FORWARD: NameTable = {
    f"{STORED_LAYER}feed_forward.{part}_proj.{end}": f"{MODEL_LAYER}feed_forward.{part}.{end}"
    for part in ("gate", "up", "down")
    for end in ("weight", "bias")
}
"""The feed-forward layers of Bamba, Falcon-H1 and Jamba."""


def family(config: type[RotaryDecoderConfig], layer: llama_like.Layer, names: NameTable) -> Family:
    """Return a family of decoders with Mamba-2 layers and rotary attention."""
    return llama_like.family(config, layer, names, keep_float32=FLOAT32)
