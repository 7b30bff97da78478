"""The sizes of published models that mix mechanisms, or that are mixtures of experts of 2025 and
later, as keys of their config.json.

The table is data. `regard.configs.published` adds it to the models that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Keys: TypeAlias = dict[str, object]
Row: TypeAlias = tuple[Mapping[str, object], str, str]
"""The keys of config.json, the source, and a remark or ""."""

NO_VISION = "without the vision encoder and its projector"
NO_MTP = "without the layer that predicts a second token"


def _sizes(
    kind: str, dim: int, layers: int, heads: int, groups: int, ff: int, vocab: int, **more: object
) -> Keys:
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


QWEN_NEXT: Keys = _sizes(
    "qwen3_next",
    2048,
    48,
    16,
    2,
    5120,
    151936,
    head_dim=256,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=512,
    num_experts_per_tok=10,
)


QWEN35_MOE: Keys = _sizes(
    "qwen3_5_moe_text",
    2048,
    40,
    16,
    2,
    512,
    248320,
    head_dim=256,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
)
QWEN35: Keys = _sizes("qwen3_5_text", 4096, 32, 16, 4, 12288, 248320, head_dim=256)


def _kimi_linear() -> Keys:
    sizes = _sizes("kimi_linear", 2304, 27, 32, 32, 9216, 163840)
    latent = {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    linear = {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
    return {**sizes, **latent, **experts, "linear_attn_config": linear}


def _granite(
    dim: int, heads: int, groups: int, ff: int, shared: int, state_heads: int, **more: object
) -> Keys:
    kinds = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
    return _sizes(
        "granitemoehybrid",
        dim,
        40,
        heads,
        groups,
        ff,
        100352,
        shared_intermediate_size=shared,
        layer_types=kinds,
        mamba_n_heads=state_heads,
        mamba_d_head=64,
        mamba_d_state=128,
        **{"num_local_experts": 0, **more},
    ) | {"tie_word_embeddings": True}


def _falcon_h1(
    dim: int, layers: int, heads: int, groups: int, ff: int, vocab: int, **more: object
) -> Keys:
    return _sizes("falcon_h1", dim, layers, heads, groups, ff, vocab, **more)


def _nemotron(dim: int, pattern: str, heads: int, ff: int, **more: object) -> Keys:
    return _sizes(
        "nemotron_h",
        dim,
        len(pattern),
        heads,
        8,
        ff,
        131072,
        head_dim=128,
        hybrid_override_pattern=pattern,
        **more,
    )


def _llama4(experts: int, step: int) -> Keys:
    return _sizes(
        "llama4_text",
        5120,
        48,
        40,
        8,
        8192,
        202048,
        head_dim=128,
        intermediate_size_mlp=16384,
        num_local_experts=experts,
        interleave_moe_layer_step=step,
    )


def _glm(dim: int, layers: int, ff: int, width: int, experts: int, **more: object) -> Keys:
    return _sizes(
        "glm4_moe",
        dim,
        layers,
        96,
        8,
        ff,
        151552,
        head_dim=128,
        attention_bias=True,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        num_experts_per_tok=8,
        **more,
    )


def _olmo3(dim: int, layers: int, heads: int, groups: int, ff: int) -> Keys:
    return _sizes("olmo3", dim, layers, heads, groups, ff, 100278, sliding_window=4096)


def _ministral(dim: int, layers: int, ff: int, **more: object) -> Keys:
    return _sizes("ministral3", dim, layers, 32, 8, ff, 131072, head_dim=128, **more)


def _gemma3n(layers: int, ff: int, shared: int) -> Keys:
    return _sizes(
        "gemma3n_text",
        2048,
        layers,
        8,
        2,
        ff,
        262400,
        head_dim=256,
        num_kv_shared_layers=shared,
        tie_word_embeddings=True,
    ) | {"tie_word_embeddings": True}


def _sparse_latent(
    kind: str, dim: int, layers: int, heads: int, vocab: int, **more: object
) -> Keys:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        **more,
    }


_GLM45 = "GLM-4.5 Team 2025 (arXiv 2508.06471), table 1; config.json of zai-org/GLM-4.5"
_LLAMA4 = "Meta 2025, model card of Llama 4; config.json of meta-llama/Llama-4"
_GRANITE = "IBM 2025, model cards of Granite 4.0; config.json of ibm-granite/granite-4.0-h"
_FALCON = "Falcon LLM Team 2025 (arXiv 2507.22448), table 1; config.json of tiiuae/Falcon-H1"
_GLM46 = _glm(5120, 92, 12288, 1536, 160, first_k_dense_replace=3, use_qk_norm=True)
QWEN35_NOTE = "without the vision tower and the layer for a second token"
MIXED: dict[str, Row] = {
    "qwen3-next-80b-a3b": (
        QWEN_NEXT,
        "Qwen Team 2025, model card and config.json of Qwen/Qwen3-Next-80B-A3B",
        NO_MTP,
    ),
    "qwen3.5-9b": (
        QWEN35,
        "the default configuration of qwen3_5_text in transformers 5.23 (Qwen3.5-9B)",
        QWEN35_NOTE,
    ),
    "qwen3.5-35b-a3b": (
        QWEN35_MOE,
        "the default configuration of qwen3_5_moe_text in transformers 5.23 (Qwen3.5-35B-A3B)",
        QWEN35_NOTE,
    ),
    "kimi-linear-48b-a3b": (
        _kimi_linear(),
        "Kimi Team 2025 (arXiv 2510.26692); config.json of moonshotai/Kimi-Linear-48B-A3B",
        "",
    ),
    "granite-4.0-h-micro": (_granite(2048, 32, 8, 8192, 8192, 64), _GRANITE, ""),
    "granite-4.0-h-tiny": (
        _granite(1536, 12, 4, 512, 1024, 48, num_local_experts=64, num_experts_per_tok=6),
        _GRANITE,
        "",
    ),
    "granite-4.0-h-small": (
        _granite(4096, 32, 8, 768, 1536, 128, num_local_experts=72, num_experts_per_tok=10),
        _GRANITE,
        "",
    ),
    "jamba-v0.1": (
        _sizes("jamba", 4096, 32, 32, 8, 14336, 65536),
        "Lieber et al. 2024 (arXiv 2403.19887), section 3; config.json of ai21labs/Jamba-v0.1",
        "",
    ),
    "jamba-1.5-large": (
        _sizes("jamba", 8192, 72, 64, 8, 24576, 65536),
        "Jamba Team 2024 (arXiv 2408.12570); config.json of ai21labs/AI21-Jamba-1.5-Large",
        "",
    ),
    "falcon-h1-0.5b": (
        _falcon_h1(
            1024,
            36,
            8,
            2,
            2048,
            32784,
            head_dim=64,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_state=128,
        ),
        _FALCON,
        "",
    ),
    "falcon-h1-7b": (
        _falcon_h1(
            3072, 44, 12, 2, 12288, 130049, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24
        ),
        _FALCON,
        "",
    ),
    "falcon-h1-34b": (
        _falcon_h1(
            5120,
            72,
            20,
            4,
            21504,
            261120,
            head_dim=128,
            mamba_d_ssm=4096,
            mamba_n_heads=32,
            mamba_n_groups=2,
            mamba_rms_norm=True,
        ),
        _FALCON,
        "",
    ),
    "nemotron-h-8b": (
        _nemotron(4096, "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 32, 21504),
        "NVIDIA 2025 (arXiv 2504.03624), table 1; config.json of nvidia/Nemotron-H-8B",
        "",
    ),
    "nemotron-nano-9b-v2": (
        _nemotron(
            4480,
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            40,
            15680,
            mamba_head_dim=80,
        ),
        "NVIDIA 2025 (arXiv 2508.14444); config.json of nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "",
    ),
    "minimax-text-01": (
        _sizes(
            "minimax",
            6144,
            80,
            64,
            8,
            9216,
            200064,
            head_dim=128,
            num_local_experts=32,
            num_experts_per_tok=2,
            attn_type_list=[int(i % 8 == 7) for i in range(80)],
        ),
        "MiniMax 2025 (arXiv 2501.08313), section 2; config.json of MiniMaxAI/MiniMax-Text-01",
        "",
    ),
    "minimax-m2": (
        _sizes(
            "minimax_m2",
            3072,
            62,
            48,
            8,
            1536,
            200064,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        "MiniMax 2025, model card and config.json of MiniMaxAI/MiniMax-M2",
        NO_MTP,
    ),
    "llama-4-scout": (_llama4(16, 1), _LLAMA4, NO_VISION),
    "llama-4-maverick": (_llama4(128, 2), _LLAMA4, NO_VISION),
    "glm-4.5": (_GLM46, _GLM45, NO_MTP),
    "glm-4.5-air": (_glm(4096, 46, 10944, 1408, 128), _GLM45, NO_MTP),
    "glm-4.6": (_GLM46, "model card and config.json of zai-org/GLM-4.6", NO_MTP),
    "glm-5": (
        _sparse_latent(
            "glm_moe_dsa",
            6144,
            78,
            64,
            154880,
            intermediate_size=12288,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_n_heads=32,
        ),
        "model card of zai-org/GLM-5; the defaults of transformers' GlmMoeDsaConfig",
        NO_MTP,
    ),
    "deepseek-v3.2": (
        _sparse_latent(
            "deepseek_v32",
            7168,
            61,
            128,
            129280,
            intermediate_size=18432,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            v_head_dim=128,
            index_n_heads=64,
        ),
        "DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2; config.json of deepseek-ai/DeepSeek-V3.2",
        NO_MTP,
    ),
    "gemma-3n-e2b": (
        _gemma3n(30, 8192, 10),
        "Google 2025, model card and config.json of google/gemma-3n-E2B",
        "without the encoders of images and of sound",
    ),
    "gemma-3n-e4b": (
        _gemma3n(35, 16384, 15),
        "Google 2025, model card and config.json of google/gemma-3n-E4B",
        "without the encoders of images and of sound",
    ),
    "olmo-3-7b": (
        _olmo3(4096, 32, 32, 32, 11008),
        "OLMo Team 2025, technical report of OLMo 3; config.json of allenai/Olmo-3-1025-7B",
        "",
    ),
    "olmo-3-32b": (
        _olmo3(5120, 64, 40, 8, 27648),
        "OLMo Team 2025, technical report of OLMo 3; config.json of allenai/Olmo-3-1125-32B",
        "",
    ),
    "ministral-3-3b": (
        _ministral(3072, 26, 9216) | {"tie_word_embeddings": True},
        "Mistral AI 2025, model card and config.json of mistralai/Ministral-3-3B",
        NO_VISION,
    ),
    "ministral-3-8b": (
        _ministral(4096, 34, 14336),
        "Mistral AI 2025, model card and config.json of mistralai/Ministral-3-8B",
        NO_VISION,
    ),
    "ministral-3-14b": (
        _ministral(5120, 40, 16384),
        "Mistral AI 2025, model card and config.json of mistralai/Ministral-3-14B",
        NO_VISION,
    ),
}
"""Name -> keys, source and remark."""
