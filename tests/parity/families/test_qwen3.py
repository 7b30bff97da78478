"""Qwen 3 models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regard.positions import Rotary
from tests.parity.families.harness import assert_decoder, assert_differs, theirs
from tests.parity.families.published import assert_following, assert_saved, build, count, layer

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
    "rms_norm_eps": 1e-2,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "change", [{}, {"attention_bias": True, "tie_word_embeddings": True}, SLIDING]
)
def test_qwen3(change: dict[str, Any], tmp_path: Path) -> None:
    model = theirs("Qwen3", SMALL | change)
    # their angles are fp32: at 1000 that alone is 0.98 of the bound
    mine = assert_decoder(model, tmp_path, start=500)
    for variant in (norm_behind_rotary, norms_swapped, no_norm, other_eps, interleave):
        assert_differs(mine, model, variant, start=1000)
    assert_saved(mine, model, tmp_path)


@pytest.mark.full
def test_norms_stand_before_a_rotary_that_follows_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = SMALL | {"max_position_embeddings": 30, "rope_parameters": rope}
    assert_following(theirs("Qwen3", sizes), tmp_path, 30)


# Negative controls.


def heads(network: Any, *names: str) -> list[Any]:
    return [getattr(block.attention.project, name) for block in network.layers for name in names]


def norm_behind_rotary(network: Any) -> None:
    for part in heads(network, "q", "k"):
        norm, rotary = part.steps
        part.steps[0], part.steps[1] = rotary, norm


def norms_swapped(network: Any) -> None:
    for q, k in zip(heads(network, "q"), heads(network, "k"), strict=True):
        q.steps[0], k.steps[0] = k.steps[0], q.steps[0]


def no_norm(network: Any) -> None:
    for part in heads(network, "k"):
        del part.steps[0]


def other_eps(network: Any) -> None:
    for part in heads(network, "q", "k"):
        part.steps[0].eps = 1e-6


def interleave(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, Rotary):
            module.layout, module._last = "interleaved", None


# Published files.

SMALLEST: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
EIGHT = SMALLEST | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "raw, parameters", [(SMALLEST, 596_049_920), (EIGHT, 8_190_735_360)], ids=["0.6B", "8B"]
)
def test_published_configs(raw: dict[str, Any], parameters: int) -> None:
    config, network = build(raw)
    assert count(network) == parameters
    assert config.windows() == (None,) * config.num_hidden_layers
    without = {key: value for key, value in raw.items() if key != "head_dim"}
    assert build(without)[0].head_dim == 128  # whatever the model's size


def test_published_names() -> None:
    shapes = layer(SMALLEST, build(SMALLEST)[1])
    assert {name: shape for name, shape in shapes.items() if "attn" in name} == {
        "self_attn.q_proj.weight": (2048, 1024),
        "self_attn.k_proj.weight": (1024, 1024),
        "self_attn.v_proj.weight": (1024, 1024),
        "self_attn.o_proj.weight": (1024, 2048),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
    }
