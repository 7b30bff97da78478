"""Falcon, GPT-BigCode, GPT-J, GPT-Neo and OPT of transformers, saved by it and loaded here; wrong
variants of each must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import regard
from regard.nn import FusedQKV
from tests.parity.families import changes
from tests.parity.families.harness import assert_decoder, assert_differs, saved, theirs
from tests.parity.families.published import assert_saved
from tests.parity.families.test_llama_relatives import (
    OTHER_SCALE,
    WINDOW,
    Case,
    no_head_bias,
    one_after_the_other,
    other_activation,
    other_layout,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def other_rows(network: Any) -> None:
    """[q k v] of each group read as [all q | all k | all v], or the reverse."""
    for attention in changes.attentions(network):
        old = attention.project
        order: Any = "parts" if old.order == "groups" else "groups"
        if old.groups == 1:  # both orders are the same: queries, then the key and the value
            order, sizes = old.order, old.linear.weight.data.split(old.head_dim)
            for n, row in enumerate([*sizes[:-2], sizes[-1].clone(), sizes[-2].clone()]):
                old.linear.weight.data[n * old.head_dim : (n + 1) * old.head_dim] = row
            continue
        attention.project = FusedQKV(
            old.linear.in_features,
            old.heads,
            old.groups,
            old.head_dim,
            order=order,
            steps=tuple(old.steps),
            bias=old.linear.bias is not None,
        )
        attention.project.linear = old.linear


def shifted_positions(network: Any) -> None:
    table = network.embed.positional.weight
    table.data = table.data.roll(1, 0)


CASES: dict[str, Case] = {
    "falcon": Case(
        "Falcon",
        {"max_position_embeddings": 2048},
        (other_rows, other_layout, one_after_the_other),
    ),
    "falcon, groups": Case(
        "Falcon",
        {
            "max_position_embeddings": 2048,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
        },
        (other_rows, other_layout),
    ),
    "falcon, groups, one norm": Case(
        "Falcon",
        {
            "max_position_embeddings": 2048,
            "new_decoder_architecture": True,
            "num_kv_heads": 3,
            "num_ln_in_parallel_attn": 1,
        },
        (other_rows, one_after_the_other),
    ),
    "gpt_bigcode": Case("GPTBigCode", {}, (other_rows, shifted_positions, changes.norms_swapped)),
    "gpt_bigcode, all keys": Case("GPTBigCode", {"multi_query": False}, (changes.head_by_head,)),
    "gpt_neo": Case(
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        (
            shifted_positions,
            changes.norms_swapped,
            changes.windows(None, WINDOW + 1),
            changes.windows(WINDOW, None),
        ),
    ),
    "gptj": Case("GPTJ", {"rotary_dim": 4}, (one_after_the_other, no_head_bias, other_layout)),
    "opt": Case("OPT", {"ffn_dim": 40}, (shifted_positions, changes.norms_swapped)),
}


def model_of(case: str) -> Any:
    return theirs(CASES[case].name, SIZES | CASES[case].keys)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    mine = assert_decoder(model, tmp_path)
    assert_saved(mine, model, tmp_path)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    mine = regard.load(saved(model, tmp_path))
    for change in (OTHER_SCALE, other_activation, *CASES[case].wrong):
        assert_differs(mine, model, change)


def test_a_shared_norm_is_stored_under_its_own_name(tmp_path: Path) -> None:
    shared, own = (regard.load(saved(model_of(c), tmp_path / c)) for c in list(CASES)[:2])
    one, two = shared.decoder.layers[0], own.decoder.layers[0]
    assert isinstance(one.feed_forward_residual.norm, nn.Identity)
    assert isinstance(two.feed_forward_residual.norm, nn.LayerNorm)
