"""The sizes of published models, as keys of their config.json; `model_of` finds one by name.

The table is data: `regard.configs.reader` reads its entries as it reads any config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from regard.configs.published_mixed import MIXED
from regard.configs.reader import SizeCount, read_sizes, read_sizes_file
from regard.cost.model import ModelSpec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError


@dataclass(frozen=True)
class PublishedModel:
    """The sizes of a published model, and their source.

    Attributes:
        config: the keys of its config.json that define sizes.
        source: the paper or the file that states them.
        note: a remark for readers, or "".
    """

    config: Mapping[str, object]
    source: str
    note: str = ""


def _gpt2(n_embd: int, n_layer: int, n_head: int, n_positions: int = 1024) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": n_positions,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "torch_dtype": "float16" if n_positions == 2048 else "float32",
    }


GPT2 = "config.json of openai-community/gpt2 and its sizes"
GPT3 = (
    "Brown et al. 2020 (arXiv 2005.14165), table 2.1; vocabulary and positions of GPT-2, "
    "context 2048"
)
BANDED = (
    "every second layer of GPT-3 has banded sparse attention of an unpublished width: "
    "counted as dense"
)
SHARE = (
    "attention is 4 x 12,288 x 128 = 6,291,456 per head, x 96 heads = 603,979,776 in one layer, "
    "x 96 layers = 57,982,058,496: a third of 175 billion. Sources that state 5.95 billion of "
    "17.5 billion take the 96 heads of one layer for the whole model and lose a factor of ten in "
    "both numbers (0.604 billion is one layer, 57.98 of 175 billion are all), so that the ratio "
    "is right and the mistake is hidden"
)


def _gpt_oss(layers: int, experts: int) -> PublishedModel:
    return PublishedModel(
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": layers,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": experts,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "OpenAI 2025 (arXiv 2508.10925), section 2; config.json of openai/gpt-oss",
        "released experts take 4.25 bits (MXFP4); bytes here are of one dtype for all weights",
    )


GPT = {
    "gpt2": PublishedModel(_gpt2(768, 12, 12), GPT2),
    "gpt2-medium": PublishedModel(_gpt2(1024, 24, 16), GPT2),
    "gpt2-large": PublishedModel(_gpt2(1280, 36, 20), GPT2),
    "gpt2-xl": PublishedModel(_gpt2(1600, 48, 25), GPT2),
    "gpt3": PublishedModel(_gpt2(12288, 96, 96, 2048), GPT3, f"{SHARE}; {BANDED}"),
    "gpt3-6.7b": PublishedModel(_gpt2(4096, 32, 32, 2048), GPT3, BANDED),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}


def _llama(
    dim: int, layers: int, heads: int, groups: int, ff: int, vocab: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA2 = "Touvron et al. 2023 (arXiv 2307.09288); config.json of meta-llama/Llama-2"
LLAMA3 = "Grattafiori et al. 2024 (arXiv 2407.21783), table 3; config.json of meta-llama/Llama-3"
LLAMA32 = "config.json of meta-llama/Llama-3.2"
MISTRAL = "Jiang et al. 2023 (arXiv 2310.06825), table 1; config.json of mistralai"
MIXTRAL = "Jiang et al. 2024 (arXiv 2401.04088), table 1; config.json of mistralai"

_L8 = PublishedModel(_llama(4096, 32, 32, 8, 14336, 128256), LLAMA3)
_L70 = PublishedModel(_llama(8192, 80, 64, 8, 28672, 128256), LLAMA3)
_L405 = PublishedModel(_llama(16384, 126, 128, 8, 53248, 128256), LLAMA3)
_MISTRAL = {"model_type": "mistral"}
LLAMA = {
    "llama-2-7b": PublishedModel(_llama(4096, 32, 32, 32, 11008, 32000), LLAMA2),
    "llama-2-13b": PublishedModel(_llama(5120, 40, 40, 40, 13824, 32000), LLAMA2),
    "llama-2-70b": PublishedModel(_llama(8192, 80, 64, 8, 28672, 32000), LLAMA2),
    "llama-3-8b": _L8,
    "llama-3-70b": _L70,
    "llama-3.1-8b": _L8,
    "llama-3.1-70b": _L70,
    "llama-3.1-405b": _L405,
    "llama-3.2-1b": PublishedModel(
        _llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True), LLAMA32
    ),
    "llama-3.2-3b": PublishedModel(
        _llama(3072, 28, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True), LLAMA32
    ),
    "llama-3.3-70b": _L70,
    "mistral-7b-v0.1": PublishedModel(
        _llama(4096, 32, 32, 8, 14336, 32000, sliding_window=4096, **_MISTRAL), MISTRAL
    ),
    "mistral-7b-v0.3": PublishedModel(
        _llama(4096, 32, 32, 8, 14336, 32768, sliding_window=None, **_MISTRAL), MISTRAL
    ),
    "mistral-nemo": PublishedModel(
        _llama(5120, 40, 32, 8, 14336, 131072, head_dim=128, sliding_window=None, **_MISTRAL),
        MISTRAL,
    ),
    "mixtral-8x7b": PublishedModel(
        _llama(
            4096,
            32,
            32,
            8,
            14336,
            32000,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            model_type="mixtral",
        ),
        MIXTRAL,
    ),
}
LLAMA["llama-3-405b"], LLAMA["mistral-7b"] = _L405, LLAMA["mistral-7b-v0.1"]
_SHARED_HEAD: dict[str, object] = {"tie_word_embeddings": True}
_FULL: dict[str, object] = {"sliding_window": None, **_MISTRAL}
SMOLLM = "config.json of HuggingFaceTB/SmolLM"
LIKE_LLAMA = {
    "mistral-small-24b": PublishedModel(
        _llama(5120, 40, 32, 8, 32768, 131072, head_dim=128, **_FULL), MISTRAL
    ),
    "mistral-large-2": PublishedModel(_llama(12288, 88, 96, 8, 28672, 32768, **_FULL), MISTRAL),
    "tinyllama-1.1b": PublishedModel(
        _llama(2048, 22, 32, 4, 5632, 32000), "config.json of TinyLlama/TinyLlama-1.1B"
    ),
    "falcon3-7b": PublishedModel(
        _llama(3072, 28, 12, 4, 23040, 131072, head_dim=256), "config.json of tiiuae/Falcon3-7B"
    ),
    "smollm2-135m": PublishedModel(
        _llama(576, 30, 9, 3, 1536, 49152, **_SHARED_HEAD), f"{SMOLLM}2-135M"
    ),
    "smollm2-1.7b": PublishedModel(
        _llama(2048, 24, 32, 32, 8192, 49152, **_SHARED_HEAD), f"{SMOLLM}2-1.7B"
    ),
    "smollm3-3b": PublishedModel(
        _llama(2048, 36, 16, 4, 11008, 128256, **_SHARED_HEAD),
        f"{SMOLLM}3-3B",
        "every fourth layer has no positions, which costs nothing: counted as Llama",
    ),
}


def _as(kind: str, sizes: dict[str, object]) -> dict[str, object]:
    """Return sizes with the keys of Llama under another model_type."""
    return {**sizes, "model_type": kind}


OLMO2 = "OLMo Team 2025 (arXiv 2501.00656), table 1; config.json of allenai/OLMo-2"
PHI = "config.json of microsoft/phi-4 and Phi-3-mini"
EARLIER = {
    "olmo-2-7b": PublishedModel(_as("olmo2", _llama(4096, 32, 32, 32, 11008, 100352)), OLMO2),
    "olmo-2-13b": PublishedModel(_as("olmo2", _llama(5120, 40, 40, 40, 13824, 100352)), OLMO2),
    "olmo-2-32b": PublishedModel(_as("olmo2", _llama(5120, 64, 40, 8, 27648, 100352)), OLMO2),
    "phi-3-mini": PublishedModel(_as("phi3", _llama(3072, 32, 32, 32, 8192, 32064)), PHI),
    "phi-4": PublishedModel(_as("phi3", _llama(5120, 40, 40, 10, 17920, 100352)), PHI),
    "pythia-6.9b": PublishedModel(
        {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 16384,
            "vocab_size": 50432,
        },
        "Biderman et al. 2023 (arXiv 2304.01373), table 1; config.json of EleutherAI/pythia-6.9b",
    ),
    "mpt-7b": PublishedModel(
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "vocab_size": 50432,
            "max_seq_len": 2048,
            "attn_config": {"alibi": True},
            "no_bias": True,
        },
        "config.json of mosaicml/mpt-7b",
    ),
    "bloom": PublishedModel(
        {
            "model_type": "bloom",
            "hidden_size": 14336,
            "n_layer": 70,
            "n_head": 112,
            "vocab_size": 250880,
        },
        "BigScience 2022 (arXiv 2211.05100), table 3; config.json of bigscience/bloom",
    ),
}


def _qwen(
    kind: str, dim: int, layers: int, heads: int, groups: int, ff: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ff,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_WIDE = {"vocab_size": 152064}
QWEN2 = "Yang et al. 2024 (arXiv 2407.10671), table 1; config.json of Qwen/Qwen2"
QWEN25 = "Qwen Team 2024 (arXiv 2412.15115), table 1; config.json of Qwen/Qwen2.5"
QWEN3 = "Yang et al. 2025 (arXiv 2505.09388), tables 1 and 2; config.json of Qwen/Qwen3"


def _moe(experts_ff: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": experts_ff,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "head_dim": 128,
    }


QWEN = {
    "qwen2-0.5b": PublishedModel(_qwen("qwen2", 896, 24, 14, 2, 4864, **_TIED), QWEN2),
    "qwen2-1.5b": PublishedModel(_qwen("qwen2", 1536, 28, 12, 2, 8960, **_TIED), QWEN2),
    "qwen2-7b": PublishedModel(_qwen("qwen2", 3584, 28, 28, 4, 18944, **_WIDE), QWEN2),
    "qwen2-72b": PublishedModel(_qwen("qwen2", 8192, 80, 64, 8, 29568, **_WIDE), QWEN2),
    "qwen2.5-0.5b": PublishedModel(_qwen("qwen2", 896, 24, 14, 2, 4864, **_TIED), QWEN25),
    "qwen2.5-1.5b": PublishedModel(_qwen("qwen2", 1536, 28, 12, 2, 8960, **_TIED), QWEN25),
    "qwen2.5-3b": PublishedModel(_qwen("qwen2", 2048, 36, 16, 2, 11008, **_TIED), QWEN25),
    "qwen2.5-7b": PublishedModel(_qwen("qwen2", 3584, 28, 28, 4, 18944, **_WIDE), QWEN25),
    "qwen2.5-14b": PublishedModel(_qwen("qwen2", 5120, 48, 40, 8, 13824, **_WIDE), QWEN25),
    "qwen2.5-32b": PublishedModel(_qwen("qwen2", 5120, 64, 40, 8, 27648, **_WIDE), QWEN25),
    "qwen2.5-72b": PublishedModel(_qwen("qwen2", 8192, 80, 64, 8, 29568, **_WIDE), QWEN25),
    "qwen3-0.6b": PublishedModel(
        _qwen("qwen3", 1024, 28, 16, 8, 3072, head_dim=128, **_TIED), QWEN3
    ),
    "qwen3-1.7b": PublishedModel(
        _qwen("qwen3", 2048, 28, 16, 8, 6144, head_dim=128, **_TIED), QWEN3
    ),
    "qwen3-4b": PublishedModel(_qwen("qwen3", 2560, 36, 32, 8, 9728, head_dim=128, **_TIED), QWEN3),
    "qwen3-8b": PublishedModel(_qwen("qwen3", 4096, 36, 32, 8, 12288, head_dim=128), QWEN3),
    "qwen3-14b": PublishedModel(_qwen("qwen3", 5120, 40, 40, 8, 17408, head_dim=128), QWEN3),
    "qwen3-32b": PublishedModel(_qwen("qwen3", 5120, 64, 64, 8, 25600, head_dim=128), QWEN3),
    "qwen3-30b-a3b": PublishedModel(_qwen("qwen3_moe", 2048, 48, 32, 4, 6144, **_moe(768)), QWEN3),
    "qwen3-coder-480b-a35b": PublishedModel(
        _qwen(
            "qwen3_moe",
            6144,
            62,
            96,
            8,
            8192,
            **_moe(2560) | {"num_experts": 160},
        ),
        "config.json of Qwen/Qwen3-Coder-480B-A35B",
    ),
    "qwen3-235b-a22b": PublishedModel(
        _qwen("qwen3_moe", 4096, 94, 64, 4, 12288, **_moe(1536)), QWEN3
    ),
}


def _gemma(
    kind: str, dim: int, layers: int, heads: int, groups: int, ff: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ff,
        "head_dim": 256,
        "tie_word_embeddings": True,
        **more,
    }


_GEMMA2: dict[str, object] = {"vocab_size": 256000, "sliding_window": 4096}
_GEMMA3: dict[str, object] = {
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
GEMMA2 = "Gemma Team 2024 (arXiv 2408.00118), table 1; config.json of google/gemma-2"
GEMMA3 = "Gemma Team 2025 (arXiv 2503.19786), section 2; config.json of google/gemma-3"
NO_VISION = "without the vision tower and its projector"
GEMMA1 = "Gemma Team 2024 (arXiv 2403.08295), table 1; config.json of google/gemma"
_GEMMA1: dict[str, object] = {"vocab_size": 256000}
GEMMA = {
    "gemma-2b": PublishedModel(_gemma("gemma", 2048, 18, 8, 1, 16384, **_GEMMA1), GEMMA1),
    "gemma-7b": PublishedModel(_gemma("gemma", 3072, 28, 16, 16, 24576, **_GEMMA1), GEMMA1),
    "gemma-2-2b": PublishedModel(_gemma("gemma2", 2304, 26, 8, 4, 9216, **_GEMMA2), GEMMA2),
    "gemma-2-9b": PublishedModel(_gemma("gemma2", 3584, 42, 16, 8, 14336, **_GEMMA2), GEMMA2),
    "gemma-2-27b": PublishedModel(
        _gemma("gemma2", 4608, 46, 32, 16, 36864, **_GEMMA2 | {"head_dim": 128}), GEMMA2
    ),
    "gemma-3-1b": PublishedModel(
        _gemma(
            "gemma3_text",
            1152,
            26,
            4,
            1,
            6912,
            **_GEMMA3 | {"vocab_size": 262144, "sliding_window": 512},
        ),
        GEMMA3,
    ),
    "gemma-3-4b": PublishedModel(
        _gemma("gemma3_text", 2560, 34, 8, 4, 10240, **_GEMMA3), GEMMA3, NO_VISION
    ),
    "gemma-3-12b": PublishedModel(
        _gemma("gemma3_text", 3840, 48, 16, 8, 15360, **_GEMMA3), GEMMA3, NO_VISION
    ),
    "gemma-3-27b": PublishedModel(
        _gemma("gemma3_text", 5376, 62, 32, 16, 21504, **_GEMMA3 | {"head_dim": 128}),
        GEMMA3,
        NO_VISION,
    ),
}


def _deepseek(
    dim: int, layers: int, heads: int, q_rank: int | None, **more: object
) -> dict[str, object]:
    return {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        **more,
    }


def _experts(ff: int, width: int, count: int, active: int, shared: int) -> dict[str, object]:
    return {
        "intermediate_size": ff,
        "moe_intermediate_size": width,
        "n_routed_experts": count,
        "num_experts_per_tok": active,
        "n_shared_experts": shared,
    }


DEEPSEEK_V2 = (
    "DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1; config.json of deepseek-ai/DeepSeek-V2"
)
DEEPSEEK_V3 = (
    "DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; config.json of deepseek-ai/DeepSeek-V3"
)
_V3_KEYS = {"model_type": "deepseek_v3", "vocab_size": 129280, "first_k_dense_replace": 3}
_V3 = PublishedModel(
    _deepseek(7168, 61, 128, 1536, **_experts(18432, 2048, 256, 8, 1), **_V3_KEYS),
    DEEPSEEK_V3,
    "without the layer that predicts a second token",
)
DEEPSEEK = {
    "deepseek-v2": PublishedModel(
        _deepseek(5120, 60, 128, 1536, **_experts(12288, 1536, 160, 6, 2)), DEEPSEEK_V2
    ),
    "deepseek-v2-lite": PublishedModel(
        _deepseek(2048, 27, 16, None, **_experts(10944, 1408, 64, 6, 2)), DEEPSEEK_V2
    ),
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
    "kimi-k2": PublishedModel(
        _deepseek(
            7168,
            61,
            64,
            1536,
            **_experts(18432, 2048, 384, 8, 1),
            **_V3_KEYS | {"vocab_size": 163840, "first_k_dense_replace": 1},
        ),
        "Kimi Team 2025 (arXiv 2507.20534), section 2.3; config.json of moonshotai/Kimi-K2",
    ),
}

PUBLISHED_MODELS: dict[str, PublishedModel] = (
    GPT
    | LLAMA
    | LIKE_LLAMA
    | QWEN
    | GEMMA
    | DEEPSEEK
    | EARLIER
    | {name: PublishedModel(*row) for name, row in MIXED.items()}
)
"""Name -> config and source."""


SIZES_NOT_PUBLISHED = {
    "mistral-medium": "Mistral AI has not published the sizes of Mistral Medium",
    "gemma-4": (
        "Gemma 4 has heads of another size in its global layers, which are not counted yet"
    ),
}
"""Beginnings of the names of models that readers ask for, and why no sizes stand here."""


def model_of(source: str, count_stored: SizeCount | None = None) -> ModelSpec:
    """Return the sizes of a published model, of a config.json, or of a folder with one.

    Args:
        source: a name in `PUBLISHED_MODELS`, in upper or lower case; `tiny`; or a path.
        count_stored: counts the weights of a quantized folder, as for `read_sizes_file`.

    Returns:
        The sizes, with their source as a note.

    Raises:
        ArgumentError: neither a model nor a file has this name; the message has similar names.
        FileError: the path has no readable config.json.

    >>> model_of("gpt3").attention_parameters
    57982058496
    """
    name = source.lower()
    if name in PUBLISHED_MODELS:
        entry = PUBLISHED_MODELS[name]
        model = read_sizes(entry.config, name, name)
        notes = (f"sizes: {entry.source}", *((entry.note,) if entry.note else ()), *model.notes)
        return replace(model, notes=notes)
    if name == "tiny":  # the model that comes with the package
        return replace(read_sizes_file(Path(__file__).parents[1] / "assets" / "tiny"), name=name)
    path = Path(source)
    if path.exists() or path.suffix == ".json":
        return read_sizes_file(path, count_stored)
    for beginning, reason in SIZES_NOT_PUBLISHED.items():
        if name.startswith(beginning):
            raise ArgumentError(
                f"{reason}; give sizes of your own: regard cost --layers 60 --dim 8192 --heads 64"
            )
    hint = suggest(name, PUBLISHED_MODELS, most=4, cutoff=0.4, otherwise=".")
    raise ArgumentError(
        f"{source!r} is neither a known model nor a path{hint} regard cost --list prints the known "
        "models; for another one give a config.json, org/name on the hub, or the sizes as flags",
        argument="source",
        value=source,
    )
