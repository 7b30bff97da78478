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
from regard.configs.gemma4 import ROPES
from regard.models.checkpoint.family import bind_names
from regard.models.families import family
from regard.positions import Llama3, rope_frequencies
from tests.models import small
from tests.models.checkpoint.gguf_keys import keys_of, keys_of_mamba, keys_of_t5

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

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = ("full_attention", "sliding_attention") * 2
ROPES_OF_KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
LLAMA3_OF_STEP = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}
LLAMA3_OF_STEP |= {"high_freq_factor": 32.0, "original_max_position_embeddings": 131072}
ROPES_OF_STEP = {
    "full_attention": ROPES_OF_KINDS["full_attention"] | LLAMA3_OF_STEP | {"rope_theta": 5e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}

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
KIMI_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
KIMI_SIZES += " num_key_value_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
KIMI_SIZES += " moe_intermediate_size"
SPELLINGS = {
    "e_score_correction_bias": "e_score_correction.bias",
    ".sinks": ".sinks.weight",
    ".expert_bias": ".expert_bias.bias",
    ".router_bias": ".router_bias.bias",
    ".attention_sink_bias": ".attention_sink_bias.weight",
}
PAIRS = ("arcee", "granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3")
PAIRS += ("olmo", "smollm3")
"""Architectures whose rows of queries and keys change their order."""
SAME_NAMES = {"deepseek32": "glm-dsa", "deepseek4": "deepseek2", "granite_swa": "granite"}
SAME_NAMES |= {"minimax-01": "minimax-m2", "hy_v3": "exaone-moe", "minimax-m3": "exaone-moe"}
"""Architectures that the library does not know -> those with the same names of tensors."""
LFM2_LAYERS = ("conv", "full_attention", "conv", "full_attention")
MAMBA = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": LAYERS, "state_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
V4 = {
    "vocab_size": 288,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,  # llama.cpp stops if it is that of the indexer
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "index_n_heads": 9,
    "index_head_dim": 64,
    "index_topk": 3,
    "sliding_window": 6,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.8,
    "rope_scaling": YARN,
    "layer_types": tuple(
        f"{x}_attention"
        for x in ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse")
    ),
    "mlp_layer_types": ("hash_moe", "hash_moe", "moe", "moe"),
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

GEMMA = SIZES | {"sliding_window": WINDOW, "vocab_size_per_layer_input": 288}
GEMMA4 = GEMMA | {
    "layer_types": ("sliding_attention", "full_attention") * 2,
    "global_head_dim": 32,
    "rope_parameters": ROPES,
    "final_logit_softcapping": 30.0,
}
HYBRID_LAYERS = ("mamba", "attention", "mamba", "attention")
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
BLOCKS = {"layers_block_type": ("mamba", "attention", "mlp", "mamba")}
NEMOTRON_H = NO_HEAD_DIM | {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16}
NEMOTRON_H |= {"n_groups": 2, "ssm_state_size": 16}
T5 = {"vocab_size": 288, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 2, "num_heads": 4}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("apertus", "apertus", SIZES | UNTIED),
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
    "deepseek_v3 of groups, with yarn": (
        "deepseek2",
        "deepseek_v3",
        LATENT
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "n_routed_experts": 8}
        | {"rope_scaling": LATENT_YARN},
    ),
    "deepseek_v32": (
        "deepseek32",
        "deepseek_v32",
        LATENT
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_scaling": LATENT_YARN}
        | {"index_topk": 7, "index_n_heads": 9, "index_head_dim": 64},
    ),
    "glm_moe_dsa": (
        "glm-dsa",
        "glm_moe_dsa",
        LATENT
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_scaling": None}
        | {"index_topk": 7, "index_n_heads": 9, "index_head_dim": 64}
        | {"indexer_types": ("full", "shared") * 2},
    ),
    "deepseek_v4": ("deepseek4", "deepseek_v4", V4),
    "ernie4_5": ("ernie4_5", "ernie4_5", SIZES),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        SIZES
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_layer_end_index": LAYERS - 1},
    ),
    "exaone4": ("exaone4", "exaone4", SIZES | UNTIED | NO_WINDOWS),
    "exaone_moe": (
        "exaone-moe",
        "exaone_moe",
        SIZES
        | UNTIED
        | QWEN_MIXTURE
        | {"sliding_window": WINDOW, "first_k_dense_replace": 1}
        | {"layer_types": ("sliding_attention", "full_attention") * 2},
    ),
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
    "falcon_h1": (
        "falcon-h1",
        "falcon_h1",
        SIZES
        | MAMBA2
        | {"mamba_d_ssm": 128, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False},
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
    "gemma3n": (  # llama.cpp has these layers, ranks and widths written in its code
        "gemma3n",
        "gemma3n_text",
        GEMMA
        | {"num_hidden_layers": 25, "num_kv_shared_layers": 5}
        | {"activation_sparsity_pattern": (0.95,) * 10 + (0.0,) * 15, "rope_theta": 1e6}
        | {"layer_types": (*(("sliding_attention",) * 4), "full_attention") * 5},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"use_double_wide_mlp": True},
    ),
    "gemma4 with experts": (
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
    ),
    "glm": ("chatglm", "glm", SIZES | UNTIED | {"partial_rotary_factor": 0.5}),
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
    "granite_swa": (
        "granite_swa",
        "granite_swa",
        SIZES
        | SCALES
        | {"sliding_window": WINDOW, "layer_rope_theta": (10000.0, 0.0) * 2}
        | {"layer_types": ("full_attention", "sliding_attention") * 2},
    ),
    "granitemoe": ("granitemoe", "granitemoe", SIZES | SCALES | MIXTURE),
    "granitemoehybrid": (
        "granitehybrid",
        "granitemoehybrid",
        SIZES
        | SCALES
        | MAMBA2
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {"layer_types": HYBRID_LAYERS, "position_embedding_type": "nope"},
    ),
    "granitemoehybrid with experts": (
        "granitehybrid",
        "granitemoehybrid",
        SIZES
        | SCALES
        | MAMBA2
        | MIXTURE
        | {"shared_intermediate_size": 40}
        | {"layer_types": HYBRID_LAYERS, "position_embedding_type": "nope"},
    ),
    "hunyuan_v1_dense": ("hunyuan-dense", "hunyuan_v1_dense", SIZES | UNTIED),
    "hy_v3": (
        "hy_v3",
        "hy_v3",
        SIZES | UNTIED | QWEN_MIXTURE | {"num_shared_experts": 2, "router_scaling_factor": 1.5},
    ),
    "jamba": (
        "jamba",
        "jamba",
        NO_HEAD_DIM
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
        | {"mamba_dt_rank": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "kimi_linear": (
        "kimi-linear",
        "kimi_linear",
        {k: x for k, x in LATENT.items() if k in KIMI_SIZES.split()}
        | {"num_experts": 4, "num_experts_per_tok": 2, "linear_head_dim": 16}
        | {"linear_num_heads": 4, "layer_types": ("linear_attention", "full_attention") * 2},
    ),
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
    "llama4": (
        "llama4",
        "llama4_text",
        SIZES
        | UNTIED
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        | {"intermediate_size_mlp": 80, "attention_chunk_size": 8192},
    ),
    "mamba": ("mamba", "mamba", MAMBA | {"time_step_rank": 4}),
    "falcon_mamba": (
        "mamba",
        "falcon_mamba",
        MAMBA | {"time_step_rank": 4, "layer_norm_epsilon": 1e-6},
    ),
    "mamba2": ("mamba2", "mamba2", MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "ministral3": ("mistral3", "ministral3", SIZES | UNTIED | {"rope_scaling": MINISTRAL_YARN}),
    "minimax": (
        "minimax-01",
        "minimax",
        SIZES
        | UNTIED
        | MIXTURE
        | {"num_hidden_layers": 8, "partial_rotary_factor": 0.5}
        | {"layer_types": (*(("linear_attention",) * 7), "full_attention")}
        | {f"{part}_alpha_factor": 2.5 for part in ("full_attn", "linear_attn", "mlp")},
    ),
    "minimax_m2": ("minimax-m2", "minimax_m2", SIZES | MIXTURE),
    "mimo_v2_flash": (
        "mimo2",
        "mimo_v2_flash",
        SIZES
        | UNTIED
        | ROUTED
        | {"num_key_value_heads": 1, "v_head_dim": 12, "sliding_window": WINDOW}
        | {"layer_types": WINDOWS, "rope_parameters": ROPES_OF_KINDS},
    ),
    "minimax_m3": (
        "minimax-m3",
        "minimax_m3_vl_text",
        SIZES
        | UNTIED
        | MIXTURE
        | {"intermediate_size": 32, "dense_intermediate_size": 80, "shared_intermediate_size": 32}
        | {"layer_types": ("full_attention", *(("minimax_m3_sparse",) * 3))}
        | {"mlp_layer_types": ("dense", *(("sparse",) * 3)), "partial_rotary_factor": 0.5}
        | {"index_n_heads": 2, "index_head_dim": 24, "index_block_size": 4}
        | {"index_topk_blocks": 3},
    ),
    "mixtral": ("llama", "mixtral", SIZES | UNTIED | MIXTURE),
    "mpt": (
        "mpt",
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 256, "vocab_size": 288},
    ),
    "nemotron": ("nemotron", "nemotron", SIZES | UNTIED | {"partial_rotary_factor": 0.5}),
    "nemotron_h": ("nemotron_h", "nemotron_h", NEMOTRON_H | BLOCKS),
    "nemotron_h with experts": (
        "nemotron_h_moe",
        "nemotron_h",
        NEMOTRON_H
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 40}
        | {"layers_block_type": ("mamba", "attention", "moe", "mamba")},
    ),
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
    "phimoe": (
        "phimoe",
        "phimoe",
        SIZES | UNTIED | {"num_local_experts": 4, "lm_head_bias": True} | {"attention_bias": True},
    ),
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
    "step3p5": (
        "step35",
        "step3p5",
        SIZES
        | UNTIED
        | ROUTED
        | {"num_sliding_attention_heads": 6, "share_expert_dim": 40, "sliding_window": WINDOW}
        | {"mlp_layer_types": ("dense", *(("sparse",) * 3)), "moe_router_scaling_factor": 1.5}
        | {"swiglu_limits": (0.0, 0.3, 0.0, 0.2), "swiglu_limits_shared": (0.4, 0.0, 0.0, 0.5)}
        | {"layer_types": WINDOWS, "rope_parameters": ROPES_OF_STEP},
    ),
    "t5": ("t5", "t5", T5),
    "t5 of version 1.1": (
        "t5",
        "t5",
        T5
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        | {"scale_decoder_outputs": False, "num_decoder_layers": 1},
    ),
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
        if not parameter.is_floating_point():  # a table of experts
            parameter.data.random_(0, keys["n_routed_experts"])
        elif parameter.ndim == 2:
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


def unread_maps(stored: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Key and value maps of layers that read those of earlier ones: released files have them."""
    kinds = getattr(config, "layer_types", None) or ()
    first = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {
        f"model.layers.{i}.self_attn.{part}.weight": -value
        for i in range(first, len(kinds))
        for part in ("k_proj", "v_proj", "k_norm")
        if (value := stored.get(f"model.layers.{kinds.index(kinds[i])}.self_attn.{part}.weight"))
        is not None
    }


def convert(
    path: Path,
    architecture: str,
    model_type: str,
    config: Any,
    stored: dict[str, Tensor],
    vocabulary: Callable[[Any, int], None] | None = None,
    kind: str = "F32",
    experts_kind: str | None = None,
    divided: bool = True,
    **change: Any,
) -> Path:
    """Write a file as llama.cpp's converter does; matrices, or experts, in another format if it is
    given, and the latent matrix of DeepSeek divided in two or as it was.
    """

    def add(name: str, x: Tensor) -> None:
        x = x.int() if "tid2eid" in name else x
        kind = experts_kind if experts_kind and name.endswith("_exps.weight") else its_kind
        values = x.contiguous().numpy()
        plain = (".ffn_gate_inp.", "position_embd", "conv.weight", "conv1d.weight", ".bias")
        plain += ("ssm_alpha", "ssm_beta", "attn_rel_b", "hc_", "_ape", "tid2eid")
        if kind != "F32" and x.ndim > 1 and not any(part in name for part in plain):
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(name, values)

    its_kind = kind
    known_as = SAME_NAMES.get(architecture, architecture)
    number = next(k for k, name in MODEL_ARCH_NAMES.items() if name == known_as)
    table = gguf.get_tensor_name_map(number, 32)
    writer = gguf.GGUFWriter(path, architecture)
    find_keys = keys_of_mamba if model_type.endswith(("mamba", "mamba2")) else keys_of
    find_keys = keys_of_t5 if model_type == "t5" else find_keys
    for method, value in (find_keys(config, model_type) | change).items():
        if value is not None and method.startswith("add_"):
            getattr(writer, method)(value)
        elif value is not None:
            kind = {int: "uint32", float: "float32", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(f"{architecture}.{method}", value)
    (vocabulary or write_vocabulary)(writer, 288)
    experts: dict[str, dict[int, Tensor]] = {}
    for name, x in (stored | unread_maps(stored, config)).items():
        if ".kv_b_proj." in name and not divided:
            add(f"blk.{name.split('.')[2]}.attn_kv_b.weight", x.float())
            continue
        for file_name, value in converted(name, x.float(), architecture, config, table):
            stem, _, index = file_name.partition("#")
            if index:
                experts.setdefault(stem, {})[int(index)] = value
            else:
                add(file_name, value)
    write_further(writer, architecture, config, stored)
    for stem, parts in experts.items():
        add(stem, torch.stack([parts[i] for i in range(len(parts))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_further(writer: Any, architecture: str, config: Any, stored: dict[str, Tensor]) -> None:
    """Write what is no stored tensor: numbers of activations, and which dims rotate."""
    if architecture == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(stored[f"model.layers.{i}.mlp.act_fn.{part}"]) for i in range(LAYERS)]
            getattr(writer, f"add_xielu_{part}")(values)
    if architecture == "step35":  # as if all dims rotated
        base, D = config.rope_parameters["full_attention"]["rope_theta"], config.head_dim
        scaling = Llama3(2.0, 1.0, 32.0, 131072)
        scaled = rope_frequencies(D, base, scaling=scaling).inv_freq
        factors = rope_frequencies(D, base).inv_freq / scaled
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    if architecture == "gemma4":
        factors = torch.ones(config.global_head_dim // 2)
        factors[config.global_head_dim // 8 :] = 1e30
        writer.add_tensor("rope_freqs.weight", factors.numpy())


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


def of_recurrences(name: str, x: Tensor, architecture: str, config: Any) -> Any:
    """Yield the names and values of layers with a state, before their names are looked up."""
    if name.endswith("A_log"):
        x = -x.exp()
    is_mamba2 = architecture not in ("mamba", "jamba") and ".linear_attn." not in name
    if is_mamba2 and name.endswith((".A_log", ".D")):
        x = x[:, None]
    if is_mamba2 and name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        x = x.unflatten(0, (groups, -1))
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


def of_shared(name: str, x: Tensor, config: Any) -> Any:
    """Yield the matrices of Granite's network for all tokens, beside experts or alone."""
    end = "_shexp" if config.num_local_experts else ""
    parts = {"gate": x.chunk(2)[0], "up": x.chunk(2)[1]} if "input" in name else {"down": x}
    for part, value in parts.items():
        yield f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight", value


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


def of_gemma(name: str, x: Tensor, table: Any) -> Any:
    """The tensors of Gemma 3n and 4 whose names the library lacks, or None."""
    if "altup_projections" in name or "altup_unembed" in name:
        file = "altup_unembd_proj" if "unembed" in name else "altup_proj"
        return [(f"{file}.weight#{name.split('.')[2]}", x)]
    if name.endswith((".router.scale", ".router.per_expert_scale")):
        part = "ffn_gate_inp" if name.endswith(".router.scale") else "ffn_down_exps"
        return [(f"blk.{name.split('.')[2]}.{part}.scale", x)]
    if name.endswith(("_scale", "layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        return [(f"{table.get_name(name)}.weight", x)]
    return None


V4_NAMES = {
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
}
"""Name of a part of a layer of DeepSeek-V4 -> its name in the file."""


def of_v4(name: str, x: Tensor) -> Any:
    """The names and values of DeepSeek-V4, which the library does not know."""
    if not name.startswith("layers."):
        top = {"embed.weight": "token_embd", "norm.weight": "output_norm", "head.weight": "output"}
        return [(f"{top.get(name, name.replace('hc_head', 'output_hc'))}.weight", x)]
    _, layer, part = name.split(".", 2)
    if part.startswith("ffn.experts."):
        _, _, index, w, _ = part.split(".")
        of_w = {"w1": "gate", "w2": "down", "w3": "up"}[w]
        return [(f"blk.{layer}.ffn_{of_w}_exps.weight#{index}", x)]
    if part == "ffn.gate.bias":
        return [(f"blk.{layer}.exp_probs_b.bias", x)]
    part = part.removesuffix(".weight")
    return [(f"blk.{layer}.{V4_NAMES.get(part, part)}.weight", x)]


def of_own_layout(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """The names and values of tensors that only one family has, or None."""
    if architecture.startswith("nemotron_h"):
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if architecture == "qwen35moe" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return ()  # the same experts once more
    if any(part in name for part in (".mixer.", ".mamba.", ".linear_attn.", ".conv.conv.")):
        found = of_recurrences(name, x, architecture, config)
        dotted = ((n if n.endswith(("weight", "bias")) else f"{n}.", value) for n, value in found)
        parts = ((n.rpartition("."), value) for n, value in dotted)
        if ".mixer.experts." in name:
            name, index = of_expert(name.replace("backbone", "model").replace("mixer", "mlp"))
            return [(table.get_name(name, try_suffixes=(".weight",)) + index, x)]
        return [
            (f"{table.get_name(stem)}.{end}".removesuffix("."), value)
            for (stem, _, end), value in parts
        ]
    if architecture == "kimi-linear" and name.endswith((".A_log", ".dt_bias", "_conv1d.weight")):
        x = -x.exp() if name.endswith(".A_log") else x
        x = x.squeeze(1)[None, :, None] if "conv1d" in name else x
        name = name.replace(".dt_bias", ".dt_proj.bias")
        return [(table.get_name(name, try_suffixes=(".weight", ".bias")), x)]
    if ".act_fn." in name:
        return ()  # in the metadata
    if "gemma" in architecture and (own := of_gemma(name, x, table)) is not None:
        return own
    if ".shared_mlp." in name and architecture != "hy_v3":
        return of_shared(name, x, config)
    if architecture == "llama4" and ".experts." in name:
        layer, x = name.split(".")[2], x.mT
        parts = (
            zip(("gate", "up"), x.chunk(2, 1), strict=True) if "gate_up" in name else [("down", x)]
        )
        return [(f"blk.{layer}.ffn_{part}_exps.weight", value) for part, value in parts]
    if ".kv_b_proj." in name:
        return of_latents(name, x, config)
    if architecture == "gpt-oss" and ".experts." in name:
        return of_gpt_oss(name, x)
    return None


def of_own_names(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """The same, also of architectures that the library does not know."""
    if architecture == "deepseek4":
        return of_v4(name, x)
    if architecture == "minimax-m3" and (own := of_minimax_m3(name, x)):
        return own
    if architecture == "hy_v3" and name.endswith(".expert_bias"):
        return [(table.get_name(name), x)]
    if architecture == "granite_swa" and name.endswith(".sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", x)]
    if architecture == "minimax-01" and (part := MINIMAX.get(name.split(".")[-2])):
        return [(f"blk.{name.split('.')[2]}.{part}.weight", x)] if ".self_attn." in name else None
    return of_own_layout(name, x, architecture, config, table)


def of_minimax_m3(name: str, x: Tensor) -> Any:
    """The indexers, and the parts of the matrices of networks, as the makers' files have them."""
    layer, kind = name.split(".")[2:3], name.removesuffix(".weight").split(".")[-1]
    if ".indexer." in name:
        return [(f"blk.{layer[0]}.indexer.{kind}.weight", x + 1 if kind.endswith("norm") else x)]
    if ".mlp." not in name or kind not in ("gate_up_proj", "down_proj"):
        return None
    end = "_exps" if ".experts." in name else "_shexp" if ".shared_experts." in name else ""
    parts = zip(("gate", "up"), x.chunk(2, -2), strict=True) if "up" in kind else [("down", x)]
    return [(f"blk.{layer[0]}.ffn_{part}{end}.weight", value) for part, value in parts]


MINIMAX = {"qkv_proj": "attn_qkv", "output_gate": "attn_gate"}
MINIMAX |= {"norm": "attn_norm_2", "out_proj": "attn_output"}


def of_expert(name: str) -> tuple[str, str]:
    """The name of the matrix of all experts, and "#" with the number of the expert if it is one."""
    head, _, tail = name.partition(".experts.")
    number, _, part = tail.partition(".")
    return (f"{head}.experts.{part}", f"#{number}") if number.isdigit() else (name, "")


def converted(name: str, x: Tensor, architecture: str, config: Any, table: Any) -> Any:
    """Yield the names and values in the file of a stored tensor; "#3" is that of an expert."""
    if (own := of_own_names(name, x, architecture, config, table)) is not None:
        yield from own
        return
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    groups = getattr(config, "num_key_value_heads", heads)
    if architecture in PAIRS:
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
    offset += ("minimax-m3", "step35")
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
