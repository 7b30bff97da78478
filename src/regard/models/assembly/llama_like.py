"""Parts and checkpoint names of Llama-like families: grouped queries, rotary, SwiGLU and RMS
norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard.configs.base import ModelConfig
from regard.configs.llama import GroupedQueryConfig, RotaryDecoderConfig
from regard.configs.rope import RopeSettings
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family, NameTable, TensorRule, stacked_rows
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm, RMSNorm, SwiGLU
from regard.nn.embedding import ScaledLogits
from regard.nn.experts import MoE
from regard.nn.linear import Linear
from regard.nn.routers import Router
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
HEAD_NORMS = {
    STORED_LAYER + "self_attn.q_norm.weight": MODEL_LAYER + "attention.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MODEL_LAYER + "attention.project.k.steps.0.weight",
}
"""Norms on each head, before the rotation."""
FLAT_NORMS = {
    STORED_LAYER + "self_attn.q_norm.weight": MODEL_LAYER + "attention.project.q.flat.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MODEL_LAYER + "attention.project.k.flat.weight",
}
"""Norms over all heads together."""
FUSED_FEED_FORWARD: NameTable = {
    STORED_LAYER + "mlp.gate_up_proj.weight": stacked_rows(
        MODEL_LAYER + "feed_forward.gate.weight", MODEL_LAYER + "feed_forward.up.weight"
    ),
    STORED_LAYER + "mlp.down_proj.weight": MODEL_LAYER + "feed_forward.down.weight",
}
"""Gate and up projection in one stored matrix."""
PRE_NORMS = {
    STORED_LAYER + "input_layernorm.weight": MODEL_LAYER + "attention_residual.norm.weight",
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
}
OUTPUT_NORMS = {
    STORED_LAYER + "post_attention_layernorm.weight": MODEL_LAYER
    + "attention_residual.norm.weight",
    STORED_LAYER + "post_feedforward_layernorm.weight": MODEL_LAYER
    + "feed_forward_residual.norm.weight",
}
"""Norms on what each sublayer adds."""
EXPERTS = {STORED_LAYER + "mlp.gate.weight": MODEL_LAYER + "feed_forward.router.linear.weight"} | {
    STORED_LAYER + f"mlp.experts.{{}}.{part}_proj.weight": MODEL_LAYER
    + f"feed_forward.experts.{{}}.{part}.weight"
    for part in ("gate", "up", "down")
}
"""The router and the experts of a mixture, each matrix as a tensor of its own."""
NAMES = EMBEDDING_AND_HEAD | ATTENTION | FEED_FORWARD | PRE_NORMS
"""Stored name -> parameter name; {} is the layer. Entries of parts that a model lacks are
ignored.
"""

PREFIXES, HEAD = ("model.",), "lm_head.weight"
"""The prefix of names, and the stored name of the head; a base model saved alone lacks both."""
BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Patterns of tensors that older versions stored, and that are computed from the config."""


def rename_language_model(name: str) -> str:
    """Return the name of a tensor without the prefix that models with image input add.

    >>> names = "language_model.model.norm.weight", "model.language_model.norm.weight"
    >>> tuple(rename_language_model(name) for name in names)
    ('model.norm.weight', 'model.norm.weight')
    """
    name = re.sub(r"^model\.language_model\.", "model.", name)
    return name.removeprefix("language_model.")


def family(
    config: type[ModelConfig], build: Callable[[Any], Decoder], names: NameTable = NAMES
) -> Family:
    """Return a family whose folders name tensors as Llama's do: with the same prefix, head and
    buffers.
    """
    return Family(config, build, names, check=check, prefixes=PREFIXES, head=HEAD, buffers=BUFFERS)


def check(config: RotaryDecoderConfig) -> None:
    """Check the numbers of the rotary scaling of every layer."""
    _rotary_modules(config)


def _rotary_modules(config: RotaryDecoderConfig) -> list[Rotary | None]:
    """Return the rotary module of each layer; layers with equal settings share one."""
    built: list[tuple[RopeSettings, Rotary]] = []
    modules: list[Rotary | None] = []
    for settings in config.ropes():
        if settings is None:
            modules.append(None)
            continue
        module = next((rotary for known, rotary in built if known == settings), None)
        if module is None:
            module = building_blocks.rotary_module(settings)
            built.append((settings, module))
        modules.append(module)
    return modules


