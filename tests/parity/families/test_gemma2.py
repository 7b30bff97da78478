"""Gemma 2 models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import regard
from tests.parity.families import changes
from tests.parity.families.harness import assert_decoder, assert_differs, saved, theirs
from tests.parity.families.published import assert_saved

W, CAP, FINAL = 6, 2.5, 3.0
# frequencies 1, 1/4, 1/16 and 1/64, whose angles their fp32 holds exactly
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": W,
    "attn_logit_softcapping": CAP,
    "final_logit_softcapping": FINAL,
    "query_pre_attn_scalar": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 256.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no caps, layers named": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_gemma2(name: str, tmp_path: Path) -> None:
    model = theirs("Gemma2", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path, start=1000 if name == "plain" else 0)
    assert_saved(mine, model, tmp_path, start=1000)


def test_a_layer_with_a_window_keeps_no_more(tmp_path: Path) -> None:
    model = theirs("Gemma2", SMALL)
    mine = regard.load(saved(model, tmp_path))
    caches = mine.new_caches()
    for id in range(3, 23):
        mine(mine.decoder.embed.embedding.weight.new_full((1, 1), id).long(), caches=caches)
    assert [len(cache) for cache in caches] == [W, 20, W]


def final_cap(value: float | None) -> changes.Change:
    def change(network: Any) -> None:
        if value is not None:
            network.head.cap = value
            return
        plain = nn.Linear(*reversed(network.head.weight.shape), bias=False)
        plain.weight = network.head.weight
        network.head = plain

    return changes.named(f"final cap {value}", change)


def norms_in_front_only(network: Any) -> None:
    for block in network.layers:
        for path in (block.attention_residual, block.feed_forward_residual):
            path.after = nn.Identity()


def norm_behind_of_the_other(network: Any) -> None:
    for block in network.layers:
        paths = (block.attention_residual, block.feed_forward_residual)
        paths[0].after, paths[1].norm = paths[1].norm, paths[0].after


WRONG = [
    changes.windows(W + 1, None, W + 1),
    changes.windows(W - 1, None, W - 1),
    changes.windows(None, W, None),
    changes.windows(None, None, None),
    changes.windows(W, W, W),
    changes.each("no cap", softcap=None),
    changes.each("other cap", softcap=1.1 * CAP),
    changes.each("scale of the head", scale=None),
    changes.each("inverse scale", scale=3**0.5),
    final_cap(None),
    final_cap(1.1 * FINAL),
    norms_in_front_only,
    norm_behind_of_the_other,
    changes.without_the_one,
    changes.other_groups,
    changes.interleave,
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("Gemma2", SMALL)
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)
