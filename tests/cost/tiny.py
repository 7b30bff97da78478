"""A small config.json for every family: all sizes differ where the family allows it."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 12,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 97, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 3, "is_encoder_decoder": True,
}  # fmt: skip
OWN: dict[str, Any] = {
    "model_type": "regard", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "attention": "gqa", "attention_options": {"groups": 2},
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 64,
    },
    "bloom": {"model_type": "bloom", "vocab_size": 97, "hidden_size": 24, "n_layer": 2,
    "n_head": 4},
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2"},
    "deepseek_v2, queries from x": {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {**DEEPSEEK, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
    "deepseek_v3, biases": {
        **DEEPSEEK, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2,
        "attention_bias": True,
    },
    "gemma": {**LLAMA, "model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {**LLAMA, "model_type": "gemma2", "sliding_window": 5, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3", "vision_config": {}, "text_config": {**LLAMA, "sliding_window": 5,
        "layer_types": KINDS},
    },
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "sliding_window": 5,
    "sliding_window_pattern": 3},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_embd": 24, "n_layer": 2,
        "n_head": 4, "n_inner": 40,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
    },
    "gpt_neox, no biases": {
        "model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40, "attention_bias": False, "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **LLAMA, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "llama": {**LLAMA, "model_type": "llama"},
    "llama, biases": {**LLAMA, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, of old": {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 5},
    "mistral, no window": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "mpt": {"model_type": "mpt", "vocab_size": 97, "d_model": 24, "n_heads": 4, "n_layers": 2},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "phi3": {**LLAMA, "model_type": "phi3"},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen2, windows": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "regard": OWN,
    "regard, learned": {**OWN, "attention": "mqa", "attention_options": {}, "position": "learned",
    "max_position_embeddings": 64},
    "regard, windows": {**OWN, "window": 5},
    "regard, latent": {
        **OWN, "attention": "mla",
        "attention_options": {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4,
        "value_dim": 8},
    },
    "regard, linear": {**OWN, "attention": "linear_attention", "attention_options": {}},
    "regard, retention": {**OWN, "attention": "retention", "attention_options": {}},
    "regard, delta": {**OWN, "attention": "gated_delta_net", "attention_options": {}},
    "regard, memory": {**OWN, "attention": "infini", "attention_options": {"segment": 8,
    "groups": 2}},
    "t5": T5,
    "t5, gated": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}  # fmt: skip
