"""Models of transformers that mix Mamba-2 with attention, saved by it and loaded here; wrong
variants of each must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import regard
from tests.parity.families.changes import Change, norms_swapped
from tests.parity.families.harness import assert_decoder, assert_differs, saved, theirs
from tests.parity.families.published import assert_saved
from tests.parity.families.state_space_changes import (
    COMMON,
    other_key_heads,
    other_scale,
    part,
    positions_added,
    positions_removed,
    swap_b_and_c,
    zero,
)
from tests.parity.families.test_llama_relatives import (
    attribute,
    gate_and_up_swapped,
    one_expert_less,
    other_weights_of_experts,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-3,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
}
LIMITS = {"time_step_limit": (0.4, 0.9)}
LAYERS = ["mamba", "attention", "mamba"]


class Case(NamedTuple):
    """A family: its name in transformers, further keys, and its own wrong variants."""

    name: str
    keys: dict[str, Any]
    wrong: tuple[Change, ...]


ATTENTION: tuple[Change, ...] = (other_scale, other_key_heads)
CASES: dict[str, Case] = {
    "bamba": Case(
        "Bamba",
        LIMITS | {"attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
        (*COMMON, *ATTENTION, positions_removed, norms_swapped),
    ),
    "bamba, biases": Case(
        "Bamba",
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1},
        (part("", swap_b_and_c), part("rule.linear", zero("bias"))),
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybrid",
        LIMITS
        | {
            "layer_types": LAYERS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 14,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        (
            *COMMON,
            *ATTENTION,
            positions_added,
            other_weights_of_experts,
            gate_and_up_swapped,
            one_expert_less,
            attribute("embed", "scale", 1.0),
            attribute("head", "scale", 1.0),
            attribute("layers.attention_residual", "scale", 1.0),
            attribute("layers.feed_forward_residual", "scale", 1.0),
        ),
    ),
    "granitemoehybrid, dense": Case(
        "GraniteMoeHybrid",
        {
            "layer_types": LAYERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 14,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
        (*ATTENTION, positions_removed),
    ),
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_every_hybrid(case: str, tmp_path: Path) -> None:
    model = theirs(CASES[case].name, SIZES | CASES[case].keys)
    mine = assert_decoder(model, tmp_path, start=1000)
    assert_saved(mine, model, tmp_path, start=1000)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    model = theirs(CASES[case].name, SIZES | CASES[case].keys)
    mine = regard.load(saved(model, tmp_path))
    for change in CASES[case].wrong:
        assert_differs(mine, model, change, start=1000)
