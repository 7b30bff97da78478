"""GPT-2, GPT-BigCode, GPT-J, GPT-Neo and GPT-NeoX: decoders with LayerNorms and feed-forward layers
without a gate. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
Ben Allal et al. 2023 (arXiv 2301.03988); Wang and Komatsuzaki 2021, "GPT-J-6B"; Black et al. 2021,
"GPT-Neo"; Black et al. 2022 (arXiv 2204.06745).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.configs.gpt import (
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
)
from regard.models.assembly import layer_norm
from regard.models.assembly.building_blocks import flags_of_stored
from regard.models.checkpoint.family import (
    NameTable,
    TensorRule,
    transposed,
    weight_and_bias,
    weights_and_biases,
)


def _scale(config: GPT2Config, layer: int) -> Mapping[str, Any]:
    """Return the factor on the scores of a layer."""
    scale = (config.model_dim // config.heads) ** -0.5 if config.scale_attn_weights else 1.0
    return {"scale": scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale}


def _no_scale(_config: GPTNeoConfig, _layer: int) -> Mapping[str, Any]:
    return {"scale": 1.0}


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
NORMS_AND_NETWORK = {
    "ln_1": "attention_residual.norm",
    "ln_2": "feed_forward_residual.norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}
BIG_CODE_PARTS = NORMS_AND_NETWORK | {
    "attn.c_attn": "attention.project.linear",
    "attn.c_proj": "attention.output",
}
EMBEDDINGS_AND_HEAD = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
}
BIG_CODE_NAMES = EMBEDDINGS_AND_HEAD | weights_and_biases(BIG_CODE_PARTS, STORED_LAYER, MODEL_LAYER)
GPT2_NAMES: dict[str, str | TensorRule] = {
    name: transposed(parameter)
    if name.startswith(STORED_LAYER) and ".ln_" not in name and name.endswith("weight")
    else parameter
    for name, parameter in BIG_CODE_NAMES.items()
}
"""Matrices are stored as [in, out]."""
GPT_NEO_NAMES = {
    **EMBEDDINGS_AND_HEAD,
    **weights_and_biases(
        NORMS_AND_NETWORK | {"attn.attention.out_proj": "attention.output"},
        STORED_LAYER,
        MODEL_LAYER,
    ),
    **{
        f"{STORED_LAYER}attn.attention.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
}
GPTJ_PARTS = {
    "ln_1": "attention_residual.norm",
    "mlp.fc_in": "feed_forward.up",
    "mlp.fc_out": "feed_forward.down",
}
GPTJ_NAMES: NameTable = {
    **EMBEDDINGS_AND_HEAD,
    **weight_and_bias("lm_head", "head"),
    **weights_and_biases(GPTJ_PARTS, STORED_LAYER, MODEL_LAYER),
    **{
        f"{STORED_LAYER}attn.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
    STORED_LAYER + "attn.out_proj.weight": MODEL_LAYER + "attention.output.weight",
}
NEOX_PARTS = {
    "input_layernorm": "attention_residual.norm",
    "attention.query_key_value": "attention.project.linear",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NEOX_NAMES = {
    "gpt_neox.embed_in.weight": "embed.embedding.weight",
    **weight_and_bias("gpt_neox.final_layer_norm", "norm"),
    "embed_out.weight": "head.weight",
    **weights_and_biases(NEOX_PARTS, "gpt_neox.layers.{}.", MODEL_LAYER),
}
BUFFERS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
"""Masks, which older versions stored."""
FAMILIES = {
    "gpt2": layer_norm.family(GPT2Config, GPT2_NAMES, _scale, buffers=BUFFERS),
    "gpt_bigcode": layer_norm.family(GPTBigCodeConfig, BIG_CODE_NAMES, _scale, buffers=BUFFERS),
    "gpt_neo": layer_norm.family(
        GPTNeoConfig,
        GPT_NEO_NAMES,
        _no_scale,
        buffers=(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    ),
    "gptj": layer_norm.family(
        GPTJConfig,
        GPTJ_NAMES,
        # the head has its own matrix and biases, and is never tied to the embedding
        complete_config=flags_of_stored(),
        head=None,
        buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
    ),
    "gpt_neox": layer_norm.family(
        GPTNeoXConfig,
        NEOX_NAMES,
        # a missing head is not tied to the embedding, unless config.json ties it
        complete_config=flags_of_stored(),
        prefixes=("gpt_neox.",),
        head="embed_out.weight",
        buffers=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        rename_stored=lambda name: "embed_out.weight" if name == "lm_head.weight" else name,
    ),
}