def decoder(
    config: RotaryDecoderConfig,
    block: Callable[[Rotary | None, int | None], Block],
    *,
    final_norm: nn.Module | None = None,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Decoder:
    """Build a decoder with initial weights."""
    M, V = config.hidden_size, config.vocab_size
    embedding, head = embedding_and_head(V, M, tied=config.tie_word_embeddings)
    if logit_scale != 1:
        scaled = ScaledLogits(M, V, scale=logit_scale)
        scaled.weight, head = head.weight, scaled
    rows = zip(_rotary_modules(config), config.windows(), strict=True)
    layers = [block(rotary, window) for rotary, window in rows]
    embed = InputEmbedding(embedding, scale=embedding_scale)
    last = norm(config) if final_norm is None else final_norm
    return initialize_weights(Decoder(embed, layers, last, head))


def pre_norm_decoder(
    config: GroupedQueryConfig,
    *,
    bias: bool = False,
    output_bias: bool = False,
    feed_forward_bias: bool = False,
) -> Decoder:
    """Build a decoder of pre-norm blocks without further parts, as Llama and Mistral are."""

    def layer(rotary: Rotary | None, window: int | None) -> Block:
        mixer = attention(config, rotary, window, bias=bias, output_bias=output_bias)
        return block(config, mixer, bias=feed_forward_bias)

    return decoder(config, layer)


def attention(
    config: RotaryDecoderConfig,
    rotary: Rotary | None,
    window: int | None = None,
    *,
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    q_flat: nn.Module | None = None,
    k_flat: nn.Module | None = None,
    bias: bool = False,
    output_bias: bool = False,
    scale: float | None = None,
) -> Attention:
    """Build causal grouped-query attention, with a window if there is one.

    The steps, norms and bias are those of `building_blocks.rotary_heads`; `scale` is the factor on
    the scores, 1/sqrt(D) by default.
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
    return Attention(project, Linear(H * D, M, bias=output_bias), mask=mask, scale=scale)


def head_norm_attention(
    config: GroupedQueryConfig, rotary: Rotary | None, window: int | None
) -> Attention:
    """Build attention with a norm on each head of queries and keys, before the rotation."""
    bias, output_bias = config.biases
    return attention(
        config,
        rotary,
        window,
        q_steps=[norm(config, config.head_dim)],
        k_steps=[norm(config, config.head_dim)],
        bias=bias,
        output_bias=output_bias,
    )


def flat_norm_attention(
    config: GroupedQueryConfig, rotary: Rotary | None, window: int | None
) -> Attention:
    """Build attention with a norm over all query heads, and one over all key heads, before the
    rotation.
    """
    bias, output_bias = config.biases
    return attention(
        config,
        rotary,
        window,
        q_flat=norm(config, config.num_attention_heads * config.head_dim),
        k_flat=norm(config, config.num_key_value_heads * config.head_dim),
        bias=bias,
        output_bias=output_bias,
    )


def block(config: GroupedQueryConfig, mixer: Attention, *, bias: bool = False) -> Block:
    """Build a pre-norm block of attention and a SwiGLU, which has biases if `bias`."""
    feed_forward = SwiGLU(config.hidden_size, config.intermediate_size, bias=bias)
    return Block(mixer, feed_forward, PreNorm(norm(config)), PreNorm(norm(config)))


def norm(config: RotaryDecoderConfig, dim: int | None = None) -> RMSNorm:
    """Build an RMS norm of the model dim, or of another dim, with the config's eps."""
    assert isinstance(config, GroupedQueryConfig), "a config without RMS norms needs its own norm"
    return RMSNorm(config.hidden_size if dim is None else dim, eps=config.rms_norm_eps)


def mixture(dim: int, hidden: int, router: Router, shared: nn.Module | None = None) -> MoE:
    """Build a mixture of SwiGLU experts with a hidden size, and a module for all tokens."""
    return MoE(router, [SwiGLU(dim, hidden) for _ in range(router.experts)], shared)


def expert_names(stored: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the table entries of the experts' matrices under other names than those of `EXPERTS`.

    >>> list(expert_names("block_sparse_moe.experts", "w1", "w3", "w2"))[0]
    'model.layers.{}.block_sparse_moe.experts.{}.w1.weight'
    """
    return {
        f"{STORED_LAYER}{stored}.{{}}.{theirs}.weight": MODEL_LAYER
        + f"feed_forward.experts.{{}}.{ours}.weight"
        for ours, theirs in (("gate", gate), ("up", up), ("down", down))
    }


def experts_in_one_tensor(*parts: str, transposed: bool = False) -> TensorRule:
    """Return the rule for a tensor [n, rows, columns] with the matrices of all n experts; several
    parts are one above the other in the rows.

    >>> experts_in_one_tensor("gate", "up").parameters[0]
    'layers.{}.feed_forward.experts.*.gate.weight'
    """

    def unpack(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        matrices = stored.mT if transposed else stored
        return [matrix for part in matrices.chunk(len(parts), 1) for matrix in part]

    def pack(parameters: Sequence[Tensor]) -> Tensor:
        matrices = torch.cat(torch.stack(list(parameters)).chunk(len(parts)), 1)
        return matrices.mT if transposed else matrices

    stem = MODEL_LAYER + "feed_forward.experts.*."
    return TensorRule(tuple(f"{stem}{part}.weight" for part in parts), unpack, pack)
