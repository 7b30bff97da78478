"""OLMo 2 models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.nn import PreNorm
from tests.parity.families.harness import assert_decoder, assert_differs, theirs
from tests.parity.families.published import assert_following, assert_saved, build, count, layer

H, G, D, M = 6, 2, 10, 36
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": M,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("change", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_olmo2(change: dict[str, Any], tmp_path: Path) -> None:
    model = theirs("Olmo2", SMALL | change)
    mine = assert_decoder(model, tmp_path, start=1000)
    for variant in (norm_head_by_head, norm_in_front, no_norm, norms_swapped):
        assert_differs(mine, model, variant, start=1000)
    assert_saved(mine, model, tmp_path)


@pytest.mark.full
def test_norms_over_all_heads_stand_before_a_rotary_that_follows_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = SMALL | {"max_position_embeddings": 30, "rope_parameters": rope}
    assert_following(theirs("Olmo2", sizes), tmp_path, 30)


# Negative controls.


class HeadByHead(torch.nn.Module):
    """The norm of Qwen 3, with the weights of OLMo 2."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, D))
        mean = heads.square().mean(-1, keepdim=True)
        return (heads * (mean + self.norm.eps).rsqrt()).flatten(-2) * self.norm.weight


def norm_head_by_head(network: Any) -> None:
    for block in network.layers:
        block.attention.project.q.flat = HeadByHead(block.attention.project.q.flat)


def norm_in_front(network: Any) -> None:
    for block in network.layers:
        block.attention_residual = PreNorm(block.attention_residual.norm)


def no_norm(network: Any) -> None:
    for block in network.layers:
        block.attention.project.k.flat = torch.nn.Identity()


def norms_swapped(network: Any) -> None:
    for block in network.layers:
        paths = (block.attention_residual, block.feed_forward_residual)
        paths[0].norm, paths[1].norm = paths[1].norm, paths[0].norm


# Published files.

SEVEN: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": False,
    "vocab_size": 100352,
}
ONE = SEVEN | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
}


@pytest.mark.parametrize(
    "raw, parameters", [(SEVEN, 7_298_617_344), (ONE, 1_484_916_736)], ids=["7B", "1B"]
)
def test_published_configs(raw: dict[str, Any], parameters: int) -> None:
    config, network = build(raw)
    assert count(network) == parameters
    assert config.head_dim == 128


def test_published_names() -> None:
    shapes = layer(SEVEN, build(SEVEN)[1])
    assert {name: shape for name, shape in shapes.items() if "norm" in name} == {
        "self_attn.q_norm.weight": (4096,),
        "self_attn.k_norm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "post_feedforward_layernorm.weight": (4096,),
    }
    assert len(shapes) == 11
