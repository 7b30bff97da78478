"""Mistral models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regard.caches import Ring
from regard.errors import ArgumentError
from regard.masks import Causal, Window
from regard.positions import Rotary
from tests.parity.families.harness import assert_decoder, assert_differs, theirs
from tests.parity.families.published import assert_saved, build, count, layer

W = 9
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "sliding_window": W,
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "change", [{}, {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}]
)
def test_mistral(change: dict[str, Any], tmp_path: Path) -> None:
    model = theirs("Mistral", SMALL | change)
    mine = assert_decoder(model, tmp_path, start=1000)
    windowed = not change
    assert all(isinstance(cache, Ring) == windowed for cache in mine.new_caches())
    wrong = (wider, narrower, unbounded, one_layer, interleave) if windowed else (wider, interleave)
    for variant in wrong:
        assert_differs(mine, model, variant, start=1000)
    assert_saved(mine, model, tmp_path, start=1000)


# Negative controls.


def window(network: Any, size: int | None, layers: slice = slice(None)) -> None:
    for block in list(network.layers)[layers]:
        block.attention.mask = Causal() if size is None else Causal() & Window(size)


def wider(network: Any) -> None:
    window(network, W + 1)


def narrower(network: Any) -> None:
    window(network, W - 1)


def unbounded(network: Any) -> None:
    window(network, None)


def one_layer(network: Any) -> None:
    window(network, None, slice(1, 2))


def interleave(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, Rotary):
            module.layout, module._last = "interleaved", None


# Published files.

V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
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


@pytest.mark.parametrize(
    "raw, parameters, width",
    [(V01, 7_241_732_096, 4096), (V03, 7_248_023_552, None), (NEMO, 12_247_782_400, None)],
    ids=["7B-v0.1", "7B-v0.3", "Nemo"],
)
def test_published_configs(raw: dict[str, Any], parameters: int, width: int | None) -> None:
    config, network = build(raw)
    assert count(network) == parameters
    assert config.windows() == (width,) * config.num_hidden_layers
    assert config.head_dim == 128


def test_published_names() -> None:
    """Nemo's heads are 32 of 128 beside a model of 5120."""
    shapes = layer(NEMO, build(NEMO)[1])
    assert len(shapes) == 9
    assert shapes["self_attn.q_proj.weight"] == (4096, 5120)
    assert shapes["self_attn.o_proj.weight"] == (5120, 4096)
    assert shapes["self_attn.k_proj.weight"] == shapes["self_attn.v_proj.weight"] == (1024, 5120)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="sliding_window is 0; it must be at least 1"):
        build(V01 | {"sliding_window": 0})
    with pytest.raises(ArgumentError, match="sliding_window is '4k'; it must be int or null"):
        build(V01 | {"sliding_window": "4k"})
