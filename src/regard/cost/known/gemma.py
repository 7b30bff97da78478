"""Gemma 2 and Gemma 3 (of the latter, the language model)."""

from __future__ import annotations

from typing import Any

from regard.cost.known.entry import Known


def _gemma(
    kind: str, dim: int, layers: int, heads: int, groups: int, ff: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": ff, "head_dim": 256, "tie_word_embeddings": True,
        **more,
    }  # fmt: skip


_2: dict[str, Any] = {"vocab_size": 256000, "sliding_window": 4096}
_3: dict[str, Any] = {"vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6}
TWO = "Gemma Team 2024 (arXiv 2408.00118), table 1; config.json of google/gemma-2"
THREE = "Gemma Team 2025 (arXiv 2503.19786), section 2; config.json of google/gemma-3"
PICTURES = "without the vision tower and its projector"
MODELS = {
    "gemma-2-2b": Known(_gemma("gemma2", 2304, 26, 8, 4, 9216, **_2), TWO),
    "gemma-2-9b": Known(_gemma("gemma2", 3584, 42, 16, 8, 14336, **_2), TWO),
    "gemma-2-27b": Known(_gemma("gemma2", 4608, 46, 32, 16, 36864, **_2 | {"head_dim": 128}), TWO),
    "gemma-3-1b": Known(
        _gemma(
            "gemma3_text",
            1152,
            26,
            4,
            1,
            6912,
            **_3 | {"vocab_size": 262144, "sliding_window": 512},
        ),
        THREE,
    ),
    "gemma-3-4b": Known(_gemma("gemma3_text", 2560, 34, 8, 4, 10240, **_3), THREE, PICTURES),
    "gemma-3-12b": Known(_gemma("gemma3_text", 3840, 48, 16, 8, 15360, **_3), THREE, PICTURES),
    "gemma-3-27b": Known(
        _gemma("gemma3_text", 5376, 62, 32, 16, 21504, **_3 | {"head_dim": 128}), THREE, PICTURES
    ),
}
