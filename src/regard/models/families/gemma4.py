"""The language model of Gemma 4: other heads in layers without a window, embeddings of each token
for each layer, last layers that read earlier layers' keys and values, and experts beside the dense
networks. Source: Gemma Team 2026,
"Gemma 4" and its code.
"""

from __future__ import annotations

from torch import nn

from regard.configs.gemma4 import Gemma4Config
from regard.models.assembly import llama_like
from regard.models.assembly.building_blocks import initialize_weights
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.assembly.shared_memory import last_layers
from regard.models.checkpoint.family import NameTable, as_stored
from regard.models.decoder import Decoder
from regard.nn import Attention, InputEmbedding, RMSNorm, SandwichNorm, SeparateQKV
from regard.nn.attention.cross import without_own_memory
from regard.nn.blocks.experts import ExpertsBesideDense
from regard.nn.blocks.feed_forward import GatedFeedForward
from regard.nn.blocks.residual_streams import (
    AltUpEmbedding,
    AltUpMerge,
    AltUpSizes,
    LayerInput,
    LayerInputBlock,
)
from regard.nn.blocks.routers import ScaledSoftmaxRouter
from regard.positions import Rotary


def _build(config: Gemma4Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.rms_norm_eps
    L, P = config.num_hidden_layers, config.hidden_size_per_layer_input
    sizes = AltUpSizes(M, 1, L, P)
    sources = last_layers(config.kinds(), config.num_kv_shared_layers)
    rotaries = llama_like.rotary_modules(config)
    layers = [_block(config, sizes, i, rotary) for i, rotary in enumerate(rotaries)]
    embedding, head = llama_like.embedding_and_head(config)
    if not P:
        embed, last = InputEmbedding(embedding, scale=M**0.5), RMSNorm(M, eps=eps)
        return initialize_weights(Decoder(embed, layers, last, head, sources))
    table = nn.Embedding(config.vocab_size_per_layer_input, L * P)
    by_layer = AltUpEmbedding(embedding, table, sizes, eps=eps)
    return initialize_weights(Decoder(by_layer, layers, AltUpMerge(sizes, eps=eps), head, sources))


def _block(
    config: Gemma4Config, sizes: AltUpSizes, index: int, rotary: Rotary | None
) -> LayerInputBlock:
    M, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
    mixer = _attention(config, index, rotary)
    network: nn.Module = GatedFeedForward(M, config.width(index), nn.GELU("tanh"))
    inner: nn.Module = RMSNorm(M, eps=eps)
    if config.enable_moe_block:
        count, active, width = config.experts
        router = ScaledSoftmaxRouter(M, count, active, eps=eps)
        experts = [GatedFeedForward(M, width, nn.GELU("tanh")) for _ in range(count)]
        norms = (inner, RMSNorm(M, eps=eps), RMSNorm(M, eps=eps), RMSNorm(M, eps=eps))
        network, inner = ExpertsBesideDense(router, experts, network, norms), nn.Identity()
    return LayerInputBlock(
        without_own_memory(mixer) if config.shares_keys(index) else mixer,
        network,
        llama_like.sandwich(config),
        SandwichNorm(inner, RMSNorm(M, eps=eps)),
        layer_input=LayerInput(M, P, scaled=False, eps=eps) if P else None,
        sizes=sizes,
        index=index,
    )


def _attention(config: Gemma4Config, index: int, rotary: Rotary | None) -> Attention:
    """Build the attention of a layer, whose values may be its keys."""
    window = config.windows()[index]
    mixer = llama_like.attention(config, rotary, window)
    if window is None and config.attention_k_eq_v:
        assert isinstance(mixer.project, SeparateQKV)
        mixer.project.v.linear = mixer.project.k.linear
    return mixer


def _check(config: Gemma4Config) -> None:
    """Check the numbers of both rotary settings, and which layers share keys and values."""
    llama_like.check(config)
    last_layers(config.kinds(), config.num_kv_shared_layers)


PARTS = {
    "layer_scalar": "scale",
    "per_layer_input_gate.weight": "layer_input.gate.weight",
    "per_layer_projection.weight": "layer_input.project.weight",
    "post_per_layer_input_norm.weight": "layer_input.norm.weight",
}
"""Name of a part of a layer -> its name in the network, of what Gemma 3 lacks."""
EXPERTS: NameTable = {
    "router.proj.weight": f"{MODEL_LAYER}feed_forward.router.linear.weight",
    "router.scale": f"{MODEL_LAYER}feed_forward.router.input_scale",
    "router.per_expert_scale": f"{MODEL_LAYER}feed_forward.router.expert_scale",
    **llama_like.stacked_experts(""),
    "post_feedforward_layernorm_1.weight": f"{MODEL_LAYER}feed_forward.dense_after.weight",
    "pre_feedforward_layernorm_2.weight": f"{MODEL_LAYER}feed_forward.norm.weight",
    "post_feedforward_layernorm_2.weight": f"{MODEL_LAYER}feed_forward.after.weight",
}
NAMES: NameTable = {
    **llama_like.recipe_names(Gemma4Config.recipe),
    **{STORED_LAYER + name: entry for name, entry in EXPERTS.items()},
    **{
        f"{STORED_LAYER}{theirs}.weight": (
            as_stored(f"{MODEL_LAYER}{alone}.weight"),
            as_stored(f"{MODEL_LAYER}feed_forward.dense{joint}.weight"),
        )
        for theirs, alone, joint in (
            ("mlp.gate_proj", "feed_forward.gate", ".gate"),
            ("mlp.up_proj", "feed_forward.up", ".up"),
            ("mlp.down_proj", "feed_forward.down", ".down"),
            ("pre_feedforward_layernorm", "feed_forward_residual.norm", "_norm"),
        )
    },
    "model.norm.weight": (as_stored("norm.weight"), as_stored("norm.norm.weight")),
    "model.embed_tokens_per_layer.weight": "embed.layer_embedding.weight",
    "model.per_layer_model_projection.weight": "embed.to_layers.weight",
    "model.per_layer_projection_norm.weight": "embed.layer_norm.weight",
    **{STORED_LAYER + theirs: MODEL_LAYER + ours for theirs, ours in PARTS.items()},
}
FAMILIES = {
    "gemma4_text": llama_like.family(
        Gemma4Config,
        names=NAMES,
        build=_build,
        check=_check,
        # the released files hold key and value maps of layers that read those of earlier ones
        buffers=(r"(model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",),
    )
}
