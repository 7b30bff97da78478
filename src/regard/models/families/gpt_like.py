"""BLOOM, MPT and OPT: decoders with LayerNorms and feed-forward layers without a gate.

What only the first code of MPT has (learned positions, biases, prefixes, norms on heads and more)
raises, as in transformers; but `alibi_bias_max` is used, where transformers 5.23 takes 8.

Source: Le Scao et al. 2022 (arXiv 2211.05100); MosaicML 2023, "Introducing MPT-7B"; Zhang et al.
2022 (arXiv 2205.01068).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.biases import ALiBi
from regard.biases.distance import alibi_slopes
from regard.configs.gpt_like import MPT_ATTENTION, BloomConfig, MptConfig, OPTConfig
from regard.models.assembly import layer_norm
from regard.models.checkpoint.family import weight_and_bias, weights_and_biases
from regard.nn.projections.fused import ClippedQKV


def _bloom_options(config: BloomConfig, _: int) -> Mapping[str, Any]:
    return {"bias": ALiBi(config.heads)}


def _mpt_options(config: MptConfig, _: int) -> Mapping[str, Any]:
    """Return the bias and the scale of a layer, and its projection if that clips."""
    M, H, own = config.model_dim, config.heads, MPT_ATTENTION | dict(config.attn_config)
    # the smallest slope of ALiBi is 2^-8; MPT's is 2^-alibi_bias_max
    slopes = [slope ** (own["alibi_bias_max"] / 8) for slope in alibi_slopes(H)]
    options = {"bias": ALiBi(slopes=slopes), "scale": own["softmax_scale"]}
    if (limit := own["clip_qkv"]) is not None:
        options["project"] = ClippedQKV(M, H, H, M // H, limit=limit, bias=False)
    return options


BLOOM_PARTS = {
    "input_layernorm": "attention_residual.norm",
    "self_attention.query_key_value": "attention.project.linear",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
BLOOM_NAMES = {
    "transformer.word_embeddings.weight": "embed.embedding.weight",
    **weight_and_bias("transformer.word_embeddings_layernorm", "embed.norm"),
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(BLOOM_PARTS, "transformer.h.{}.", "layers.{}."),
}
MPT_PARTS = {
    "norm_1": "attention_residual.norm",
    "attn.Wqkv": "attention.project.linear",
    "attn.out_proj": "attention.output",
    "norm_2": "feed_forward_residual.norm",
    "ffn.up_proj": "feed_forward.up",
    "ffn.down_proj": "feed_forward.down",
}
MPT_NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    **weights_and_biases(MPT_PARTS, "transformer.blocks.{}.", "layers.{}."),
}
OPT_PARTS = {
    "self_attn_layer_norm": "attention_residual.norm",
    "self_attn.q_proj": "attention.project.q.linear",
    "self_attn.k_proj": "attention.project.k.linear",
    "self_attn.v_proj": "attention.project.v.linear",
    "self_attn.out_proj": "attention.output",
    "final_layer_norm": "feed_forward_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
}
OPT_NAMES = {
    "model.decoder.embed_tokens.weight": "embed.embedding.weight",
    "model.decoder.embed_positions.weight": "embed.positional.weight",
    **weight_and_bias("model.decoder.final_layer_norm", "norm"),
    "lm_head.weight": "head.weight",
    **weights_and_biases(OPT_PARTS, "model.decoder.layers.{}.", "layers.{}."),
}
FAMILIES = {
    "bloom": layer_norm.family(BloomConfig, BLOOM_NAMES, _bloom_options),
    "mpt": layer_norm.family(MptConfig, MPT_NAMES, _mpt_options),
    "opt": layer_norm.family(OPTConfig, OPT_NAMES, prefixes=("model.",)),
}
