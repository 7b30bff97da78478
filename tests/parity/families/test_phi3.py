"""Phi 3 models of transformers, saved by it and loaded here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.positions import LongRoPE, Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import swap
from tests.parity.families.harness import assert_decoder, assert_differs, assert_refused, theirs
from tests.parity.families.published import assert_following, assert_saved, build, published

H, G, D, W = 6, 2, 8, 9
# transformers takes hidden_size / num_attention_heads for the head dim: no other is possible
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": H * D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def longrope(partial: float, original: int) -> dict[str, Any]:
    pairs = int(D * partial) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": partial,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 2.0 * i for i in range(pairs)],
        "original_max_position_embeddings": original,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


PARTIAL = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
}


def group_by_group(network: Any) -> None:
    """The same rows, read as each group's queries, key and value in turn."""
    for block in network.layers:
        parts = [getattr(block.attention.project, name).linear for name in "qkv"]
        fused = torch.cat([part.weight for part in parts]).unflatten(0, (G, H // G + 2, D))
        split = fused.split([H // G, 1, 1], dim=1)
        for part, rows in zip(parts, split, strict=True):
            part.weight.data = rows.flatten(0, 2).contiguous()


def assert_long_list(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, Rotary):
            s = module.scaling
            assert isinstance(s, LongRoPE)
            module.scaling = LongRoPE(s.long_factor, s.long_factor, s.original_length, s.factor)


CASES: dict[str, Case] = {
    "phi3": Case(
        "Phi3",
        SMALL,
        (
            swap("layers.*.attention.project", "k.linear", "v.linear"),
            swap("layers.*.feed_forward", "gate", "up"),
            group_by_group,
        ),
        start=1000,
    ),
    "a window, and a part of each head turns": Case(
        "Phi3",
        SMALL | PARTIAL | {"sliding_window": W, "tie_word_embeddings": True},
        (
            changes.windows(W + 1, W + 1),
            changes.rotate(slice(None), D),
            # the exponents divided by the head dim
            changes.rotate(slice(None), D, rotary_dim=6, proportional=True),
        ),
        start=1000,
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(
    CASES, keep=["phi3"], keep_wrong=["phi3"]
)


@pytest.mark.full
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope(partial: float, tmp_path: Path) -> None:
    """Below the trained length as any other; and across it."""
    short, across = tmp_path / "short", tmp_path / "across"
    model = theirs("Phi3", SMALL | longrope(partial, 48))
    mine = assert_decoder(model, short)
    assert_differs(mine, model, assert_long_list)
    (tmp_path / "saved").mkdir()
    assert_saved(mine, model, tmp_path / "saved")
    assert_following(theirs("Phi3", SMALL | longrope(partial, 17)), across, 17)


# Published files.

MINI = published("phi-3-mini-4k")


@pytest.mark.parametrize("name", ["phi-3-mini-4k", "phi-3-mini-128k", "phi-4-mini"])
def test_published_rotary_positions(name: str) -> None:
    """The lists of two files are invented, and have the right lengths."""
    rotary = building_blocks.rotary_module(build(published(name))[0].rope)
    assert len(rotary.inv_freq) == 48  # Phi-4-mini: three quarters of 128
    assert rotary.follows_length == (name != "phi-3-mini-4k")
    factor = 1.1902380714238083 if rotary.follows_length else 1
    assert rotary.rotary_factor == pytest.approx(factor, rel=1e-15)


FLAWS: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'"),
    (
        {"rope_scaling": {"type": "su", "long_factor": [1.0] * 47, "short_factor": [1.0] * 48}},
        "rope_scaling.long_factor has 47 numbers and a head has 48 rotary pairs",
    ),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0; it must be above 0"),
    (
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}},
        "auto_map names 'modeling_evil.EvilForCausalLM', which is not the published code of phi3",
    ),
    ({"auto_map": "evil"}, "auto_map names 'evil'"),
    ({"full_attn_mod": 2}, "full_attn_mod is 2; only 1 is supported for phi3"),
]


@pytest.mark.parametrize("change, message", FLAWS)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        build(MINI | change)


def test_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """The published files name the code that the family was made from; any other name is
    refused.
    """
    theirs("Phi3", SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"auto_map": MINI["auto_map"]}))
    assert regard.load(tmp_path).config.vocab_size == 96
    other = {"AutoModelForCausalLM": "evil.Evil"}
    assert_refused(tmp_path, r"auto_map names 'evil\.Evil'", auto_map=other)
