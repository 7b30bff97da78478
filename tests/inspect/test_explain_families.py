"""Checkpoints of every family are explained: fused projections, norms, biases, softcaps, sinks and
latents show as steps.
"""

from __future__ import annotations

import pytest

from regard.configs.reader import parse
from regard.inspect import explain
from regard.models.families import family
from regard.models.model import Model
from tests.cost.tiny import TINY
from tests.inspect.small_model import TEXT, tokenizer
from tests.inspect.test_explain_models import wild

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
    own, changes = family(name), {"vocab_size": tokenizer().vocab_size}
    if name in ("mistral", "phi3"):
        changes["sliding_window"] = 4
    config = parse(own.config, TINY[name] | changes)
    network = wild(own.build(config))
    found = explain(Model(network, tokenizer(), config), TEXT, layer=1, head=1)
    queries, scores, reasons = FAMILIES[name]
    assert [step.name for step in found.q] == queries
    assert [step.name for step in found.scores] == scores
    assert set(found.masked) == reasons
    assert found.check < 1e-5, found.checks
    assert {"q", "k", "v", "residual"} <= set(found.checks), "nothing was left unchecked"
    assert (found.sink is not None) == (name == "gpt_oss")
    assert found.model == name
