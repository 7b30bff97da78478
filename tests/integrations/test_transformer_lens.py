"""Names and layouts of TransformerLens: by shapes and taps, and with it by its own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.integrations.transformer_lens import HOOKS, run_with_cache, tap_name

IDS = torch.tensor([[5, 900, 17, 17, 300]])


def test_every_hook_has_the_numbers_of_its_tap() -> None:
    model = regard.load("tiny")
    with torch.no_grad():
        logits, cache = run_with_cache(model, IDS)
        assert torch.allclose(logits, model(IDS), atol=1e-4)
    assert len(cache) == 1 + len(HOOKS) * len(model.decoder.layers)
    pattern, v, z = (cache[f"blocks.2.attn.hook_{name}"] for name in ("pattern", "v", "z"))
    assert torch.allclose(pattern.sum(-1), torch.ones(1, 8, 5))
    mixed = torch.einsum("bhts,bshd->bthd", pattern, v.repeat_interleave(2, 2))
    assert torch.allclose(mixed, z, atol=1e-5), "[B, T, H, D], as TransformerLens has it"
    assert not torch.allclose(mixed.flip(1), z, atol=1e-2)


@pytest.mark.parametrize("hook", ["blocks.0.attn.hook_q", "blocks.0.ln1.hook_scale", "hook_pos"])
def test_a_hook_without_a_tap_is_refused(hook: str) -> None:
    with pytest.raises(ArgumentError, match="no tap for the hook"):
        tap_name(hook)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_transformer_lens(tmp_path: Path) -> None:
    bridges: Any = pytest.importorskip(
        "transformer_lens.model_bridge", reason="pip install transformer-lens"
    )
    import transformers

    folder = regard.load("tiny").save(tmp_path / "tiny")
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = bridges.TransformerBridge.boot_transformers(
        str(folder), hf_model=network.eval(), tokenizer=tokenizer, dtype=torch.float32
    )
    with torch.no_grad():
        logits, cache = run_with_cache(regard.load(folder), IDS)
        expected_logits, expected = theirs.run_with_cache(IDS)
    assert torch.allclose(logits, expected_logits, atol=1e-4)
    shared = [name for name in cache if name in expected]
    assert {name.split(".")[-1] for name in shared} >= {"hook_v", "hook_pattern", "hook_z"}
    for name in shared:
        assert torch.allclose(cache[name], expected[name], atol=1e-4), name
