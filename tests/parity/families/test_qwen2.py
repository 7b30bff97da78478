"""Qwen 2 models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError
from regard.masks import Causal, Window
from tests.parity.families.harness import assert_decoder, assert_differs, theirs
from tests.parity.families.published import assert_saved, build, count, layer, placed

W, LAYERS = 9, 3
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": W, "max_window_layers": 1}
NAMED = {
    "use_sliding_window": True,
    "sliding_window": W,
    "max_window_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_qwen2(tmp_path: Path) -> None:
    model = theirs("Qwen2", SMALL | {"rope_parameters": YARN, "tie_word_embeddings": True})
    mine = assert_decoder(model, tmp_path, start=1000)
    assert mine.config.windows() == (None,) * LAYERS
    for variant in (no_bias, no_key_bias, bias_behind):
        assert_differs(mine, model, variant, start=1000)
    assert_saved(mine, model, tmp_path)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("keys, widths", [(SLIDING, (None, W, W)), (NAMED, (W, None, W))])
def test_sliding_layers(
    keys: dict[str, Any], widths: tuple[int | None, ...], tmp_path: Path
) -> None:
    model = theirs("Qwen2", SMALL | keys)
    mine = assert_decoder(model, tmp_path, start=1000)
    assert mine.config.windows() == widths
    for variant in (upside_down, all_slide, wider):
        assert_differs(mine, model, variant, start=1000)
    assert_saved(mine, model, tmp_path)


# Negative controls.


def heads(network: Any, *names: str) -> list[Any]:
    return [getattr(block.attention.project, name) for block in network.layers for name in names]


def no_bias(network: Any) -> None:
    for part in heads(network, "q", "k", "v"):
        part.linear.bias = None


def no_key_bias(network: Any) -> None:
    """Without rotary it would change nothing: a softmax does not see what all keys have in
    common.
    """
    for part in heads(network, "k"):
        part.linear.bias = None


def bias_behind(network: Any) -> None:
    """The values' bias once more, behind the output."""
    for block in network.layers:
        block.attention.output.bias = torch.nn.Parameter(
            torch.ones(SMALL["hidden_size"]), requires_grad=False
        )


def upside_down(network: Any) -> None:
    masks = [block.attention.mask for block in network.layers]
    for block, mask in zip(network.layers, [masks[1], masks[2], masks[0]], strict=True):
        block.attention.mask = mask


def all_slide(network: Any) -> None:
    for block in network.layers:
        block.attention.mask = Causal() & Window(W)


def wider(network: Any) -> None:
    for block in network.layers:
        if block.attention.mask != Causal():
            block.attention.mask = Causal() & Window(W + 1)


# Published files.

HALF: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SEVEN = HALF | {
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


@pytest.mark.parametrize(
    "raw, parameters",
    [(HALF, 494_032_768), (SEVEN, 7_615_616_512)],
    ids=["Qwen2-0.5B", "Qwen2.5-7B"],
)
def test_published_configs(raw: dict[str, Any], parameters: int) -> None:
    config, network = build(raw)
    assert count(network) == parameters
    assert config.windows() == (None,) * config.num_hidden_layers


def test_published_names() -> None:
    network = build(HALF)[1]
    shapes = layer(HALF, network)
    assert {name: shape for name, shape in shapes.items() if "attn" in name} == {
        "self_attn.q_proj.weight": (896, 896),
        "self_attn.q_proj.bias": (896,),
        "self_attn.k_proj.weight": (128, 896),
        "self_attn.k_proj.bias": (128,),
        "self_attn.v_proj.weight": (128, 896),
        "self_attn.v_proj.bias": (128,),
        "self_attn.o_proj.weight": (896, 896),
    }
    names = ["model.layers.0.self_attn.o_proj.bias", "model.embed_tokens.weight"]
    assert placed(HALF, network, *names) == [None, names[1]]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layer_types has 1 entry and num_hidden_layers is 24"):
        build(HALF | {"layer_types": ["full_attention"]})
    with pytest.raises(
        ArgumentError, match="use_sliding_window is true and sliding_window is null"
    ):
        build(HALF | {"use_sliding_window": True, "sliding_window": None})
    with pytest.raises(ArgumentError, match="use_mrope is True; only False is supported for qwen2"):
        build(HALF | {"use_mrope": True})
