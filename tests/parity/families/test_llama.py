"""Llama models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.families.harness import check_decoder, must_differ, theirs

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ],
    ids=["plain", "biases, tied", "llama3", "yarn", "linear"],
)  # fmt: skip
def test_llama(change: dict[str, Any], tmp_path: Path) -> None:
    model = theirs("Llama", SMALL | change)
    mine = check_decoder(model, tmp_path, start=1000 if not change else 0)
    must_differ(mine, model, interleave, start=1000)


def interleave(network: Any) -> None:
    for module in network.modules():
        if hasattr(module, "layout"):
            module.layout, module._last = "interleaved", None
