"""Tiny models of many families as GGUF files: what llama.cpp's converter does to each, with the
library's names of tensors (`TensorNameMap`) and of keys (`GGUFWriter`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import MODEL_ARCH_NAMES
from torch import Tensor

from regard.configs import config_class
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from tests.models import small

LAYERS, WINDOW = 4, 5
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
NO_HEAD_DIM = {k: v for k, v in SIZES.items() if k != "head_dim"}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": LAYERS, "n_positions": 256, "vocab_size": 288}
BLOOM = {"hidden_size": 64, "n_head": 4, "n_layer": LAYERS, "vocab_size": 288}
NEOX = {k: v for k, v in NO_HEAD_DIM.items() if k != "num_key_value_heads"}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
NO_WINDOWS = {"sliding_window": None, "layer_types": ("full_attention",) * LAYERS}
UNTIED = {"tie_word_embeddings": False}

LATENT = NO_HEAD_DIM | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}
SPELLINGS = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".sinks": ".sinks.weight",
    ".expert_bias": ".expert_bias.bias",
}
HEAD_DIMS = (
    *("glm4_moe", "gpt_oss", "llama", "ministral3", "mixtral", "qwen3", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next"),
)
"""Families whose files have the size of a head."""
LFM2_LAYERS = ("conv", "full_attention", "conv", "full_attention")
MAMBA = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
MINISTRAL_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "arcee": ("arcee", "arcee", SIZES),
    "bloom": ("bloom", "bloom", BLOOM),
    "cohere": ("command-r", "cohere", SIZES | {"logit_scale": 0.3}),
    "cohere2": ("cohere2", "cohere2", SIZES | {"sliding_window": WINDOW, "logit_scale": 0.3}),
    "deepseek_v2": ("deepseek2", "deepseek_v2", LATENT | {"first_k_dense_replace": 1}),
    "deepseek_v3": (
        "deepseek2",
        "deepseek_v3",
        LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
    ),
    "ernie4_5": ("ernie4_5", "ernie4_5", SIZES),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        SIZES
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_layer_end_index": LAYERS - 1},
    ),
    "exaone4": ("exaone4", "exaone4", SIZES | UNTIED | NO_WINDOWS),
    "falcon-7b": (
        "falcon",
        "falcon",
        {k: v for k, v in NEOX.items() if k != "intermediate_size"}
        | {"multi_query": True, "bias": False},
    ),
    "falcon-40b": (
        "falcon",
        "falcon",
        {k: v for k, v in NEOX.items() if k != "intermediate_size"}
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    ),
    "gemma": ("gemma", "gemma", SIZES),
    "gemma2": (
        "gemma2",
        "gemma2",
        SIZES
        | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        SIZES
        | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
        | {"rope_theta": 1e6},
    ),
    "glm4": ("glm4", "glm4", SIZES | UNTIED | {"partial_rotary_factor": 0.5}),
    "glm4_moe": (
        "glm4moe",
        "glm4_moe",
        SIZES
        | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt2": ("gpt2", "gpt2", GPT2),
    "gpt_oss": (
        "gpt-oss",
        "gpt_oss",
        SIZES | UNTIED | MIXTURE | {"sliding_window": WINDOW, "rope_scaling": None},
    ),
    "gpt_bigcode": ("starcoder", "gpt_bigcode", GPT2),
    "gpt_neox": ("gptneox", "gpt_neox", NEOX | UNTIED | {"rotary_pct": 0.5}),
    "granite": ("granite", "granite", SIZES | SCALES),
    "granitemoe": ("granitemoe", "granitemoe", SIZES | SCALES | MIXTURE),
    "lfm2": (
        "lfm2",
        "lfm2",
        SIZES | {"layer_types": LFM2_LAYERS, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "lfm2moe",
        "lfm2_moe",
        SIZES | QWEN_MIXTURE | {"layer_types": LFM2_LAYERS, "num_dense_layers": 1},
    ),
    "llama": ("llama", "llama", SIZES | UNTIED),
    "llama with biases": ("llama", "llama", SIZES | {"attention_bias": True}),
    "mamba": ("mamba", "mamba", MAMBA | {"time_step_rank": 4}),
    "falcon_mamba": (
        "mamba",
        "falcon_mamba",
        MAMBA | {"time_step_rank": 4, "layer_norm_epsilon": 1e-6},
    ),
    "mamba2": ("mamba2", "mamba2", MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "ministral3": ("mistral3", "ministral3", SIZES | UNTIED | {"rope_scaling": MINISTRAL_YARN}),
    "minimax_m2": ("minimax-m2", "minimax_m2", SIZES | MIXTURE),
    "mixtral": ("llama", "mixtral", SIZES | UNTIED | MIXTURE),
    "mpt": (
        "mpt",
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 256, "vocab_size": 288},
    ),
    "nemotron": ("nemotron", "nemotron", SIZES | UNTIED | {"partial_rotary_factor": 0.5}),
    "olmo": ("olmo", "olmo", SIZES | {"clip_qkv": 0.3}),
    "olmo2": ("olmo2", "olmo2", SIZES | UNTIED),
    "olmo3": ("olmo2", "olmo3", SIZES | UNTIED | {"sliding_window": WINDOW}),
    "olmoe": (
        "olmoe",
        "olmoe",
        SIZES | UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "phi": ("phi2", "phi", SIZES | UNTIED | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", "phi3", SIZES | UNTIED),
    "qwen2": ("qwen2", "qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen2_moe": (
        "qwen2moe",
        "qwen2_moe",
        SIZES | UNTIED | QWEN_MIXTURE | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3": ("qwen3", "qwen3", SIZES),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", SIZES | QWEN_MIXTURE | {"norm_topk_prob": True}),
    "qwen3_5": ("qwen35", "qwen3_5_text", SIZES | DELTA),
    "qwen3_5_moe": (
        "qwen35moe",
        "qwen3_5_moe_text",
        SIZES | DELTA | QWEN_MIXTURE | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3_next": (
        "qwen3next",
        "qwen3_next",
        SIZES | DELTA | QWEN_MIXTURE | {"shared_expert_intermediate_size": 40},
    ),
    "seed_oss": (
        "seed_oss",
        "seed_oss",
        SIZES | {"attention_bias": True, "attention_out_bias": False},
    ),
    "smollm3": ("smollm3", "smollm3", SIZES),
    "stablelm": ("stablelm", "stablelm", SIZES | UNTIED | {"partial_rotary_factor": 0.25}),
    "starcoder2": ("starcoder2", "starcoder2", SIZES | {"use_bias": True}),
}
"""Name of a case -> llama.cpp's architecture, the family, and its config.json."""


