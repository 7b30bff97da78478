"""What a config.json leaves out has the value that transformers gives it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING

from regard.configs import CONFIGS, config_class

LENGTH, WINDOW = "max_position_embeddings", "sliding_window"
# where the class of transformers has another number than the reader
DIFFERENT = {
    "deepseek_v3": {LENGTH},
    "deepseek_v32": {LENGTH},
    "glm4_moe": {LENGTH},
    "kimi_k25": {"tie_word_embeddings"},  # of the whole, too
    "minimax_m2": {LENGTH},
    "ernie4_5_moe": {"moe_layer_end_index"},  # -1 becomes the number of the last layer
    "mistral3": {"tie_word_embeddings"},  # of the whole; a head that is stored is its own
    "nemotron_h": {LENGTH},
    "olmo_hybrid": {f"linear_{x}" for x in ("key_head_dim", "value_head_dim")}
    | {f"linear_num_{x}_heads" for x in ("key", "value")},
    "olmoe": {LENGTH},
    # null is the activation of the networks, and no indexer, which the family always has
    "qwen4_exp_text": {"output_gate_type", "indexer_kv_heads"},
    # its class drops the window where use_sliding_window is False
    **{name: {WINDOW} for name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")},
}


ROPE = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
ABSENT = (WINDOW, "attn_logit_softcapping", "final_logit_softcapping")
"""Settings whose absence means that there is no such thing; None is elsewhere a value that other
settings decide.
"""


def defaults_of(name: str) -> dict[str, Any]:
    """The settings of transformers' config without arguments, those of its rotary positions too."""
    found = CONFIG_MAPPING[name]().to_dict()
    rope = found.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"] | {"rope_local_base_freq": local}
    return {k: rope[k] for k in ROPE if k in rope} | found


def test_every_nth_layer_sees_all_keys() -> None:
    for name in ("gemma2", "gemma3_text", "gemma3n_text"):
        recipe = config_class(name).recipe  # type: ignore[union-attr]
        period = CONFIG_MAPPING[name]().layer_types.index("full_attention") + 1
        assert recipe.window_pattern == period


def test_defaults_are_those_of_transformers() -> None:
    compared = 0
    different: dict[str, set[str]] = {}
    for name in CONFIGS:
        config = config_class(name)
        if config is None or name not in CONFIG_MAPPING:
            continue
        theirs = defaults_of(name)
        for field in fields(config):
            is_number = isinstance(field.default, int | float | str)
            is_absent = field.default is None and field.name in ABSENT
            is_read = field.name in theirs and field.name not in config.unwritten
            if (is_number or is_absent) and is_read:
                compared += 1
                if theirs[field.name] != field.default:
                    different.setdefault(name, set()).add(field.name)
    assert different == DIFFERENT
    assert compared > 500
