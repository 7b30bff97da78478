"""The keys that llama.cpp's converter writes for a config: methods of `GGUFWriter`, and values."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from regard.configs.expert_layers import ExpertLayersConfig

HEAD_DIMS = (
    *("falcon_h1", "hunyuan_v1_dense", "llama4_text", "nemotron_h", "exaone_moe"),
    *("glm4_moe", "gpt_oss", "llama", "ministral3", "mixtral", "qwen3", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next"),
)
"""Families whose files have the size of a head."""
FIELDS = {
    "add_layer_norm_rms_eps": "rms_norm_eps",
    "add_layer_norm_eps": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "add_rope_freq_base": "rope_theta rotary_emb_base",
    "add_expert_count": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "add_expert_used_count": "num_experts_per_tok moe_k",
    "add_expert_shared_count": "n_shared_experts moe_num_shared_experts",
    "add_expert_weights_scale": "routed_scaling_factor",
    "add_leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "add_interleave_moe_layer_step": "moe_layer_interval",
    "add_q_lora_rank": "q_lora_rank",
    "add_kv_lora_rank": "kv_lora_rank",
    "add_expert_feed_forward_length": "moe_intermediate_size",
    "add_expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "add_attn_logit_softcapping": "attn_logit_softcapping",
    "add_final_logit_softcapping": "final_logit_softcapping",
    "add_embedding_scale": "embedding_multiplier",
    "add_residual_scale": "residual_multiplier",
    "add_attention_scale": "attention_multiplier",
    "add_logit_scale": "logits_scaling logit_scale",
    "add_clamp_kqv": "clip_qkv",
}
"""A method -> the names that families have for its value."""
SIGMOID = {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}


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
        **{method: first(*names.split()) for method, names in FIELDS.items()},
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
    if model_type in ("gemma2", "gemma3_text", "cohere2", "olmo3", "granite_swa"):
        keys["add_sliding_window"] = config.sliding_window
    if model_type == "olmo3":
        keys["add_sliding_window_pattern"] = [(i + 1) % 4 != 0 for i in range(layers)]
    if model_type == "minimax_m2":
        keys |= SIGMOID | {"add_expert_feed_forward_length": config.intermediate_size}
    keys |= keys_of_layers(config, model_type) | keys_of_newer(config, model_type)
    keys |= keys_of_hybrids(config, model_type)
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


def keys_of_t5(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of T5, which has no rotary positions."""
    return {
        "add_context_length": 512,
        "add_embedding_length": config.d_model,
        "add_feed_forward_length": config.d_ff,
        "add_block_count": config.num_layers,
        "add_decoder_block_count": config.num_decoder_layers,
        "add_head_count": config.num_heads,
        "add_key_length": config.d_kv,
        "add_value_length": config.d_kv,
        "add_layer_norm_eps": config.layer_norm_epsilon,
        "add_layer_norm_rms_eps": config.layer_norm_epsilon,
        "add_relative_attn_buckets_count": config.relative_attention_num_buckets,
        "add_decoder_start_token_id": 0,
    }


