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
from tests.parity.families.published import (
    assert_following,
    build,
    count,
    layer,
    placed,
    published,
)

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
        "Llama",
        rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, truncate=False),
        WRONG,
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
LLAMA_32_1B = published("llama-3.2-1b")
LLAMA_31_8B = LLAMA_32_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": None,
    "tie_word_embeddings": False,
    "rope_scaling": LLAMA_32_1B["rope_scaling"] | {"factor": 8.0},
}
SMOL = LLAMA_2_7B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
# as transformers 5 writes it
NEW_1B = {
    k: v for k, v in LLAMA_32_1B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")
} | {
    "dtype": "bfloat16",
    "rope_parameters": LLAMA_32_1B["rope_scaling"] | {"rope_theta": 500000.0},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "raw, parameters, base",
    [
        (LLAMA_2_7B, 6_738_415_616, 1e4),
        (LLAMA_31_8B, 8_030_261_248, 5e5),
        (LLAMA_32_1B, 1_235_814_400, 5e5),
        (NEW_1B, 1_235_814_400, 5e5),
        (SMOL, 134_515_008, 1e5),
    ],
    ids=["Llama-2-7B", "Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-1B, newer", "SmolLM2-135M"],
)
def test_published_configs(raw: dict[str, Any], parameters: int, base: float) -> None:
    config, network = build(raw)
    assert count(network) == parameters
    assert config.rope_theta == base


def test_published_names() -> None:
    _, network = build(LLAMA_32_1B)
    assert layer(LLAMA_32_1B, network) == {
        "input_layernorm.weight": (2048,),
        "post_attention_layernorm.weight": (2048,),
        "self_attn.q_proj.weight": (2048, 2048),
        "self_attn.k_proj.weight": (512, 2048),
        "self_attn.v_proj.weight": (512, 2048),
        "self_attn.o_proj.weight": (2048, 2048),
        "mlp.gate_proj.weight": (8192, 2048),
        "mlp.up_proj.weight": (8192, 2048),
        "mlp.down_proj.weight": (2048, 8192),
    }
    heads = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert placed(LLAMA_32_1B, network, *heads) == heads


FLAWS: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"type": "linaer", "factor": 2.0}},
        "rope_scaling.type is 'linaer'; did you mean 'linear'?",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "lacks low_freq_factor, high_freq_factor",
    ),
    (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
        "rope_theta is 10000.0 and rope_parameters.rope_theta is 500000.0",
    ),
    ({"rope_interleaved": True}, "rope_interleaved is True; only False is supported for llama"),
    ({"num_key_value_heads": 5}, "32 query heads are not divisible by 5 key/value heads"),
    ({"sliding_window": 4096}, "unknown key 'sliding_window'"),
]


@pytest.mark.parametrize("change, message", FLAWS)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        build(LLAMA_2_7B | change)
