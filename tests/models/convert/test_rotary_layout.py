"""Rotary relayout: a permutation of rows, exact and back to the same bits; half of it is caught."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.models.convert import to_groups, to_latent, to_layout
from regard.models.model import Model
from regard.models.save import save
from regard.positions import Rotary
from tests.models.convert import oracle, some
from tests.models.convert.some import FAR, ROUNDING, distance

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_there_and_back(name: str) -> None:
    before = some.of(name, **({"sliding_window": None} if name == "mistral" else {}))
    after, step = to_layout(before, "interleaved")
    assert (after.model_type, after.config.attention_options["layout"]) == ("regard", "interleaved")
    assert distance(before, after) < ROUNDING
    assert step.layers == ((0.0, 0.0),) * 2
    back, _ = to_layout(after, "half")
    assert back.model_type == "llama"
    assert all(torch.equal(x, back.weights()[name]) for name, x in before.weights().items())


def test_a_layer_turns_neighbours() -> None:
    """Loops that turn (2i, 2i+1), with the rows as they lie in the result."""
    before = some.llama()
    after, _ = to_layout(before, "interleaved")
    x = np.random.default_rng(0).standard_normal((7, 24))
    freq = building_blocks.rotary_module(before.config.rope).inv_freq.numpy()
    expected = oracle.attention(x, **oracle.maps(before.network.layers[0]), freq=freq)
    found = oracle.attention(
        x, **oracle.maps(after.network.layers[0]), freq=freq, layout="interleaved"
    )
    assert np.abs(found - expected).max() < ROUNDING * np.abs(expected).max()


@pytest.mark.parametrize("part", ["q", "k"])
def test_half_of_it_is_caught(part: str) -> None:
    """Rows of queries alone, or of keys alone."""
    before = some.llama()
    after, _ = to_layout(before, "interleaved")
    for old, new in zip(before.network.layers, after.network.layers, strict=True):
        weight = getattr(old.attention.project, part).linear.weight
        getattr(new.attention.project, part).linear.weight.data = weight.data.clone()
    assert distance(before, after) > FAR


@pytest.mark.parametrize("q_rank", [9, None])
@pytest.mark.parametrize("bias", [True, False])
def test_deepseek_v3_has_a_key_for_it(q_rank: int | None, bias: bool) -> None:
    change = DEEPSEEK | {"q_lora_rank": q_rank, "attention_bias": bias}
    before = some.of("deepseek_v3", **change)
    after, _ = to_layout(before, "half")
    assert after.model_type == "deepseek_v3"
    assert after.config.rope_interleave is False
    assert {m.layout for m in after.network.modules() if isinstance(m, Rotary)} == {"half"}
    assert distance(before, after) < ROUNDING
    back, _ = to_layout(after, "interleaved")
    assert back.config == before.config
    assert all(torch.equal(x, back.weights()[name]) for name, x in before.weights().items())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "olmo2", "phi3"])
def test_weights_in_another_layout_than_the_config_says(name: str) -> None:
    """Rows as Meta's files have them, put there by loops: the conversion finds the model that they
    are of.
    """
    partial = {"partial_rotary_factor": 0.6} if name == "phi3" else {}
    right = some.of(name, **partial)
    wrong = some.of(name, **partial)
    P = len(next(m for m in right.network.modules() if isinstance(m, Rotary)).inv_freq)
    for block in wrong.network.layers:
        for part in "qk":
            heads = getattr(block.attention.project, part)
            for parameter in heads.parameters():
                old, D = parameter.data.clone(), 10
                for start in range(0, len(old), D):
                    for i in range(P):
                        parameter.data[start + 2 * i] = old[start + i]
                        parameter.data[start + 2 * i + 1] = old[start + P + i]
    assert distance(right, wrong) > FAR
    after, step = to_layout(wrong, "half", stored="interleaved")
    assert after.config == wrong.config
    assert "as the weights were stored" in step.what
    assert all(torch.equal(x, after.weights()[n]) for n, x in right.weights().items())


def test_it_loads_here_and_what_comes_back_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")
    before = some.llama()
    after, _ = to_layout(before, "interleaved")
    back, _ = to_layout(after, "half")
    for name, held in (("there", after), ("back", back)):
        (tmp_path / name).mkdir()
        save(held.network, held.config, tmp_path / name, torch.float32)
    ids = some.ids(before)
    mine = regard.load(tmp_path / "there", kind=Model)(ids)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        exact = theirs.eval()(ids).logits
    assert float((mine - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_heads_of_interleaved_pairs() -> None:
    """The factors of svd are of pairs, wherever these lie."""
    before = some.llama(num_key_value_heads=4)
    there, _ = to_layout(before, "interleaved")
    direct, _ = to_groups(before, 2, "svd")
    pooled, _ = to_groups(there, 2, "svd")
    assert distance(direct, pooled) < 1e-9
    assert distance(to_latent(before, 12)[0], to_latent(there, 12)[0]) < 1e-6


@pytest.mark.parametrize(
    "name, change, layout, stored, message",
    [
        ("llama", {}, "half", None, "the rotary layout is half already; choose the other one"),
        ("llama", {}, "neox", None, "the rotary layout is 'neox'; it must be half or interleaved"),
        ("llama", {}, "interleaved", "half", "weights stored as half cannot become interleaved"),
        ("qwen2", {}, "interleaved", None, "the model has config keys of qwen2, and no family"),
        ("llama", {"attention_bias": True}, "interleaved", None, "the model has biases, and no"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "interleaved",
            None,
            "the model has other rotary frequencies",
        ),
        ("mistral", {"sliding_window": 8}, "interleaved", None, "the model has a window"),
    ],
)
def test_what_cannot_be_said(
    name: str, change: Any, layout: Any, stored: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        to_layout(some.of(name, **change), layout, stored=stored)


def test_models_without_rotary() -> None:
    with pytest.raises(ArgumentError, match="the model has no rotary positions"):
        to_layout(some.own(), "half")
    options = {"groups": 2, "head_dim": 10, "window": 4}
    other = some.of(
        "regard", attention="sliding_window", attention_options=options, position="rope"
    )
    with pytest.raises(ArgumentError, match="the model is regard's sliding_window with position"):
        to_layout(other, "interleaved")
