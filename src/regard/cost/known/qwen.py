"""Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from typing import Any

from regard.cost.known.entry import Known


def _qwen(
    kind: str, dim: int, layers: int, heads: int, groups: int, ff: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": ff, "vocab_size": 151936,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


TIED = {"tie_word_embeddings": True}
WIDE = {"vocab_size": 152064}
_2 = "Qwen Team 2024 (arXiv 2412.15115), table 1; config.json of Qwen/Qwen2.5"
_3 = "Yang et al. 2025 (arXiv 2505.09388), tables 1 and 2; config.json of Qwen/Qwen3"


def _moe(experts_ff: int) -> dict[str, Any]:
    return {
        "moe_intermediate_size": experts_ff,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "head_dim": 128,
    }


MODELS = {
    "qwen2.5-0.5b": Known(_qwen("qwen2", 896, 24, 14, 2, 4864, **TIED), _2),
    "qwen2.5-1.5b": Known(_qwen("qwen2", 1536, 28, 12, 2, 8960, **TIED), _2),
    "qwen2.5-3b": Known(_qwen("qwen2", 2048, 36, 16, 2, 11008, **TIED), _2),
    "qwen2.5-7b": Known(_qwen("qwen2", 3584, 28, 28, 4, 18944, **WIDE), _2),
    "qwen2.5-14b": Known(_qwen("qwen2", 5120, 48, 40, 8, 13824, **WIDE), _2),
    "qwen2.5-32b": Known(_qwen("qwen2", 5120, 64, 40, 8, 27648, **WIDE), _2),
    "qwen2.5-72b": Known(_qwen("qwen2", 8192, 80, 64, 8, 29568, **WIDE), _2),
    "qwen3-0.6b": Known(_qwen("qwen3", 1024, 28, 16, 8, 3072, head_dim=128, **TIED), _3),
    "qwen3-1.7b": Known(_qwen("qwen3", 2048, 28, 16, 8, 6144, head_dim=128, **TIED), _3),
    "qwen3-4b": Known(_qwen("qwen3", 2560, 36, 32, 8, 9728, head_dim=128, **TIED), _3),
    "qwen3-8b": Known(_qwen("qwen3", 4096, 36, 32, 8, 12288, head_dim=128), _3),
    "qwen3-14b": Known(_qwen("qwen3", 5120, 40, 40, 8, 17408, head_dim=128), _3),
    "qwen3-32b": Known(_qwen("qwen3", 5120, 64, 64, 8, 25600, head_dim=128), _3),
    "qwen3-30b-a3b": Known(_qwen("qwen3_moe", 2048, 48, 32, 4, 6144, **_moe(768)), _3),
    "qwen3-235b-a22b": Known(_qwen("qwen3_moe", 4096, 94, 64, 4, 12288, **_moe(1536)), _3),
}
