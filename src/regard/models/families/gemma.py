"""The language model of Gemma 3n, which has several streams, an embedding of each token for each
layer, and last layers that read earlier layers' keys and values. Source: Gemma Team 2025, "Gemma
3n".
"""

from __future__ import annotations

from torch import nn

from regard.configs.base import FULL, SLIDING
from regard.configs.gemma import Gemma3nConfig
from regard.models.assembly import llama_like
from regard.models.assembly.building_blocks import initialize_weights
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.assembly.shared_memory import last_layers
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Attention
from regard.nn.attention.cross import without_own_memory
from regard.nn.blocks.feed_forward import GatedFeedForward, GaussianTopK
from regard.nn.blocks.residual_streams import (
    AltUp,
    AltUpBlock,
    AltUpEmbedding,
    AltUpMerge,
    AltUpSizes,
    LayerInput,
    LowRankResidual,
)


def memory_from(config: Gemma3nConfig) -> tuple[int | None, ...]:
    """Return for each layer the layer whose keys and values it reads; None stores its own."""
    kinds = [FULL if window is None else SLIDING for window in config.windows()]
    return last_layers(kinds, config.num_kv_shared_layers)


def _build(config: Gemma3nConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.rms_norm_eps
    L, P = config.num_hidden_layers, config.hidden_size_per_layer_input
    sizes, sources = AltUpSizes(M, config.altup_num_inputs, L, P), memory_from(config)
    rows = zip(llama_like.rotary_modules(config), config.windows(), sources, strict=True)
    layers = []
    for i, (rotary, window, source) in enumerate(rows):
        mixer = llama_like.attention(config, rotary, window)
        mixer = mixer if source is None else without_own_memory(mixer)
        layers.append(_block(config, sizes, i, mixer))
    embedding, head = llama_like.embedding_and_head(config)
    table = nn.Embedding(config.vocab_size_per_layer_input, L * P)
    embed = AltUpEmbedding(embedding, table, sizes, eps=eps)
    return initialize_weights(Decoder(embed, layers, AltUpMerge(sizes, eps=eps), head, sources))


def _block(config: Gemma3nConfig, sizes: AltUpSizes, index: int, mixer: Attention) -> AltUpBlock:
    M, eps, sparsity = config.hidden_size, config.rms_norm_eps, config.sparsities()[index]
    gelu: nn.Module = nn.GELU("tanh")
    activation = GaussianTopK(sparsity, gelu) if sparsity else gelu
    return AltUpBlock(
        mixer,
        GatedFeedForward(M, config.intermediate_size, activation),
        llama_like.sandwich(config),
        llama_like.sandwich(config),
        altup=AltUp(M, sizes.streams, eps=eps),
        laurel=LowRankResidual(M, config.laurel_rank, eps=eps),
        layer_input=LayerInput(M, sizes.layer_dim, scaled=config.altup_correct_scale, eps=eps),
        sizes=sizes,
        index=index,
    )


def check(config: Gemma3nConfig) -> None:
    """Check the numbers of both rotary settings, and which layers share keys and values."""
    llama_like.check(config)
    memory_from(config)


PARTS = {
    "altup.correct_output_scale": "layer_input.scale",
    "altup.correction_coefs.weight": "altup.correction.weight",
    "altup.prediction_coefs.weight": "altup.prediction.weight",
    "altup.modality_router.weight": "altup.router.weight",
    "altup.router_norm.weight": "altup.router_norm.weight",
    "laurel.linear_left.weight": "laurel.left.weight",
    "laurel.linear_right.weight": "laurel.right.weight",
    "laurel.post_laurel_norm.weight": "laurel.norm.weight",
    "per_layer_input_gate.weight": "layer_input.gate.weight",
    "per_layer_projection.weight": "layer_input.project.weight",
    "post_per_layer_input_norm.weight": "layer_input.norm.weight",
}
"""Name of a part of a layer -> its name in the network, of what Gemma 3 lacks."""
NAMES: NameTable = {
    **llama_like.recipe_names(Gemma3nConfig.recipe),
    "model.norm.weight": "norm.norm.weight",
    "model.embed_tokens_per_layer.weight": "embed.layer_embedding.weight",
    "model.per_layer_model_projection.weight": "embed.to_layers.weight",
    "model.per_layer_projection_norm.weight": "embed.layer_norm.weight",
    "model.altup_projections.{}.weight": "embed.to_streams.{}.weight",
    "model.altup_unembed_projections.{}.weight": "norm.from_streams.{}.weight",
    **{STORED_LAYER + theirs: MODEL_LAYER + ours for theirs, ours in PARTS.items()},
}
"""Stored name -> parameter name; {} is the layer, or the stream."""

FAMILIES = {
    "gemma3n_text": llama_like.family(
        Gemma3nConfig,
        names=NAMES,
        build=_build,
        check=check,
        buffers=(
            # stored also where altup_correct_scale is false
            r"(model\.)?layers\.\d+\.altup\.correct_output_scale",
            # the released files hold key and value maps of layers that read those of earlier ones
            r"(model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",
        ),
    ),
}
