"""gpt-oss of transformers, saved by it and loaded here; wrong ones must be far; the published
files.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.models.families import family
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.published import published

H, G, D, WINDOW = 6, 2, 10, 8
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": 4096,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "swiglu_limit": 0.8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
}


def local_and_full_swapped(network: Any) -> None:
    masks = [block.attention.mask for block in network.layers]
    for block, mask in zip(network.layers, masks[1:] + masks[:1], strict=True):
        block.attention.mask = mask


def experts(network: Any) -> list[Any]:
    return [expert for block in network.layers for expert in block.feed_forward.experts]


def halves_for_turns(network: Any) -> None:
    """Gate and up one above the other, where they take turns."""
    for expert in experts(network):
        rows = torch.stack((expert.gate.weight, expert.up.weight), 1).flatten(0, 1)
        expert.gate.weight.data, expert.up.weight.data = rows.chunk(2)


CASES: dict[str, Case] = {
    "gpt_oss": Case(
        "GptOss",
        SMALL,
        (
            changes.interleave,
            changes.rotate(slice(None), D, 150000.0),
            changes.each("no sinks", sink=None),
            changes.windows(WINDOW + 1, None, WINDOW + 1),
            local_and_full_swapped,
            halves_for_turns,
            put("layers.*.feed_forward.experts.*", limit=1e9),
            put("layers.*.feed_forward.experts.*", alpha=1.0),
            put("layers.*.feed_forward.router", normalize=False),
            zeros("layers.*.feed_forward.router.linear.bias"),
        ),
        start=1000,
    ),
    "all experts, tied": Case(
        "GptOss", SMALL | {"num_experts_per_tok": 6, "tie_word_embeddings": True}
    ),
    "one expert, no biases, all local": Case(
        "GptOss",
        SMALL
        | {
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "layer_types": ["sliding_attention"] * 3,
        },
    ),
    "no scaling": Case(
        "GptOss",
        SMALL
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_alpha": 1.2},
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=1)


# Published files.

GPT_OSS_20B = published("gpt-oss-20b")


def test_fresh_layers_add_nothing() -> None:
    """What writes to the residual path starts at 0, each expert's matrix too; the rest does not."""
    found = family("gpt_oss")
    network = found.build(parse(found.config, {"model_type": "gpt_oss"} | SMALL))
    x = torch.randn(1, 5, 36)
    for block in network.layers:
        assert torch.equal(block(x), x)
        assert all(expert.up.weight.any() for expert in block.feed_forward.experts)


def read(**change: Any) -> Any:
    found = family("gpt_oss")
    return parse(found.config, {k: v for k, v in (GPT_OSS_20B | change).items() if v != "absent"})


def test_what_a_file_leaves_out() -> None:
    assert read(layer_types="absent").windows() == read().windows() == (128, None) * 12
    assert read(rope_scaling="absent") == read()
    assert read(swiglu_limit="absent", head_dim="absent", rope_theta="absent") == read()
    assert read(num_experts_per_tok="absent").num_experts_per_tok == 4
    assert read(sliding_window=None, layer_types="absent").windows() == (None,) * 24
    assert read(rope_scaling=None) == read()
    default = {"rope_type": "default", "rope_theta": 1e4}
    unscaled = read(rope_scaling="absent", rope_theta="absent", rope_parameters=default)
    assert (building_blocks.rotary_module(unscaled.rope).scaling, unscaled.rope_theta) == (
        None,
        1e4,
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"experts_per_token": 2}, "experts_per_token is 2 and num_experts_per_tok is 4"),
        ({"num_local_experts": 3}, "num_experts_per_tok is 4, and num_local_experts is 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entry"),
        ({"num_key_value_heads": 5}, "not divisible by 5"),
        ({"swiglu_limits": 7.0}, "unknown key 'swiglu_limits'; did you mean 'swiglu_limit'"),
        ({"swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
    ],
)
def test_it_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read(**change)
