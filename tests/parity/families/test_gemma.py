"""Gemma, Gemma 2 and Gemma 3 of transformers, saved by it and loaded here; wrong variants of each
must be far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from tests.parity.families import changes
from tests.parity.families.cases import Case, assert_case, assert_wrong, with_wrong
from tests.parity.families.changes import put, swap
from tests.parity.families.harness import assert_decoder, assert_near, assert_refused, ids_of, saved

W, D, CAP, FINAL = 6, 8, 2.5, 3.0
# frequencies 4^-i / 8 and 2^-i, whose angles their fp32 holds exactly
GLOBAL, LOCAL = 256.0, 16.0
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": D,
    "max_position_embeddings": 64,
}
FIRST = SIZES | {"hidden_size": 44, "num_hidden_layers": 2, "head_dim": 10}
SECOND = SIZES | {
    "sliding_window": W,
    "attn_logit_softcapping": CAP,
    "final_logit_softcapping": FINAL,
    "query_pre_attn_scalar": 3,
    # frequencies 1, 1/4, 1/16 and 1/64
    "rope_parameters": {"rope_type": "default", "rope_theta": 256.0},
}
ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": GLOBAL},
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL},
}
THIRD = SIZES | {
    "sliding_window": W,
    "query_pre_attn_scalar": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": ROPE,
}


def scaled_head(network: Any) -> None:
    """The factor on the tied matrix, and so on the logits, too."""
    network.embed.embedding.weight.data *= network.embed.scale
    network.embed.scale = 1.0


def final_cap(value: float | None) -> changes.Change:
    def change(network: Any) -> None:
        if value is not None:
            network.head.cap = value
            return
        plain = nn.Linear(*reversed(network.head.weight.shape), bias=False)
        plain.weight = network.head.weight
        network.head = plain

    return changes.named(f"final cap {value}", change)


def head_norms_without_the_one(network: Any) -> None:
    for attention in changes.attentions(network):
        for part in (attention.project.q, attention.project.k):
            part.steps[0].weight.data -= 1


LINEAR = regard.positions.LinearScaling(8.0)
OF_ALL = (changes.without_the_one, changes.other_groups, changes.interleave)
CASES: dict[str, Case] = {
    "gemma": Case(
        "Gemma",
        FIRST,
        (
            *OF_ALL,
            changes.norms_swapped,
            changes.each("scale of the model", scale=44**-0.5),
            put("embed", scale=1.0),
            scaled_head,
            changes.activation(nn.SiLU()),
        ),
        start=1000,
        other_gelu=True,
    ),
    "gemma, one key for all, biases": Case(
        "Gemma", FIRST | {"num_key_value_heads": 1, "attention_bias": True}
    ),
    "gemma, untied, linear": Case(
        "Gemma",
        FIRST
        | {
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    "gemma2": Case(
        "Gemma2",
        SECOND,
        (
            *OF_ALL,
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
            put("layers.*.(attention|feed_forward)_residual", after=nn.Identity()),
            swap("layers.*", "attention_residual.after", "feed_forward_residual.norm"),
        ),
        start=1000,
    ),
    "gemma2, no caps, layers named": Case(
        "Gemma2",
        SECOND
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma2, untied": Case("Gemma2", SECOND | {"tie_word_embeddings": False}),
    "gemma3, linear on global layers": Case(
        "Gemma3",
        THIRD,
        (
            *OF_ALL,
            changes.rotate(slice(1, 2), D, LOCAL),
            changes.rotate(slice(0, 3, 2), D, GLOBAL, scaling=LINEAR),
            changes.rotate(slice(1, 2), D, GLOBAL),
            changes.rotate(slice(0, 3, 2), D, LOCAL, scaling=LINEAR),
            swap("layers.*.attention.project.[qk]", "steps.0", "steps.1"),
            swap("layers.*.attention.project", "q.steps.0", "k.steps.0"),
            head_norms_without_the_one,
            changes.windows(W + 1, None, W + 1),
            changes.windows(None, W, None),
            changes.windows(W, W, W),
            changes.each("scale of the head", scale=None),
        ),
        start=1000,
        kind="TextConfig",
    ),
    "gemma3, every sixth layer sees all": Case(
        "Gemma3",
        THIRD | {"layer_types": None, "num_hidden_layers": 7, "rope_parameters": None},
        kind="TextConfig",
        length=24,
    ),
    "gemma3, capped logits, biases, untied": Case(
        "Gemma3",
        THIRD
        | {"final_logit_softcapping": 3.0, "attention_bias": True, "tie_word_embeddings": False},
        start=1000,
        kind="TextConfig",
    ),
}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tmp_path: Path) -> None:
    assert_case(CASES[case], tmp_path)


@pytest.mark.parametrize("case", with_wrong(CASES))
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    assert_wrong(CASES[case], tmp_path)


def test_the_first_name_of_the_activation(tmp_path: Path) -> None:
    """ "gelu" is the form with tanh."""
    model = CASES["gemma"].model(hidden_act="gelu")
    model.config.hidden_act = "gelu"
    assert_decoder(model, tmp_path)
    assert '"gelu"' in (tmp_path / "config.json").read_text()


def test_the_embedding_is_rounded_as_theirs(tmp_path: Path) -> None:
    """In bfloat16 the factor is 6.625, not sqrt(44) = 6.633."""
    model = CASES["gemma"].model()
    embed = regard.load(saved(model, tmp_path), dtype=torch.bfloat16).decoder.embed
    ids = ids_of(model)
    theirs_rounded = model.to(torch.bfloat16).model.embed_tokens(ids)
    assert torch.equal(embed(ids), theirs_rounded)
    exact = (embed.embedding(ids).double() * 44**0.5).to(torch.bfloat16)
    assert not torch.equal(exact, theirs_rounded)


def test_a_layer_with_a_window_keeps_no_more(tmp_path: Path) -> None:
    _, mine = CASES["gemma2"].load(tmp_path)
    caches = mine.new_caches()
    for id in range(3, 23):
        mine(mine.decoder.embed.embedding.weight.new_full((1, 1), id).long(), caches=caches)
    assert [len(cache) for cache in caches] == [W, 20, W]


GEMMA3 = CASES["gemma3, linear on global layers"]


def test_the_older_form_of_the_config(tmp_path: Path) -> None:
    """As files on the hub have it: the base of local layers at the top level, a number for the
    pattern.
    """
    model = GEMMA3.model(
        layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4
    )
    path = saved(model, tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del raw[key]
    raw |= {
        "rope_theta": GLOBAL,
        "rope_local_base_freq": LOCAL,
        "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    path.write_text(json.dumps(raw))
    mine = regard.load(tmp_path)
    ids = ids_of(model)
    assert_near(mine(ids), model(input_ids=ids).logits)
    assert mine.config.windows() == (W, None, W, None)


REFUSED = {
    "text_config is None; it must be an object with the language model's keys": {
        "model_type": "gemma3"
    },
    "num_hidden_layers is 1000000000, and the folder has": {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 10**9, "sliding_window_pattern": 6},
    },
    "rope_parameters.sliding_attention has the scaling": {
        "rope_parameters": dict.fromkeys(ROPE, ROPE["full_attention"])
    },
    "use_bidirectional_attention is True; only None or False": {
        "use_bidirectional_attention": True
    },
    "layer_types\\[1\\] is 'full_attention', and sliding_window_pattern 3": {
        "sliding_window_pattern": 3
    },
    "query_pre_attn_scalar is -1.0; it must be above 0": {"query_pre_attn_scalar": -1.0},
    "final_logit_softcapping is -2.0; it must be above 0": {"final_logit_softcapping": -2.0},
    "attn_logit_softcapping is 50.0; only None is supported": {"attn_logit_softcapping": 50.0},
    "rope_local_base_freq is -2.0; it must be above 1": {
        "rope_theta": None,
        "rope_parameters": None,
        "rope_local_base_freq": -2.0,
    },
}


def test_what_is_refused(tmp_path: Path) -> None:
    saved(GEMMA3.model(), tmp_path)
    for message, change in REFUSED.items():
        assert_refused(tmp_path, message, **change)
