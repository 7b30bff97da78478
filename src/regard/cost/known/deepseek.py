"""DeepSeek-V2, V2-Lite and V3."""

from __future__ import annotations

from typing import Any

from regard.cost.known.entry import Known


def _deepseek(dim: int, layers: int, heads: int, q_rank: int | None, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": dim, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": q_rank,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _experts(ff: int, width: int, count: int, active: int, shared: int) -> dict[str, Any]:
    return {
        "intermediate_size": ff, "moe_intermediate_size": width, "n_routed_experts": count,
        "num_experts_per_tok": active, "n_shared_experts": shared,
    }  # fmt: skip


V2 = "DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1; config.json of deepseek-ai/DeepSeek-V2"
V3 = "DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; config.json of deepseek-ai/DeepSeek-V3"
_THREE = {"model_type": "deepseek_v3", "vocab_size": 129280, "first_k_dense_replace": 3}
_V3 = Known(
    _deepseek(7168, 61, 128, 1536, **_experts(18432, 2048, 256, 8, 1), **_THREE), V3,
    "without the layer that predicts a second token",
)  # fmt: skip
MODELS = {
    "deepseek-v2": Known(_deepseek(5120, 60, 128, 1536, **_experts(12288, 1536, 160, 6, 2)), V2),
    "deepseek-v2-lite": Known(_deepseek(2048, 27, 16, None, **_experts(10944, 1408, 64, 6, 2)), V2),
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
}
