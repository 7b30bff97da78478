"""Gemma 4 of transformers, saved by it and loaded here: two kinds of heads, keys as values,
embeddings for layers, shared keys and values; wrong ones must be far.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.configs.base import FULL, SLIDING
from regard.masks import Causal
from regard.positions import Rotary
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import on, put, swap, zeros
from tests.parity.families.test_gemma3n import other_embedding_of_the_layer

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_key_value_heads": 3,
    "sliding_window": 9,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "max_position_embeddings": 4096,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 10,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}


ROUTER = "layers.*.feed_forward.router"


def whole_rotation(network: Any) -> None:
    for block in network.layers[2::2]:
        block.attention.project.q.steps[-1] = Rotary(8, 1e6)


OF_BOTH = (
    on("layers.*", "without its number", lambda block: block.scale.data.fill_(1)),
    put("layers.0.attention", mask=Causal()),
    put("layers.[0-2].attention.project.v", steps=nn.ModuleList()),
    put("layers.*.attention", scale=0.3),
    swap("layers.*.attention_residual", "norm", "after"),
    whole_rotation,
)
CASES = {
    # their angles are fp32, and a scale of 1 makes scores large: at 1000 that is above the bound
    "as E2B": Case(
        "Gemma4",
        SMALL,
        (
            *OF_BOTH,
            other_embedding_of_the_layer,
            zeros("layers.*.layer_input.project.weight"),
            put("", memory_from=(None, None, None, 0, 2), _lenders=frozenset({0, 2})),
            put("head", cap=1.0),
        ),
        start=200,
        kind="TextConfig",
    ),
    "as 31B": Case(
        "Gemma4",
        SMALL
        | {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
        },
        OF_BOTH,
        start=200,
        kind="TextConfig",
    ),
    "as 26B-A4B": Case(
        "Gemma4",
        SMALL
        | {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
        (
            *OF_BOTH,
            on(ROUTER, "inputs alike", lambda router: router.input_scale.fill_(1)),
            on(ROUTER, "experts alike", lambda router: router.expert_scale.fill_(1)),
            put(ROUTER, k=1),
            swap("layers.*.feed_forward", "norm", "after"),
            swap("layers.*.feed_forward", "dense_norm", "norm"),
            zeros("layers.*.feed_forward.dense.down.weight"),
        ),
        start=200,
        kind="TextConfig",
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(
    CASES, keep=["as E2B", "as 26B-A4B"], keep_wrong=1
)