def tiny_network(model_type: str, keys: dict[str, Any]) -> tuple[Any, Any]:
    """A network with random weights, and its config."""
    cls = config_class(model_type)
    assert cls is not None
    config: Any = cls(**keys)
    torch.manual_seed(0)
    network = family(model_type).build(config)
    small.randomize(network)
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.data *= 0.5
    return network.eval().requires_grad_(False), config


def stored_tensors(network: Any, model_type: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint of Hugging Face, tied ones once."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found: dict[tuple[int, ...], tuple[str, Tensor]] = {}
    for name, binding in bind_names(network, family(model_type).names).items():
        parts = [parameters[x] for x in binding.parameters]
        if any(set(map(id, parts)) <= set(key) for key in found):
            continue
        found[tuple(map(id, parts))] = (name, binding.rule.pack(parts).detach())
    return dict(found.values())


def convert(
    path: Path,
    architecture: str,
    model_type: str,
    config: Any,
    stored: dict[str, Tensor],
    vocabulary: Callable[[Any, int], None] | None = None,
    kind: str = "F32",
    **change: Any,
) -> Path:
    """Write a file as llama.cpp's converter does; matrices in another format if it is given."""

    def add(name: str, x: Tensor) -> None:
        values = x.contiguous().numpy()
        plain = (".ffn_gate_inp.", "position_embd", "conv.weight", "conv1d.weight", ".bias")
        plain += ("ssm_alpha", "ssm_beta")
        if kind != "F32" and x.ndim > 1 and not any(part in name for part in plain):
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(name, values)

    number = next(k for k, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, LAYERS + 4)
    writer = gguf.GGUFWriter(path, architecture)
    find_keys = keys_of_mamba if model_type.endswith(("mamba", "mamba2")) else keys_of
    for method, value in (find_keys(config, model_type) | change).items():
        getattr(writer, method)(value)
    (vocabulary or write_vocabulary)(writer, 288)
    experts: dict[str, dict[int, Tensor]] = {}
    for name, x in stored.items():
        for file_name, value in converted(name, x.float(), architecture, config, table):
            stem, _, index = file_name.partition("#")
            if index:
                experts.setdefault(stem, {})[int(index)] = value
            else:
                add(file_name, value)
    for stem, parts in experts.items():
        add(stem, torch.stack([parts[i] for i in range(len(parts))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(writer: Any, count: int) -> None:
    """Write a byte-level tokenizer whose first tokens are the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*letters, "ab", *(f"<extra{i}>" for i in range(count - 258)), "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (count - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def keys_of(config: Any, model_type: str) -> dict[str, Any]:
    """The methods of `GGUFWriter` that write a config, with their values."""

    def first(*names: str) -> Any:
        return next(
            (getattr(config, n) for n in names if getattr(config, n, None) is not None), None
        )

    size = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head", "n_heads")
    head_dim = first("head_dim") or size // heads
    rotary = first("partial_rotary_factor", "rotary_pct") or 1
    groups = first("num_key_value_heads", "num_kv_heads") or heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        groups = 1
    layers = first("num_hidden_layers", "n_layer", "n_layers")
    keys: dict[str, Any] = {
        "add_block_count": layers,
        "add_context_length": 256,
        "add_embedding_length": size,
        "add_feed_forward_length": first("intermediate_size", "n_inner") or 4 * size,
        "add_head_count": heads,
        "add_head_count_kv": groups,
        "add_layer_norm_rms_eps": first("rms_norm_eps"),
        "add_layer_norm_eps": first(
            "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
        ),
        "add_rope_freq_base": first("rope_theta", "rotary_emb_base"),
        "add_expert_count": first(
            "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
        ),
        "add_expert_used_count": first("num_experts_per_tok", "moe_k"),
        "add_expert_shared_count": first("n_shared_experts", "moe_num_shared_experts"),
        "add_expert_weights_scale": first("routed_scaling_factor"),
        "add_leading_dense_block_count": first(
            "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"
        ),
        "add_interleave_moe_layer_step": first("moe_layer_interval"),
        "add_q_lora_rank": first("q_lora_rank"),
        "add_kv_lora_rank": first("kv_lora_rank"),
        "add_expert_feed_forward_length": first("moe_intermediate_size"),
        "add_expert_shared_feed_forward_length": first("shared_expert_intermediate_size"),
        "add_attn_logit_softcapping": first("attn_logit_softcapping"),
        "add_final_logit_softcapping": first("final_logit_softcapping"),
        "add_embedding_scale": first("embedding_multiplier"),
        "add_residual_scale": first("residual_multiplier"),
        "add_attention_scale": first("attention_multiplier"),
        "add_logit_scale": first("logits_scaling", "logit_scale"),
        "add_clamp_kqv": first("clip_qkv"),
    }
    if model_type in ("bloom", "mpt", "gpt2", "gpt_bigcode"):
        keys.pop("add_rope_freq_base", None)
    else:
        keys["add_rope_dimension_count"] = int(rotary * head_dim)
    if model_type == "mpt":
        keys["add_max_alibi_bias"] = 8.0
    if model_type == "olmo":
        keys["add_layer_norm_eps"] = 1e-5
    if model_type in ("gpt_neox", "stablelm"):
        keys["add_parallel_residual"] = config.use_parallel_residual
    if "gemma" in model_type or model_type in HEAD_DIMS:
        keys |= {"add_key_length": head_dim, "add_value_length": head_dim}
    if model_type in ("gemma2", "gemma3_text", "cohere2", "olmo3"):
        keys["add_sliding_window"] = config.sliding_window
    if model_type == "olmo3":
        keys["add_sliding_window_pattern"] = [(i + 1) % 4 != 0 for i in range(layers)]
    if model_type == "minimax_m2":
        keys |= {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
        keys |= {"add_expert_feed_forward_length": config.intermediate_size}
    keys |= keys_of_newer(config, model_type)
    if model_type == "smollm3":
        assert config.no_rope_layer_interval == 4
    return {k: v for k, v in keys.items() if v is not None}


def keys_of_mamba(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of models without attention."""
    keys = {
        "add_block_count": config.num_hidden_layers,
        "add_context_length": 256,
        "add_embedding_length": config.hidden_size,
        "add_feed_forward_length": 0,
        "add_head_count": 0,
        "add_ssm_conv_kernel": config.conv_kernel,
        "add_ssm_inner_size": 2 * config.hidden_size,
        "add_ssm_state_size": config.state_size,
        "add_layer_norm_rms_eps": config.layer_norm_epsilon,
    }
    if model_type == "mamba2":
        groups = {"add_ssm_group_count": config.n_groups}
        return keys | groups | {"add_ssm_time_step_rank": config.num_heads}
    norms = {"add_ssm_dt_b_c_rms": model_type == "falcon_mamba"}
    return keys | norms | {"add_ssm_time_step_rank": config.time_step_rank}


def keys_of_newer(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of latent attention, of convolutions and of Gated DeltaNet."""
    if model_type in ("deepseek_v2", "deepseek_v3"):
        rope, rank = config.qk_rope_head_dim, config.kv_lora_rank
        keys = {
            "add_head_count_kv": 1,
            "add_rope_dimension_count": rope,
            "add_key_length": rank + rope,
            "add_value_length": rank,
            "add_key_length_mla": config.qk_nope_head_dim + rope,
            "add_value_length_mla": config.v_head_dim,
        }
        if model_type == "deepseek_v3":
            keys |= {"add_expert_weights_norm": True}
            keys |= {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
        return keys
    if model_type == "gpt_oss":
        width = config.intermediate_size
        return {"add_sliding_window": WINDOW, "add_expert_feed_forward_length": width}
    if model_type == "glm4_moe":
        sigmoid = {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
        return sigmoid | {"add_expert_weights_norm": True}
    if model_type == "ernie4_5_moe":  # as the makers' first code has it
        return {"add_expert_shared_feed_forward_length": config.moe_intermediate_size * 2}
    if model_type == "ministral3":
        return {
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": 16.0,
            "add_rope_scaling_orig_ctx_len": 16,
            "add_rope_scaling_yarn_beta_fast": 32.0,
            "add_rope_scaling_yarn_beta_slow": 1.0,
            "add_rope_scaling_yarn_log_mul": 1.0,
            "add_attn_temperature_scale": 0.1,
        }
    if model_type.startswith("lfm2"):
        sigmoid = {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
        return (sigmoid if model_type == "lfm2_moe" else {}) | {
            "add_head_count_kv": [2 * (x != "conv") for x in config.layer_types],
            "add_shortconv_l_cache": config.conv_L_cache,
            "add_layer_norm_rms_eps": config.norm_eps,
            "add_layer_norm_eps": None,
        }
    if model_type == "qwen3_next" or "qwen3_5" in model_type:
        heads = config.linear_num_value_heads
        return {
            "add_ssm_conv_kernel": config.linear_conv_kernel_dim,
            "add_ssm_state_size": config.linear_key_head_dim,
            "add_ssm_group_count": config.linear_num_key_heads,
            "add_ssm_time_step_rank": heads,
            "add_ssm_inner_size": config.linear_value_head_dim * heads,
            "add_full_attention_interval": config.full_attention_interval,
            "add_rope_dimension_sections": [2, 1, 1, 0] if "qwen3_5" in model_type else None,
        }
    return {}


def of_recurrences(name: str, x: Tensor, architecture: str, config: Any) -> Any:
    """Yield the names and values of layers with a state, before their names are looked up."""
    if name.endswith("A_log"):
        x = -x.exp()
    if architecture == "mamba2" and name.endswith((".A_log", ".D")):
        x = x[:, None]
    if architecture == "mamba2" and name.endswith("mixer.norm.weight"):
        x = x.unflatten(0, (config.n_groups, -1))
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        x = x.squeeze(1)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("in_proj_qkvz.weight"):
        G, r = config.linear_num_key_heads, config.linear_num_value_heads // 2
        D, E = config.linear_key_head_dim, config.linear_value_head_dim
        q, k, v, z = x.unflatten(0, (G, -1)).split([D, D, r * E, r * E], 1)
        yield (
            name.replace("qkvz", "qkv"),
            torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]),
        )
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
        return
    if architecture.startswith("qwen35") and ".linear_attn." in name:
        x = tiled(name, x, config)
    yield name, x


def tiled(name: str, x: Tensor, config: Any) -> Tensor:
    """Value heads in the order in which head i uses key head i % G."""
    G, N = config.linear_num_key_heads, config.linear_num_value_heads
    E = config.linear_value_head_dim

    def order(values: Tensor) -> Tensor:
        return values.unflatten(0, (G, N // G, -1)).transpose(0, 1).flatten(0, 2)

    if ".out_proj." in name:
        return order(x.T).T
    if ".in_proj_qkv." in name or ".conv1d." in name:
        return torch.cat([x[: -N * E], order(x[-N * E :])])
    return x if ".norm." in name else order(x)


def of_latents(name: str, x: Tensor, config: Any) -> Any:
    """Yield the two matrices of DeepSeek's joined one."""
    H, D = config.num_attention_heads, config.qk_nope_head_dim
    k, v = x.unflatten(0, (H, -1)).split([D, config.v_head_dim], 1)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", v


def of_gpt_oss(name: str, x: Tensor) -> Any:
    """Yield the matrices of experts that gpt-oss stores with alternating columns."""
    end = "bias" if name.endswith("_bias") else "weight"
    stem = f"blk.{name.split('.')[2]}.ffn"
    x = x.mT if end == "weight" else x
    if "gate_up_proj" in name:
        yield f"{stem}_gate_exps.{end}", x[:, ::2]
        yield f"{stem}_up_exps.{end}", x[:, 1::2]
    else:
        yield f"{stem}_down_exps.{end}", x


def of_own_layout(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """The names and values of tensors that only one family has, or None."""
    if architecture == "qwen35moe" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return ()  # the same experts once more
    if any(part in name for part in (".mixer.", ".linear_attn.", ".conv.conv.")):
        found = of_recurrences(name, x, architecture, config)
        dotted = ((n if n.endswith(("weight", "bias")) else f"{n}.", value) for n, value in found)
        parts = ((n.rpartition("."), value) for n, value in dotted)
        return [
            (f"{table.get_name(stem)}.{end}".removesuffix("."), value)
            for (stem, _, end), value in parts
        ]
    if ".kv_b_proj." in name:
        return of_latents(name, x, config)
    if architecture == "gpt-oss" and ".experts." in name:
        return of_gpt_oss(name, x)
    return None


def of_expert(name: str) -> tuple[str, str]:
    """The name of the matrix of all experts, and "#" with the number of the expert if it is one."""
    head, _, tail = name.partition(".experts.")
    number, _, part = tail.partition(".")
    return (f"{head}.experts.{part}", f"#{number}") if number.isdigit() else (name, "")


def converted(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """Yield the names and values in the file of a stored tensor; "#3" is that of an expert."""
    if (own := of_own_layout(name, x, architecture, config, table)) is not None:
        yield from own
        return
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    groups = getattr(config, "num_key_value_heads", heads)
    if architecture in ("arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3"):
        if ".q_proj." in name:
            x = permuted(x, heads)
        elif ".k_proj." in name:
            x = permuted(x, groups)
    if ".query_key_value." in name:
        groups = getattr(config, "num_kv_heads", None) or heads
        groups = 1 if getattr(config, "multi_query", False) and groups == heads else groups
        by_group = x.unflatten(0, (groups, heads // groups + 2, -1))
        parts = (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])
        x = torch.cat([part.flatten(0, 2) for part in parts])
    offset = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
    if architecture in offset and name.endswith("norm.weight"):
        x = x + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        x = x.T
    if name.endswith("block_sparse_moe.input_linear.weight"):
        layer = name.split(".")[2]
        gate, up = x.chunk(2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        return
    if name.startswith(("bert.pooler", "cls.")):
        return
    x = x.flatten() if "e_score_correction" in name else x
    name, index = of_expert(name)
    for ours, theirs in SPELLINGS.items():
        name = name.replace(ours, theirs)
    new = table.get_name(name, try_suffixes=(".weight", ".bias"))
    for prefix in ("transformer.", "bert.", "model."):
        new = new or table.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
    assert new is not None, name
    yield new + index, x


def permuted(x: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of llama.cpp."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


if __name__ == "__main__":
    for case, (architecture, model_type, keys) in CASES.items():
        made, its_config = tiny_network(model_type, keys)
        file = Path(sys.argv[1]) / f"{case.replace(' ', '-')}.gguf"
        convert(file, architecture, model_type, its_config, stored_tensors(made, model_type))
