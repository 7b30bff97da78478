"""Longer context: the keys that transformers reads, and the same logits there beyond the trained
length.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models.convert import extend_context, to_latent
from regard.models.model import Model
from regard.models.save import save
from tests.models.convert import some

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TRAINED, LONG = 16, 64
KEYS: dict[str, dict[str, Any]] = {
    "linear": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "max_position_embeddings": LONG,
    },
    # b s^(d/(d-2)) = 10000 * 4^(10/8)
    "ntk": {"rope_theta": 56568.54249492381, "max_position_embeddings": LONG},
    "dynamic": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": TRAINED,
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        "max_position_embeddings": LONG,
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        "max_position_embeddings": LONG,
    },
}


@pytest.mark.parametrize("extension", KEYS)
def test_transformers_reads_the_same(extension: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")
    before = some.llama(max_position_embeddings=TRAINED)
    after, step = extend_context(before, LONG, extension)
    for key, value in KEYS[extension].items():
        found = getattr(after.config, key)
        assert found == (pytest.approx(value) if isinstance(value, float) else value)
    assert all(torch.equal(x, after.weights()[name]) for name, x in before.weights().items())
    assert step.layers == ()
    save(after.network, after.config, tmp_path, torch.float32)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = some.ids(before, LONG)
    with torch.no_grad():
        exact = theirs(ids, use_cache=False).logits
    mine = regard.load(tmp_path, kind=Model)(ids)
    assert float((mine - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    was = before.network(ids)
    assert float((was - mine).abs().max()) > 1e-2 * float(was.abs().max())


def test_latents_have_a_context_too() -> None:
    latent, _ = to_latent(some.llama(max_position_embeddings=TRAINED), 12)
    after, _ = extend_context(latent, LONG, "yarn")
    assert after.config.rope_scaling == KEYS["yarn"]["rope_scaling"]
    with pytest.raises(ArgumentError, match="whose frequencies depend on the length"):
        extend_context(latent, LONG, "dynamic")


@pytest.mark.parametrize(
    "name, change, length, extension, message",
    [
        ("llama", {}, 64, "ntkk", "the scaling is 'ntkk'; it must be one of linear, ntk"),
        ("llama", {}, 2048, "yarn", "the context is 2048, and max_position_embeddings is 2048"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            4096,
            "yarn",
            "rope_scaling is {'rope_type': 'linear', 'factor': 2.0} already",
        ),
        (
            "gpt2",
            {"n_positions": 32, "n_embd": 24, "n_layer": 1, "n_head": 4},
            64,
            "yarn",
            "the context of a gpt2 cannot be extended",
        ),
        ("bloom", {"n_layer": 1, "n_head": 4}, 64, "yarn", "the context of a bloom cannot"),
    ],
)
def test_what_cannot_be(name: str, change: Any, length: int, extension: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        extend_context(some.of(name, **change), length, extension)
