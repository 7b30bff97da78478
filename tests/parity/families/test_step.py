"""The language model of Step-3.7 of transformers, saved by it and loaded here; wrong variants must
be far; the files of Step-3.5-Flash.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.configs.reader import parse, read_sizes
from regard.configs.step import StepConfig
from regard.errors import ArgumentError
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.published import count, published
from tests.parity.families.test_llama_relatives import HEAD_DIM, SIZES, WINDOW

FULL, SLIDING = "full_attention", "sliding_attention"
LIMITS: dict[str, Any] = {
    "swiglu_limits": [0, 0, 0, 0.3, None],
    "swiglu_limits_shared": [0, 0.5, 0, 0.2, 0.7],
}
ROPES: dict[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
}
TEXT: dict[str, Any] = {
    **SIZES,
    **HEAD_DIM,
    **LIMITS,
    "num_hidden_layers": 5,
    "num_sliding_attention_heads": 8,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "share_expert_dim": 10,
    "moe_router_scaling_factor": 3.0,
    "rope_parameters": ROPES,
}
SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def whole(**text: Any) -> dict[str, Any]:
    return {"text_config": TEXT | text, "vision_config": SIGHT}


def without_the_one_of_norms(network: Any) -> None:
    for block in network.layers:
        block.attention_residual.norm.weight.data -= 1


CASES = {
    "step3p7": Case(
        "Step3p7",
        whole(),
        (
            changes.interleave,
            without_the_one_of_norms,
            put("layers.*.attention.project.finishes.0", activation="softplus"),
            put("layers.*.feed_forward.router", scale=1.0),
            put("layers.3.feed_forward.experts.*", limit=1e9),
            put("layers.1.feed_forward", after=False),
            put("layers.4.feed_forward.shared", limit=1e9),
            zeros("layers.[34].feed_forward.router.correction"),
            changes.windows(None, WINDOW - 1, WINDOW - 1, WINDOW - 1, None),
        ),
        start=1000,
        head="ForConditionalGeneration",
    ),
    "step3p7, llama3, biases": Case(
        "Step3p7",
        whole(
            rope_parameters=ROPES | {FULL: ROPES[FULL] | LLAMA3},
            attention_bias=True,
            mlp_bias=True,
            query_pre_attn_scalar=20,
            mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"],
        ),
        (put("layers.*.attention", scale=None), zeros("layers.1.feed_forward.up.bias")),
        head="ForConditionalGeneration",
    ),
}
test_every_family, test_wrong_variants_are_far = parity_tests(
    CASES, keep=["step3p7, llama3, biases"], keep_wrong=1
)

N = 45
MAKERS = published("step-3.5-flash")


def test_the_files_of_the_makers() -> None:
    """196 billion parameters, as transformers' own network has; the last two layers have limits."""
    import transformers

    with torch.device("meta"):
        theirs = transformers.Step3p7TextModel(transformers.Step3p7TextConfig(**MAKERS))
    corrections = sum(x.numel() for n, x in theirs.named_buffers() if n.endswith("correction_bias"))
    head = MAKERS["vocab_size"] * MAKERS["hidden_size"]
    assert (
        count(theirs) + corrections + head == read_sizes(MAKERS, "").parameters == 196_956_130_368
    )
    config = parse(StepConfig, MAKERS)
    assert [config.limits(i, expert=True) is not None for i in range(N)] == [False] * 43 + [
        True
    ] * 2
    assert [config.limits(i) is not None for i in range(N)] == [False] * 44 + [True]
    ropes = {(x.theta, x.partial, bool(x.scaling)) for x in config.ropes() if x is not None}
    assert ropes == {(5e6, 0.5, True), (1e4, 1.0, False)}
    assert {config.head_shape(window).heads for window in config.windows()} == {64, 96}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limits": [7.0]}, "swiglu_limits has 1 entry and num_hidden_layers is 45"),
        ({"rope_theta": [1e4, *MAKERS["rope_theta"][1:]]}, "all of one kind must have the same"),
        ({"rope_theta": [1e4]}, "rope_theta has 1 entry and num_hidden_layers is 45; give one"),
        (
            {"attention_other_setting": {"num_attention_heads": 96, "head_dim": 64}},
            "attention_other_setting.head_dim is 64; it must be head_dim, 128",
        ),
        ({"per_layer_config": {"1": {"num_attention_heads": 64}}}, "must give num_attention_heads"),
        ({"sink": True}, "sink is True; only"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum has 'x'; it must list layers"),
        ({"rope_scaling": 4}, "rope_scaling is 4; it must be an object"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse(StepConfig, MAKERS | change)
