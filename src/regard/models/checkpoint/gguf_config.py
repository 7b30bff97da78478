"""The metadata of GGUF files as the keys of a config.json: `llama.attention.head_count_kv` is
num_key_value_heads.

A key becomes the first of its names in `_KEYS` that the config class of the family has. What
llama.cpp's code knows of an architecture and its files do not say is in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from regard.configs import config_class
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, MetadataValue, invalid_gguf, read_plain
from regard.models.checkpoint.gguf_architectures import ARCHITECTURES, REFUSED, Architecture
from regard.models.checkpoint.gguf_completions import (
    ROPE_FACTORS,
    Config,
    GgufKeys,
    llama3_scaling,
)
from regard.untrusted_text import short_repr

_KEYS: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "decoder_block_count": ("num_decoder_layers",),
    "decoder_start_token_id": ("decoder_start_token_id",),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.value_scale": ("attention_value_scale",),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "router_scaling_factor",
        "moe_router_scaling_factor",
    ),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.compress_rope_freq_base": ("compress_rope_theta",),
    "attention.indexer.head_count": ("index_n_heads",),
    "attention.indexer.key_length": ("index_head_dim",),
    "attention.indexer.top_k": ("index_topk", "index_topk_blocks"),
    "attention.indexer.block_size": ("index_block_size",),
    "attention.indexer.local_blocks": ("index_local_blocks",),
    "attention.output_group_count": ("o_groups",),
    "attention.output_lora_rank": ("o_lora_rank",),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "altup.num_inputs": ("altup_num_inputs",),
    "full_attention_interval": ("full_attention_interval",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv"),
    "ssm.state_size": ("state_size", "ssm_state_size", "linear_key_head_dim", "mamba_d_state"),
    "ssm.group_count": ("n_groups", "linear_num_key_heads", "mamba_n_groups"),
    "ssm.time_step_rank": (
        "time_step_rank",
        "linear_num_value_heads",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_dt_rank",
    ),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    ),
    "expert_weights_norm": ("norm_topk_prob",),
    "rope.freq_base": ("rope_theta", "rotary_emb_base"),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "hidden_activation": ("hidden_activation",),
    "hyper_connection.count": ("hc_mult",),
    "hyper_connection.epsilon": ("hc_eps",),
    "hyper_connection.sinkhorn_iterations": ("hc_sinkhorn_iters",),
    "swiglu_clamp_exp": ("swiglu_limit",),
    "token_type_count": ("type_vocab_size",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Key after the architecture's name -> its possible names in config.json."""
_REQUIRED = ("block_count", "embedding_length", "attention.head_count")
_READ = frozenset(
    {
        "attention.key_length",
        "attention.recurrent_layers",
        "attention.temperature_scale",
        "attention.value_length",
        "attention.sliding_window_pattern",
        "nextn_predict_layers",
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "ssm.dt_b_c_rms",
        "ssm.inner_size",
        "tensor_data_layout",
        "vocab_size",
    }
)
"""Further keys that are read, and those that say nothing of the network."""
_SHOWN: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "bias": ("attn_qkv.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "use_bias": ("attn_output.bias", "ssm_in.bias"),
    "mamba_conv_bias": ("ssm_conv1d.bias",),
    "mamba_proj_bias": ("ssm_in.bias",),
    "mamba_rms_norm": ("ssm_norm.weight",),
    "use_conv_bias": ("ssm_conv1d.bias",),
    "use_qk_norm": ("attn_q_norm.weight",),
    "use_qkv_bias": ("attn_q.bias",),
}
"""Key of config.json -> the tensors of some layer that show it."""

LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The same for texts within, and beyond, the length of the training: LongRoPE."""
_ORIGINAL = "original_max_position_embeddings"
_YARN = {
    "factor": "rope.scaling.factor",
    _ORIGINAL: "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
"""Key of a yarn scaling -> key of the file."""


def gguf_architecture(header: GgufHeader) -> str:
    """Return the name of a model's architecture, a key of `ARCHITECTURES`."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise invalid_gguf(
            header.file, f"general.type is {short_repr(kind)}; only models are read, type 'model'"
        )
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in REFUSED:
        raise FileError(
            f"{header.file}: general.architecture is {name!r}, which is not read, because "
            f"{REFUSED[name]}. Load the model's safetensors instead"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise FileError(
            f"{header.file}: general.architecture is {short_repr(name)}; of GGUF files these are "
            f"read: {', '.join(ARCHITECTURES)}. Load the model's safetensors instead"
        )
    return name


def gguf_config(header: GgufHeader, architecture: str) -> tuple[Config, int, list[str]]:
    """Return the metadata as the keys of a config.json, the number of layers, and the keys that are
    not understood.
    """
    its = ARCHITECTURES[architecture]
    prefix = f"{architecture}."
    entries = {
        k.removeprefix(prefix): x for k, x in header.metadata.items() if k.startswith(prefix)
    }
    if lacking := [key for key in _REQUIRED if key not in entries]:
        raise invalid_gguf(
            header.file, f"the keys {', '.join(prefix + k for k in lacking)} are missing"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise invalid_gguf(header.file, "it has no matrix token_embd.weight")
    first: Config = {"vocab_size": embedding.shape[0]}
    described = GgufKeys(first, entries, header)
    size = described.number("embedding_length")
    # the last layers predict further tokens, and are not loaded
    layers = described.number("block_count")
    layers -= _following_layers(header, architecture, layers)
    first |= {"num_hidden_layers": layers, "hidden_size": size}
    head_dim = 1
    if entries["attention.head_count"] != 0 or "ssm.inner_size" not in entries:
        heads = _heads(its, described)
        entries.setdefault("attention.head_count_kv", heads)
        head_dim = described.number("attention.key_length", size // heads)
        first |= {"num_attention_heads": heads, "head_dim": head_dim}
    further = its.complete(described)
    model_type = further.get("model_type", its.model_type)
    names = _names_of(model_type)
    config: Config = {"model_type": model_type}
    # as in llama.cpp, a file that does not speak of windows, or of ranks of queries, has none
    if "sliding_window" in names and "use_sliding_window" not in names:
        config["sliding_window"] = None
    if "q_lora_rank" in names:
        config["q_lora_rank"] = None
    unknown: list[str] = []
    for key, entry in entries.items():
        value = entry[0] if isinstance(entry, list) and entry == entry[:1] * len(entry) else entry
        ours = next((name for name in _KEYS.get(key, ()) if name in names), None)
        if ours is not None:
            config[ours] = layers if key == "block_count" else value
        elif key not in (*its.reads, *_READ) and not _says_nothing(its, key, value, entries):
            unknown.append(prefix + key)
    of_layers = {name.split(".", 2)[-1] for name in header.tensors if name.startswith("blk.")}
    facts: Config = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "head_dim": head_dim,
    }
    facts |= _rope_facts(header, architecture, entries, further, head_dim)
    facts |= {key: any(name in of_layers for name in tensors) for key, tensors in _SHOWN.items()}
    facts |= {**its.constants, **further}
    config |= {k: x for k, x in facts.items() if k in names and x is not None}
    config |= _rotary_dims(header, entries, names, head_dim)
    if "layer_types" not in further:
        config |= _layer_types(entries, names)
    if "original_max_position_embeddings" in names and LONG_FACTORS[0] in header.tensors:
        original = entries.get("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original
    return config, layers, unknown


def _heads(its: Architecture, described: GgufKeys) -> int:
    """Return the number of query heads, of the layers without a window if it is not one for all."""
    if "attention.head_count" in its.reads:
        return described.by_kind("attention.head_count")[0]
    return described.number("attention.head_count")


def _names_of(model_type: str) -> frozenset[str]:
    """Return the keys of config.json that a family has."""
    cls = config_class(model_type)
    assert cls is not None
    return frozenset(x.name for x in fields(cls))


def _says_nothing(
    its: Architecture, key: str, value: MetadataValue, entries: Mapping[str, MetadataValue]
) -> bool:
    """Return whether a key has the value that every model without a name for it has."""
    usual: Mapping[str, object] = {
        "attention.causal": True,
        "attention.head_count": 0,
        "attention.clamp_kqv": 0.0,
        "attention.head_count_kv": entries["attention.head_count"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": 8.0,
        "expert_count": 0,
        "expert_gating_func": its.gating,
        "expert_used_count": 0,
        "expert_weights_norm": False,
        "expert_weights_scale": 1.0,
        "feed_forward_length": 4 * int(str(entries["embedding_length"])),
        "use_parallel_residual": True,
    }
    if key == "context_length" or (key == "feed_forward_length" and value == 0):
        return True
    return key in usual and value == usual[key]


def _layer_types(entries: Mapping[str, MetadataValue], names: frozenset[str]) -> Config:
    """Return which layers have windows, if the file says so."""
    pattern = entries.get("attention.sliding_window_pattern")
    if pattern is None or "layer_types" not in names:
        return {}
    layers = entries["block_count"]
    if type(pattern) is int and type(layers) is int and pattern > 0 and 0 < layers < 1 << 16:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    windows = pattern if isinstance(pattern, list) else []
    return {"layer_types": ["sliding_attention" if x else "full_attention" for x in windows]}


def _rotary_dims(
    header: GgufHeader, entries: Mapping[str, Any], names: frozenset[str], head_dim: int
) -> Config:
    """Return the part of a head that rotates, where the family has such a key."""
    if "qk_rope_head_dim" in names:
        return {}
    has_own_values = "v_head_dim" in names
    if not has_own_values and entries.get("attention.value_length", head_dim) != head_dim:
        raise FileError(
            f"{header.file}: attention.value_length is "
            f"{short_repr(entries['attention.value_length'])} and heads have {head_dim} dims; "
            "other sizes are not supported"
        )
    if "rope_parameters" in names:  # they have it for each kind of layer
        return {}
    dims = entries.get("rope.dimension_count", head_dim)
    partial = next((x for x in ("partial_rotary_factor", "rotary_pct") if x in names), None)
    if partial is not None and type(dims) is int and 0 < dims <= head_dim:
        return {partial: dims / head_dim}
    if dims != head_dim and names & {"rope_theta", "rotary_emb_base"}:
        raise FileError(
            f"{header.file}: rope.dimension_count is {short_repr(dims)} and heads have {head_dim} "
            "dims; other sizes are not supported"
        )
    return {}


def _rope_facts(
    header: GgufHeader,
    architecture: str,
    entries: Mapping[str, Any],
    further: Config,
    head_dim: int,
) -> Config:
    """Return the rope_scaling, if the architecture has no rotary settings by kind of layer; without
    a scaling there is none, and not that of the family.
    """
    if "rope_parameters" not in further:
        scaling = _rope_scaling(header, architecture, entries, head_dim)
        return {"rope_scaling": scaling or {"rope_type": "default"}}
    if (kind := entries.get("rope.scaling.type", "none")) != "none":
        raise FileError(
            f"{header.file}: rope.scaling.type is {short_repr(kind)}, which is not read for the "
            f"architecture {architecture!r}"
        )
    return {}


def _rope_scaling(
    header: GgufHeader,
    architecture: str,
    entries: Mapping[str, Any],
    head_dim: int,
) -> dict[str, object] | None:
    kind = entries.get("rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise FileError(
                f"{header.file}: it has {ROPE_FACTORS} and rope.scaling.type {short_repr(kind)}; "
                "both at once are not supported"
            )
        return llama3_scaling(header, entries.get("rope.freq_base", 10000.0), head_dim)
    factor = entries.get("rope.scaling.factor")
    if all(name in header.tensors for name in LONG_FACTORS):
        tensors = [header.tensors[name] for name in LONG_FACTORS]
        if any(x.format.name != "F32" or x.shape != tensors[0].shape for x in tensors):
            raise invalid_gguf(
                header.file, f"{' and '.join(LONG_FACTORS)} are not alike, or not F32"
            )
        short, long = (read_plain(header, x, torch.float32).flatten().tolist() for x in tensors)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long} | {
            "attention_factor": entries.get("rope.scaling.attn_factor")
        }
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(header, architecture, entries)
    raise FileError(
        f"{header.file}: rope.scaling.type is {short_repr(kind)}; these are read: none, linear, "
        "yarn"
    )


def _yarn(header: GgufHeader, architecture: str, entries: Mapping[str, Any]) -> dict[str, object]:
    """Return a yarn scaling. Of its factors on rotations and scores llama.cpp has one number for
    both, of which its converter writes a tenth for DeepSeek; for gpt-oss it rounds the bounds,
    which its makers do not.
    """
    scaling: dict[str, object] = {"rope_type": "yarn"}
    for name, key in _YARN.items():
        if name in ("factor", _ORIGINAL) or key in entries:
            scaling[name] = entries.get(key)
    if architecture == "gpt-oss":
        scaling["truncate"] = False
    if (log := entries.get("rope.scaling.yarn_log_multiplier")) is not None:
        if not isinstance(log, float):
            raise invalid_gguf(
                header.file, f"rope.scaling.yarn_log_multiplier is {short_repr(log)}, no number"
            )
        is_latent = architecture in ("deepseek2", "deepseek32")
        scaling["mscale_all_dim"] = 10 * log if is_latent else log
        scaling["mscale"] = 10 * log if is_latent else 1.0
    return scaling


def _following_layers(header: GgufHeader, architecture: str, layers: int) -> int:
    """Return how many of the last layers predict further tokens; files of DeepSeek-V4 name some
    that they do not have.
    """
    count = header.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if type(count) is not int or not 0 <= count < layers:
        raise invalid_gguf(
            header.file, f"nextn_predict_layers is {short_repr(count)}, and block_count {layers}"
        )
    has_none = f"blk.{layers - count}.nextn.eh_proj.weight" not in header.tensors
    return 0 if architecture == "deepseek4" and has_none else count
