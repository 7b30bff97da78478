"""Llama 2 and 3, Mistral and Mixtral."""

from __future__ import annotations

from typing import Any

from regard.cost.known.entry import Known


def _llama(
    dim: int, layers: int, heads: int, groups: int, ff: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": ff, "vocab_size": vocab,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


TWO = "Touvron et al. 2023 (arXiv 2307.09288); config.json of meta-llama/Llama-2"
THREE = "Grattafiori et al. 2024 (arXiv 2407.21783), table 3; config.json of meta-llama/Llama-3"
SMALL = "config.json of meta-llama/Llama-3.2"
MISTRAL = "Jiang et al. 2023 (arXiv 2310.06825), table 1; config.json of mistralai"
MIXTRAL = "Jiang et al. 2024 (arXiv 2401.04088), table 1; config.json of mistralai"

_L8 = Known(_llama(4096, 32, 32, 8, 14336, 128256), THREE)
_L70 = Known(_llama(8192, 80, 64, 8, 28672, 128256), THREE)
_L405 = Known(_llama(16384, 126, 128, 8, 53248, 128256), THREE)
_M = {"model_type": "mistral"}
MODELS = {
    "llama-2-7b": Known(_llama(4096, 32, 32, 32, 11008, 32000), TWO),
    "llama-2-13b": Known(_llama(5120, 40, 40, 40, 13824, 32000), TWO),
    "llama-2-70b": Known(_llama(8192, 80, 64, 8, 28672, 32000), TWO),
    "llama-3-8b": _L8,
    "llama-3-70b": _L70,
    "llama-3.1-8b": _L8,
    "llama-3.1-70b": _L70,
    "llama-3.1-405b": _L405,
    "llama-3.2-1b": Known(
        _llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True), SMALL
    ),
    "llama-3.2-3b": Known(
        _llama(3072, 28, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True), SMALL
    ),
    "llama-3.3-70b": _L70,
    "mistral-7b-v0.1": Known(_llama(4096, 32, 32, 8, 14336, 32000, sliding_window=4096, **_M), MISTRAL),
    "mistral-7b-v0.3": Known(_llama(4096, 32, 32, 8, 14336, 32768, sliding_window=None, **_M), MISTRAL),
    "mistral-nemo": Known(
        _llama(5120, 40, 32, 8, 14336, 131072, head_dim=128, sliding_window=None, **_M), MISTRAL
    ),
    "mixtral-8x7b": Known(
        _llama(
            4096, 32, 32, 8, 14336, 32000, sliding_window=None, num_local_experts=8,
            num_experts_per_tok=2, model_type="mixtral",
        ),
        MIXTRAL,
    ),
}  # fmt: skip
MODELS["llama-3-405b"], MODELS["mistral-7b"] = _L405, MODELS["mistral-7b-v0.1"]
