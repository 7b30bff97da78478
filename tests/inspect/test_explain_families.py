"""Checkpoints of every family are explained: fused projections, norms, biases, softcaps, sinks and
latents show as steps.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from regard.inspect import explain
from regard.models.families import family
from regard.models.model import Model
from tests.inspect.small_model import TEXT, tokenizer
from tests.inspect.test_explain_models import wild

SIZES: dict[str, Any] = {
    "vocab_size": tokenizer().vocab_size,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_local_experts": 4,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
}
"""Of whatever names a family's config has."""

PLAIN = ["dot", "scaled", "masked"]
FAMILIES: dict[str, tuple[list[str], list[str], set[str]]] = {
    "mistral": (["projected", "rotated"], PLAIN, {"", "outside window 4"}),
    "qwen3": (["projected", "rmsnorm", "rotated"], PLAIN, {""}),
    "gemma2": (["projected", "rotated"], ["dot", "scaled", "capped", "masked"], {""}),
    "gpt2": (["projected"], PLAIN, {""}),
    "gpt_neox": (["projected", "rotated"], PLAIN, {""}),
    "gpt_oss": (["projected", "rotated"], PLAIN, {""}),
    "bloom": (["projected"], ["dot", "scaled", "biased", "masked"], {""}),
    "phi3": (["projected", "rotated"], PLAIN, {"", "outside window 4"}),
    "olmo2": (["projected", "rotated"], PLAIN, {""}),
    "deepseek_v3": (["projected", "rotated"], PLAIN, {""}),
}
"""Name -> steps of the query, links of the score, and reasons of the last query of layer 1."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_explained_with_its_own_steps(name: str) -> None:
    its_family = family(name)
    sizes = SIZES | ({"num_key_value_heads": 4} if name.startswith("deepseek") else {})
    config = its_family.config(
        **{f.name: sizes[f.name] for f in fields(its_family.config) if f.name in sizes}
    )
    found = explain(
        Model(wild(its_family.build(config)), tokenizer(), config), TEXT, layer=1, head=1
    )
    queries, scores, reasons = FAMILIES[name]
    assert [step.name for step in found.q] == queries
    assert [step.name for step in found.scores] == scores
    assert set(found.masked) == reasons
    assert found.check < 1e-5, found.checks
    assert {"q", "k", "v", "residual"} <= set(found.checks), "nothing was left unchecked"
    assert (found.sink is not None) == (name == "gpt_oss")
    assert found.model == name
