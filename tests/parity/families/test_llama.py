"""Llama models of transformers, saved by it and loaded here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import swap
from tests.parity.families.harness import theirs
from tests.parity.families.published import assert_following, build, published

H, G, D = 6, 2, 10
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return SMALL | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | keys}


WRONG: tuple[changes.Change, ...] = (changes.interleave,)
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
CASES: dict[str, Case] = {
    "llama": Case("Llama", SMALL, WRONG, start=1000),
    "biases, tied": Case("Llama", SMALL | BIASES, WRONG),
    "llama3": Case(
        "Llama",
        SMALL | {"rope_parameters": LLAMA3},
        (
            *WRONG,
            changes.rotate(slice(None), D, 5e5),
            changes.each("scale of the model", scale=36**-0.5),
            changes.other_groups,
            swap("layers.*.feed_forward", "gate", "up"),
            changes.norms_swapped,
        ),
    ),
    "yarn": Case("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=16), WRONG),
    "yarn, two mscales": Case(
        "Llama", rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, truncate=False), WRONG
    ),
    "linear": Case("Llama", rope("linear", factor=3.0), WRONG),
}


test_llama, test_wrong_variants_are_far = parity_tests(CASES, keep=2, keep_wrong=["llama3"])


@pytest.mark.full
def test_dynamic(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = SMALL | {"max_position_embeddings": 20, "rope_parameters": rope}
    mine = assert_following(theirs("Llama", sizes), tmp_path, 20)
    caches, ids = mine.new_caches(), torch.full((1, 15), 3)
    mine(ids, caches=caches)
    with pytest.raises(ArgumentError, match="run the whole prefix again"):
        mine(ids, caches=caches)


# Published files.

LLAMA_2_7B = published("llama-2-7b")
FLAWS: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, "rope_scaling.type is 'linaer'; did"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta is 10000.0"),
    ({"rope_interleaved": True}, "rope_interleaved is True; only False is supported for llama"),
    ({"num_key_value_heads": 5}, "32 query heads are not divisible by 5 key/value heads"),
    ({"sliding_window": 4096}, "unknown key 'sliding_window'"),
]


@pytest.mark.parametrize("change, message", FLAWS)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        build(LLAMA_2_7B | change)
