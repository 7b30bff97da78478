"""Decoders that list which layers have experts, of transformers, saved by it and loaded here: Hy3
and MiMo-V2-Flash; wrong variants must be far.
"""

from __future__ import annotations

from typing import Any

import pytest

from regard.configs.expert_layers import HYV3Config, MiMoV2FlashConfig
from regard.configs.reader import parse
from regard.errors import ArgumentError
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.test_llama_relatives import (
    HEAD_DIM,
    SIZES,
    WINDOW,
    D,
    no_head_norms,
    other_weights_of_experts,
)

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 12, "rms_norm_eps": 1e-5}
KINDS = ["sparse", "dense", "sparse", "sparse"]
ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5}
MIMO = {
    **SIZES,
    **HEAD_DIM,
    **EXPERTS,
    "v_head_dim": 5,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "n_routed_experts": 6,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": ROPE | {"rope_theta": 5e6},
        "sliding_attention": ROPE | {"rope_theta": 1e4},
    },
}
CASES = {
    "hy_v3": Case(
        "HYV3",
        {
            **SIZES,
            **HEAD_DIM,
            **EXPERTS,
            "num_experts": 6,
            "num_shared_experts": 2,
            "num_hidden_layers": 4,
            "mlp_layer_types": KINDS,
        },
        (
            changes.interleave,
            zeros("layers.*.feed_forward.router.correction"),
            other_weights_of_experts,
            no_head_norms,
            put("layers.*.feed_forward.router", scale=1.0),
            put("layers.[023].feed_forward", shared=None),
        ),
        start=1000,
    ),
    "hy_v3, biases": Case(
        "HYV3",
        {**SIZES, **HEAD_DIM, **EXPERTS, "num_experts": 6}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        (
            zeros("layers.*.attention.project.q.linear.bias"),
            zeros("layers.1.feed_forward.shared.up.bias"),
        ),
    ),
    "mimo_v2_flash": Case(
        "MiMoV2Flash",
        MIMO,
        (
            changes.interleave,
            changes.rotate(slice(None), D, 1e4, rotary_dim=4),
            changes.rotate(slice(1, None, 2), D, 5e6, rotary_dim=4),
            changes.windows(None, WINDOW + 1, None, WINDOW + 1),
            zeros("layers.[13].attention.sink"),
            put("layers.*.attention.project.v.linear", scale=1.0),
            zeros("layers.*.feed_forward.router.correction"),
            other_weights_of_experts,
        ),
        start=1000,
    ),
    "mimo_v2_flash, biases, groups, no factor": Case(
        "MiMoV2Flash",
        MIMO
        | {"attention_bias": True, "attention_value_scale": None, "n_group": 3, "topk_group": 2}
        | {"mlp_layer_types": KINDS, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
        (zeros("layers.*.attention.project.v.linear.bias"),),
    ),
}
test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=["hy_v3"], keep_wrong=1)

HY3: dict[str, Any] = {**SIZES, **HEAD_DIM, **EXPERTS, "model_type": "hy_v3", "num_experts": 6}


def test_other_spellings_of_the_layers_with_experts() -> None:
    """Of the makers' files, and of transformers."""
    read = [
        [parse(HYV3Config, HY3 | keys).has_experts(i) for i in range(2)]
        for keys in (
            {},
            {"mlp_layer_types": ["dense", "sparse"]},
            {"first_k_dense_replace": 2},
            {"first_k_dense_replace": 0, "expert_hidden_dim": 12},
            {"moe_layer_freq": [1, 0]},
        )
    ]
    assert read == [[False, True], [False, True], [False, False], [True, True], [True, False]]


def test_keys_of_the_makers_of_mimo() -> None:
    """A window of the query and so many keys before it, and the sizes of both kinds of layers."""
    keys = {k: v for k, v in MIMO.items() if k not in ("layer_types", "rope_parameters")}
    theirs = {
        "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "sliding_window": WINDOW - 1,
        "sliding_window_size": WINDOW - 1,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": D,
        "swa_v_head_dim": 5,
        "moe_layer_freq": [0, 1, 1, 1],
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": 128,
    }
    own = parse(MiMoV2FlashConfig, MIMO | {"model_type": "mimo_v2_flash"})
    read = parse(MiMoV2FlashConfig, {k: v for k, v in keys.items() if k != "rms_norm_eps"} | theirs)
    assert read.windows() == own.windows() == (None, WINDOW, None, WINDOW)
    assert (read.ropes(), read.rms_norm_eps) == (own.ropes(), own.rms_norm_eps)
    assert [read.has_experts(i) for i in range(4)] == [False, True, True, True]
    for key, message in (
        ({"swa_num_key_value_heads": 1}, "with num_key_value_heads 1 it must be 2"),
        ({"swa_head_dim": 4}, "swa_head_dim is 4; with head_dim 8 it must be 8"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True; only"),
    ):
        with pytest.raises(ArgumentError, match=message):
            parse(MiMoV2FlashConfig, keys | theirs | key)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mlp_layer_types": ["dense", "moe"]}, "must be 'dense' or 'sparse' for each of 2 layers"),
        ({"mlp_layer_types": ["dense"]}, "must be 'dense' or 'sparse' for each of 2 layers"),
        (
            {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 2},
            "another key means .*; keep one",
        ),
        ({"expert_hidden_dim": 13}, "they mean the same: keep one"),
        ({"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False; only True"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse(HYV3Config, HY3 | keys)
