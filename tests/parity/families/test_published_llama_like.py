"""Published config.json files of Mistral, Qwen 2 and 3 and OLMo 2: parameters, windows, and the
shapes of stored tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from regard.errors import ArgumentError
from tests.parity.families.published import build, count, layer, placed, published

V01 = published("mistral-7b-v0.1")
V03 = V01 | {
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
    "attention_dropout": 0.0,
}
NEMO = V03 | {
    "hidden_size": 5120,
    "head_dim": 128,
    "num_hidden_layers": 40,
    "max_position_embeddings": 131072,
    "vocab_size": 131072,
}
QWEN2_HALF = published("qwen2-0.5b")
QWEN2_SEVEN = QWEN2_HALF | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "use_mrope": False,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
QWEN3_SMALLEST = published("qwen3-0.6b")
QWEN3_EIGHT = QWEN3_SMALLEST | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
OLMO2_SEVEN = published("olmo2-7b")
OLMO2_ONE = OLMO2_SEVEN | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
}


class Published(NamedTuple):
    """A config.json, its parameters, the width of the windows, and the head dim."""

    raw: dict[str, Any]
    parameters: int
    width: int | None = None
    head_dim: int = 128


PUBLISHED = {
    "mistral-7b-v0.1": Published(V01, 7_241_732_096, 4096),
    "mistral-7b-v0.3": Published(V03, 7_248_023_552),
    "mistral-nemo": Published(NEMO, 12_247_782_400),
    "qwen2-0.5b": Published(QWEN2_HALF, 494_032_768, head_dim=64),
    "qwen2.5-7b": Published(QWEN2_SEVEN, 7_615_616_512),
    "qwen3-0.6b": Published(QWEN3_SMALLEST, 596_049_920),
    "qwen3-8b": Published(QWEN3_EIGHT, 8_190_735_360),
    "olmo2-7b": Published(OLMO2_SEVEN, 7_298_617_344),
    "olmo2-1b": Published(OLMO2_ONE, 1_484_916_736),
}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    published = PUBLISHED[name]
    config, network = build(published.raw)
    assert count(network) == published.parameters
    assert config.windows() == (published.width,) * config.num_hidden_layers
    assert config.head_dim == published.head_dim


def test_the_heads_of_qwen3_have_one_size() -> None:
    without = {key: value for key, value in QWEN3_SMALLEST.items() if key != "head_dim"}
    assert build(without)[0].head_dim == 128  # whatever the model's size


SHAPES: dict[str, tuple[dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    # Nemo's heads are 32 of 128 beside a model of 5120
    "mistral-nemo": (
        NEMO,
        "self_attn",
        {
            "self_attn.q_proj.weight": (4096, 5120),
            "self_attn.k_proj.weight": (1024, 5120),
            "self_attn.v_proj.weight": (1024, 5120),
            "self_attn.o_proj.weight": (5120, 4096),
        },
    ),
    "qwen2": (
        QWEN2_HALF,
        "self_attn",
        {
            "self_attn.q_proj.weight": (896, 896),
            "self_attn.q_proj.bias": (896,),
            "self_attn.k_proj.weight": (128, 896),
            "self_attn.k_proj.bias": (128,),
            "self_attn.v_proj.weight": (128, 896),
            "self_attn.v_proj.bias": (128,),
            "self_attn.o_proj.weight": (896, 896),
        },
    ),
    "qwen3": (
        QWEN3_SMALLEST,
        "self_attn",
        {
            "self_attn.q_proj.weight": (2048, 1024),
            "self_attn.k_proj.weight": (1024, 1024),
            "self_attn.v_proj.weight": (1024, 1024),
            "self_attn.o_proj.weight": (1024, 2048),
            "self_attn.q_norm.weight": (128,),
            "self_attn.k_norm.weight": (128,),
        },
    ),
    "olmo2": (
        OLMO2_SEVEN,
        "norm",
        {
            "self_attn.q_norm.weight": (4096,),
            "self_attn.k_norm.weight": (4096,),
            "post_attention_layernorm.weight": (4096,),
            "post_feedforward_layernorm.weight": (4096,),
        },
    ),
}
"""Family -> a config, a part of stored names, and the tensors of a layer with that part."""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", SHAPES)
def test_published_names(name: str) -> None:
    raw, part, expected = SHAPES[name]
    shapes = layer(raw, build(raw)[1])
    assert {stored: shape for stored, shape in shapes.items() if part in stored} == expected
    # three matrices of the feed-forward layer, and two norms unless they are among the expected
    assert len(shapes) == len(expected) + (7 if part == "norm" else 5)


def test_a_bias_that_qwen2_lacks_has_no_place() -> None:
    names = ["model.layers.0.self_attn.o_proj.bias", "model.embed_tokens.weight"]
    assert placed(QWEN2_HALF, build(QWEN2_HALF)[1], *names) == [None, names[1]]


@pytest.mark.parametrize(
    "raw, reason",
    [
        (V01 | {"sliding_window": 0}, "sliding_window is 0"),
        (V01 | {"sliding_window": "4k"}, "sliding_window is '4k'"),
        (QWEN2_HALF | {"layer_types": ["full_attention"]}, "layer_types has 1 entry"),
        (
            QWEN2_HALF | {"use_sliding_window": True, "sliding_window": None},
            "use_sliding_window is true",
        ),
        (QWEN2_HALF | {"use_mrope": True}, "use_mrope is True"),
    ],
)
def test_contradictions_are_refused(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        build(raw)