def keys_of_hybrids(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of models with Mamba and attention."""
    layers, groups = config.num_hidden_layers if hasattr(config, "num_hidden_layers") else 0, 2
    if model_type == "jamba":
        return {
            "add_head_count_kv": [groups * (i % 2) for i in range(layers)],
            "add_ssm_conv_kernel": config.mamba_d_conv,
            "add_ssm_inner_size": config.mamba_expand * config.hidden_size,
            "add_ssm_state_size": config.mamba_d_state,
            "add_ssm_time_step_rank": config.mamba_dt_rank,
            "add_rope_freq_base": None,
            "add_rope_dimension_count": None,
        }
    if model_type == "nemotron_h":
        kinds = config.layers_block_type
        keys = {
            "add_head_count_kv": [groups * (x == "attention") for x in kinds],
            "add_feed_forward_length": [
                config.intermediate_size * (x in ("mlp", "moe")) for x in kinds
            ],
            "add_ssm_conv_kernel": config.conv_kernel,
            "add_ssm_inner_size": config.mamba_num_heads * config.mamba_head_dim,
            "add_ssm_state_size": config.ssm_state_size,
            "add_ssm_group_count": config.n_groups,
            "add_ssm_time_step_rank": config.mamba_num_heads,
            "add_layer_norm_rms_eps": config.layer_norm_epsilon,
            "add_rope_freq_base": None,
            "add_rope_scaling_finetuned": False,
        }
        if "moe" in kinds:
            return keys | {
                "add_expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
                "add_expert_shared_count": 1,
                "add_expert_weights_norm": True,
                "add_expert_group_count": 1,
            }
        return keys | dict.fromkeys(
            [
                *("add_expert_count", "add_expert_used_count", "add_expert_weights_scale"),
                "add_expert_feed_forward_length",
            ]
        )
    if model_type == "gemma3n_text":
        normal = torch.distributions.Normal(0, 1)
        return {
            "add_sliding_window": config.sliding_window,
            "add_sliding_window_pattern": [x == "sliding_attention" for x in config.layer_types],
            "add_altup_active_idx": 0,
            "add_altup_num_inputs": config.altup_num_inputs,
            "add_embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "add_shared_kv_layers": config.num_kv_shared_layers,
            "add_activation_sparsity_scale": [
                float(normal.icdf(torch.tensor(x))) for x in config.activation_sparsity_pattern
            ],
        }
    if model_type == "gemma4_text":
        windows = [x == "sliding_attention" for x in config.layer_types]
        first_shared = layers - config.num_kv_shared_layers
        wide = config.use_double_wide_mlp
        keys = {
            "add_sliding_window": config.sliding_window,
            "add_sliding_window_pattern": windows,
            "add_embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "add_shared_kv_layers": config.num_kv_shared_layers,
            "add_key_length": config.global_head_dim,
            "add_value_length": config.global_head_dim,
            "add_key_length_swa": config.head_dim,
            "add_value_length_swa": config.head_dim,
            "add_rope_dimension_count": config.global_head_dim,
            "add_rope_dimension_count_swa": config.head_dim,
            "add_rope_freq_base": 1e6,
            "add_rope_freq_base_swa": 1e4,
        }
        if wide:
            sizes = [config.intermediate_size * (1 + (i >= first_shared)) for i in range(layers)]
            keys["add_feed_forward_length"] = sizes
        if config.num_global_key_value_heads:
            keys["add_head_count_kv"] = [2 if x else 1 for x in windows]
        if config.num_experts:
            keys["add_expert_used_count"] = config.top_k_experts
        return keys
    if model_type == "kimi_linear":
        rope, rank = config.qk_rope_head_dim, config.kv_lora_rank
        return {
            "add_head_count_kv": [int("full" in x) for x in config.layer_types],
            "add_rope_dimension_count": rope,
            "add_key_length": rank + rope,
            "add_key_length_mla": config.qk_nope_head_dim + rope,
            "add_value_length_mla": config.v_head_dim,
            "add_kda_head_dim": config.linear_head_dim,
            "add_ssm_conv_kernel": config.linear_conv_kernel_dim,
            **SIGMOID,
            "add_expert_used_count": config.num_experts_per_tok,
            "add_expert_shared_count": config.n_shared_experts,
            "add_rope_freq_base": 10000.0,
        }
    if model_type not in ("falcon_h1", "granitemoehybrid"):
        return {}
    keys = {
        "add_ssm_conv_kernel": config.mamba_d_conv,
        "add_ssm_inner_size": config.mamba_n_heads * config.mamba_d_head,
        "add_ssm_state_size": config.mamba_d_state,
        "add_ssm_group_count": config.mamba_n_groups,
        "add_ssm_time_step_rank": config.mamba_n_heads,
    }
    if model_type == "granitemoehybrid":
        keys["add_head_count_kv"] = [groups * (x == "attention") for x in config.layer_types]
        keys["add_expert_shared_feed_forward_length"] = config.shared_intermediate_size
        keys["add_rope_scaling_finetuned"] = False
    return keys


def keys_of_latents(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of DeepSeek's attention, experts and rotation."""
    if model_type == "deepseek_v4":
        return keys_of_v4(config)
    rope, rank = config.qk_rope_head_dim, config.kv_lora_rank
    keys = {
        "add_head_count_kv": 1,
        "add_rope_dimension_count": rope,
        "add_key_length": rank + rope,
        "add_value_length": rank,
        "add_key_length_mla": config.qk_nope_head_dim + rope,
        "add_value_length_mla": config.v_head_dim,
    }
    if model_type in ("deepseek_v32", "glm_moe_dsa"):
        keys |= {"add_indexer_head_count": config.index_n_heads}
        keys |= {"add_indexer_key_length": config.index_head_dim}
        keys |= {"add_indexer_top_k": config.index_topk}
    if model_type == "glm_moe_dsa":
        keys |= {"attention.indexer.types": [x == "full" for x in config.indexer_types]}
    if model_type in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        keys |= SIGMOID | {"add_expert_weights_norm": True}
        keys |= {"add_expert_group_count": config.n_group}
        keys |= {"add_expert_group_used_count": config.topk_group}
    if config.rope_scaling:
        keys |= keys_of_yarn(config.rope_scaling)
        keys["add_rope_scaling_yarn_log_mul"] = 0.1 * config.rope_scaling["mscale_all_dim"]
    return keys


def keys_of_layers(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of families with layers of several kinds: Granite Swash's windows and positions, and
    the one factor of MiniMax-Text-01.
    """
    if isinstance(config, ExpertLayersConfig):
        return keys_of_expert_layers(config, model_type)
    if model_type == "minimax":
        head = config.head_dim
        factor = {"add_residual_scale": config.mlp_alpha_factor}
        return factor | {"add_key_length": head, "add_value_length": head}
    if model_type != "granite_swa":
        return {}
    return {
        "add_sliding_window_pattern": [x == "sliding_attention" for x in config.layer_types],
        "attention.rope_pattern": [bool(x) for x in config.layer_rope_theta],
    }


def keys_of_expert_layers(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of MiMo-V2-Flash, Step-3.5, Hy3 and MiniMax-M3."""
    dense = [config.has_experts(i) for i in range(config.num_hidden_layers)].index(True)
    head = {"add_key_length": config.head_dim, "add_value_length": config.head_dim}
    if model_type == "hy_v3":
        width = config.moe_intermediate_size * config.num_shared_experts
        return SIGMOID | {
            **head,
            "add_expert_shared_feed_forward_length": width,
            "add_expert_weights_norm": True,
            "add_expert_weights_scale": config.router_scaling_factor,
        }
    if model_type == "minimax_m3_vl_text":
        return SIGMOID | {
            **head,
            "add_feed_forward_length": config.dense_intermediate_size,
            "add_expert_feed_forward_length": config.intermediate_size,
            "add_expert_shared_feed_forward_length": None,
            "add_expert_shared_count": 1,
            "add_expert_weights_norm": True,
            "add_leading_dense_block_count": dense,
            "add_indexer_head_count": config.index_n_heads,
            "add_indexer_key_length": config.index_head_dim,
            "add_indexer_top_k": config.index_topk_blocks,
            "attention.indexer.block_size": config.index_block_size,
            "attention.indexer.local_blocks": config.index_local_blocks,
        }
    windows = [x == "sliding_attention" for x in config.layer_types]
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    keys = SIGMOID | {
        **head,
        "add_sliding_window": config.sliding_window,
        "add_sliding_window_pattern": windows,
        "add_rope_freq_base": full["rope_theta"],
        "add_rope_freq_base_swa": sliding["rope_theta"],
    }
    if model_type == "mimo_v2_flash":
        return keys | {
            "add_head_count_kv": [config.num_key_value_heads * (1 + x) for x in windows],
            "add_sliding_window": config.sliding_window - 1,
            "add_sliding_window_pattern": [int(x) for x in windows],
            "add_value_length": config.v_head_dim,
            "add_rope_dimension_count": int(config.head_dim * full["partial_rotary_factor"]),
            "add_expert_group_count": 1,
            "add_expert_group_used_count": 1,
            "attention.value_scale": config.attention_value_scale,
        }
    heads = (config.num_attention_heads, config.num_sliding_attention_heads)
    return keys | {
        "add_head_count": [heads[x] for x in windows],
        "add_head_count_kv": [config.num_key_value_heads for _ in windows],
        "add_rope_dimension_count": None,
        "add_expert_shared_feed_forward_length": config.share_expert_dim,
        "add_expert_weights_scale": config.moe_router_scaling_factor,
        "add_expert_weights_norm": True,
        "add_leading_dense_block_count": dense,
        "add_moe_every_n_layers": 1,
        "add_swiglu_clamp_exp": [x or 0.0 for x in config.swiglu_limits],
        "add_swiglu_clamp_shexp": [x or 0.0 for x in config.swiglu_limits_shared],
    }


def keys_of_v4(config: Any) -> dict[str, Any]:
    """The keys of DeepSeek-V4; those that the library cannot write have their names in the file."""
    rates = {"sliding": 0, "compressed": 4, "heavily": 128}
    limits = [config.swiglu_limit] * config.num_hidden_layers
    return {
        "add_head_count_kv": 1,
        "add_key_length": config.head_dim,
        "add_value_length": config.head_dim,
        "add_feed_forward_length": None,
        "add_rope_dimension_count": config.qk_rope_head_dim,
        "add_sliding_window": config.sliding_window,
        "add_expert_shared_count": 1,
        "add_expert_weights_norm": True,
        "add_indexer_head_count": config.index_n_heads,
        "add_indexer_key_length": config.index_head_dim,
        "add_indexer_top_k": config.index_topk,
        "add_swiglu_clamp_exp": limits,
        "add_swiglu_clamp_shexp": limits,
        "expert_gating_func": 4,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.compress_ratios": [rates[x.split("_")[0]] for x in config.layer_types],
        "attention.compress_rope_freq_base": config.compress_rope_theta,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
    } | (keys_of_yarn(config.rope_scaling) if config.rope_scaling else {})


def keys_of_newer(config: Any, model_type: str) -> dict[str, Any]:
    """The keys of mixtures, of convolutions and of Gated DeltaNet."""
    if model_type.startswith("deepseek") or model_type == "glm_moe_dsa":
        return keys_of_latents(config, model_type)
    if model_type == "modernbert":
        return {
            "add_sliding_window": config.local_attention,
            "add_sliding_window_pattern": 3,
            "add_rope_freq_base": config.global_rope_theta,
            "add_rope_freq_base_swa": config.local_rope_theta,
            "add_causal_attention": False,
            "add_pooling_type": gguf.PoolingType.CLS,
        }
    if model_type == "phimoe":
        return {"add_expert_used_count": 2}
    if model_type == "exaone_moe":
        return {
            "add_sliding_window": config.sliding_window,
            "add_sliding_window_pattern": [x == "sliding_attention" for x in config.layer_types],
            **SIGMOID,
            "add_expert_weights_norm": True,
            "add_expert_shared_count": 1,
            "add_expert_shared_feed_forward_length": config.moe_intermediate_size,
            "add_rope_scaling_type": gguf.RopeScalingType.NONE,
        }
    if model_type == "llama4_text":
        return {
            "add_interleave_moe_layer_step": 2,
            "add_feed_forward_length": config.intermediate_size_mlp,
            "add_expert_feed_forward_length": config.intermediate_size,
        }
    if model_type == "gpt_oss":
        width = config.intermediate_size
        return {
            "add_sliding_window": config.sliding_window,
            "add_expert_feed_forward_length": width,
        }
    if model_type == "glm4_moe":
        return SIGMOID | {"add_expert_weights_norm": True}
    if model_type == "ernie4_5_moe":  # as the makers' first code has it
        return {"add_expert_shared_feed_forward_length": config.moe_intermediate_size * 2}
    if model_type == "ministral3":
        return keys_of_yarn(config.rope_scaling) | {
            "add_rope_scaling_yarn_log_mul": 1.0,
            "add_attn_temperature_scale": 0.1,
        }
    if model_type.startswith("lfm2"):
        return (SIGMOID if model_type == "lfm2_moe" else {}) | {
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


def keys_of_yarn(scaling: Any) -> dict[str, Any]:
    """The keys of a stretched rotation."""
    return {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": scaling["factor"],
        "add_rope_scaling_orig_ctx_len": scaling["original_max_position_embeddings"],
        "add_rope_scaling_yarn_beta_fast": scaling["beta_fast"],
        "add_rope_scaling_yarn_beta_slow": scaling["beta_slow"],
    }
