"""GPT-2, GPT-3 and gpt-oss."""

from __future__ import annotations

from typing import Any

from regard.cost.known.entry import Known


def _gpt2(n_embd: int, n_layer: int, n_head: int, n_positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": n_positions, "n_embd": n_embd,
        "n_layer": n_layer, "n_head": n_head, "torch_dtype": "float16" if n_positions == 2048 else "float32",
    }  # fmt: skip


GPT2 = "config.json of openai-community/gpt2 and its sizes"
GPT3 = "Brown et al. 2020 (arXiv 2005.14165), table 2.1; vocabulary and positions of GPT-2, context 2048"
BANDED = "every second layer of GPT-3 has banded sparse attention of an unpublished width: counted as dense"
SHARE = (
    "attention is 4 x 12,288 x 128 = 6,291,456 per head, x 96 heads = 603,979,776 in one layer, x 96 layers = 57,982,058,496: "
    "a third of 175 billion. Notes that have 5.95 billion of 17.5 billion call one layer's 96 heads the whole model, and slip "
    "by ten in both numbers (0.604 billion is one layer, 57.98 of 175 billion are all), so that the ratio comes out all the same"
)


def _gpt_oss(layers: int, experts: int) -> Known:
    return Known(
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128,
            "attention_bias": True, "tie_word_embeddings": False,
        },
        "OpenAI 2025 (arXiv 2508.10925), section 2; config.json of openai/gpt-oss",
        "released experts take 4.25 bits (MXFP4); bytes here are of one dtype for all weights",
    )  # fmt: skip


MODELS = {
    "gpt2": Known(_gpt2(768, 12, 12), GPT2),
    "gpt2-medium": Known(_gpt2(1024, 24, 16), GPT2),
    "gpt2-large": Known(_gpt2(1280, 36, 20), GPT2),
    "gpt2-xl": Known(_gpt2(1600, 48, 25), GPT2),
    "gpt3": Known(_gpt2(12288, 96, 96, 2048), GPT3, f"{SHARE}; {BANDED}"),
    "gpt3-6.7b": Known(_gpt2(4096, 32, 32, 2048), GPT3, BANDED),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
