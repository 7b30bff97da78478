"""Parts and checkpoint names of Llama-like families: grouped queries, rotary, SwiGLU and RMS
norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from regard import masks
from regard.configs.base import ModelConfig
from regard.configs.llama import GroupedQueryConfig
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family, NameTable
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm, RMSNorm, SwiGLU
from regard.nn.linear import Linear
from regard.positions import Rotary

STORED_LAYER, MODEL_LAYER = "model.layers.{}.", "layers.{}."
EMBEDDING_AND_HEAD = {
    "model.embed_tokens.weight": "embed.embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
ATTENTION = {
    STORED_LAYER + "self_attn.q_proj.weight": MODEL_LAYER + "attention.project.q.linear.weight",
    STORED_LAYER + "self_attn.k_proj.weight": MODEL_LAYER + "attention.project.k.linear.weight",
    STORED_LAYER + "self_attn.v_proj.weight": MODEL_LAYER + "attention.project.v.linear.weight",
    STORED_LAYER + "self_attn.o_proj.weight": MODEL_LAYER + "attention.output.weight",
    STORED_LAYER + "self_attn.q_proj.bias": MODEL_LAYER + "attention.project.q.linear.bias",
    STORED_LAYER + "self_attn.k_proj.bias": MODEL_LAYER + "attention.project.k.linear.bias",
    STORED_LAYER + "self_attn.v_proj.bias": MODEL_LAYER + "attention.project.v.linear.bias",
    STORED_LAYER + "self_attn.o_proj.bias": MODEL_LAYER + "attention.output.bias",
}
FEED_FORWARD = {
    STORED_LAYER + "mlp.gate_proj.weight": MODEL_LAYER + "feed_forward.gate.weight",
    STORED_LAYER + "mlp.up_proj.weight": MODEL_LAYER + "feed_forward.up.weight",
    STORED_LAYER + "mlp.down_proj.weight": MODEL_LAYER + "feed_forward.down.weight",
    STORED_LAYER + "mlp.gate_proj.bias": MODEL_LAYER + "feed_forward.gate.bias",
    STORED_LAYER + "mlp.up_proj.bias": MODEL_LAYER + "feed_forward.up.bias",
    STORED_LAYER + "mlp.down_proj.bias": MODEL_LAYER + "feed_forward.down.bias",
}
PRE_NORMS = {
    STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
}
NAMES = EMBEDDING_AND_HEAD | ATTENTION | FEED_FORWARD | PRE_NORMS
"""Stored name -> parameter name; {} is the layer. Entries of parts that a model lacks are
ignored.
"""

PREFIXES, HEAD = ("model.",), "lm_head.weight"
"""The prefix of names, and the stored name of the head; a base model saved alone lacks both."""
BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Patterns of tensors that older versions stored, and that are computed from the config."""


def family(
    config: type[ModelConfig], build: Callable[[Any], Decoder], names: NameTable = NAMES
) -> Family:
    """Return a family whose folders name tensors as Llama's do: with the same prefix, head and
    buffers.

    Args:
        config: the config class.
        build: config -> network with initial weights.
        names: the name table.
    """
    return Family(config, build, names, check=check, prefixes=PREFIXES, head=HEAD, buffers=BUFFERS)


def check(config: GroupedQueryConfig) -> None:
    """Check the numbers of the rotary scaling.

    Raises:
        ArgumentError: as in `rope.rotary_module`.
    """
    building_blocks.rotary_module(config.rope)


def decoder(config: GroupedQueryConfig, block: Callable[[Rotary, int | None], Block]) -> Decoder:
    """Build a decoder with initial weights.

    Args:
        config: the config.
        block: a function (rotary module, window or None) -> the block of one layer.
    """
    embedding, head = embedding_and_head(
        config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    rotary = building_blocks.rotary_module(config.rope)
    layers = [block(rotary, window) for window in config.windows()]
    return initialize_weights(Decoder(InputEmbedding(embedding), layers, norm(config), head))


def pre_norm_decoder(
    config: GroupedQueryConfig,
    *,
    bias: bool = False,
    output_bias: bool = False,
    feed_forward_bias: bool = False,
) -> Decoder:
    """Build a decoder of pre-norm blocks without further parts, as Llama and Mistral are.

    Args:
        config: the config.
        bias: whether the maps to queries, keys and values have biases.
        output_bias: whether the output maps of the attention have biases.
        feed_forward_bias: whether the maps of the feed-forward layers have biases.
    """

    def layer(rotary: Rotary, window: int | None) -> Block:
        mixer = attention(config, rotary, window, bias=bias, output_bias=output_bias)
        return block(config, mixer, bias=feed_forward_bias)

    return decoder(config, layer)


def attention(
    config: GroupedQueryConfig,
    rotary: Rotary,
    window: int | None = None,
    *,
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    q_flat: nn.Module | None = None,
    k_flat: nn.Module | None = None,
    bias: bool = False,
    output_bias: bool = False,
) -> Attention:
    """Build causal grouped-query attention, with a window if there is one.

    The steps, norms and bias are those of `rope.rotary_heads`.
    """
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    project = building_blocks.rotary_heads(
        M,
        H,
        G,
        D,
        rotary,
        q_steps=q_steps,
        k_steps=k_steps,
        q_flat=q_flat,
        k_flat=k_flat,
        bias=bias,
    )
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    return Attention(project, Linear(H * D, M, bias=output_bias), mask=mask)


def block(config: GroupedQueryConfig, mixer: Attention, *, bias: bool = False) -> Block:
    """Build a pre-norm block of attention and a SwiGLU, which has biases if `bias`."""
    feed_forward = SwiGLU(config.hidden_size, config.intermediate_size, bias=bias)
    return Block(mixer, feed_forward, PreNorm(norm(config)), PreNorm(norm(config)))


def norm(config: GroupedQueryConfig, dim: int | None = None) -> RMSNorm:
    """Build an RMS norm of the model dim, or of another dim, with the config's eps."""
    return RMSNorm(config.hidden_size if dim is None else dim, eps=config.rms_norm_eps)
