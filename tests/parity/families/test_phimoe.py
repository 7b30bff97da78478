"""Phi-3.5-MoE of transformers, saved by it and loaded here: LayerNorms, two experts of SparseMixer,
LongRoPE with a factor; wrong ones must be far.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.errors import ArgumentError
from regard.models.model import Model
from regard.nn.blocks.routers import SoftmaxRouter, SparseMixerRouter
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.harness import assert_differs, assert_refused, saved, without
from tests.parity.families.published import build, count
from tests.parity.families.test_llama_relatives import gate_and_up_swapped

H, G, D, W = 6, 2, 8, 9
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": H * D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "num_local_experts": 6,
    "max_position_embeddings": 96,
    "router_jitter_noise": 0.3,  # so that a few experts are near
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(D // 2)],
        "long_factor": [1.5 + 2.0 * i for i in range(D // 2)],
        "short_mscale": 1.24,
        "long_mscale": 1.24,
        "original_max_position_embeddings": 48,
    },
    "original_max_position_embeddings": 48,
}


def routers(network: Any) -> list[Any]:
    return [block.feed_forward.router for block in network.layers]


def softmax_of_both(network: Any) -> None:
    """Mixtral's router with the same matrix."""
    for block in network.layers:
        old = block.feed_forward.router
        made = SoftmaxRouter(H * D, 6, 2, normalize=True).requires_grad_(False)
        made.linear = old.linear
        block.feed_forward.router = made


def no_means(network: Any) -> None:
    """RMS norms in place of LayerNorms, as the name of their eps says."""
    for block in network.layers:
        old = block.feed_forward_residual.norm
        made = nn.RMSNorm(H * D, eps=1e-5)
        made.weight.data = old.weight.data
        block.feed_forward_residual.norm = made.requires_grad_(False)


CASES: dict[str, Case] = {
    "phimoe": Case(
        "Phimoe",
        SMALL,
        (
            put("layers.*.feed_forward.router", tolerance=0.01),
            softmax_of_both,
            no_means,
            zeros("layers.*.attention_residual.norm.bias"),
            gate_and_up_swapped,
            changes.windows(W, W),
        ),
        start=1000,
    ),
    "window, biases, released tolerance": Case(
        "Phimoe",
        SMALL
        | {
            "sliding_window": W,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.01,
        },
        start=1000,
    ),
    "longrope, tied": Case("Phimoe", SMALL | LONGROPE | {"tie_word_embeddings": True}),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=1, keep_wrong=1)


def test_no_factor_of_longrope_is_far(tmp_path: Path) -> None:
    model, mine = Case("Phimoe", SMALL | LONGROPE).load(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"] |= {"short_mscale": 1.0, "long_mscale": 1.0}
    file.write_text(json.dumps(raw))
    other = regard.load(tmp_path, kind=Model)
    assert_differs(mine, model, lambda _: other.decoder)
    for change in ({"long_mscale": 1.3}, {"short_mscale": None}):
        message = "phimoe supports longrope with two equal factors"
        assert_refused(tmp_path, message, rope_parameters=raw["rope_parameters"] | change)


def test_loading_is_strict(tmp_path: Path) -> None:
    saved(CASES["phimoe"].model(), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    lacking, more = "model.layers.1.input_layernorm.bias", {"lm_head.bias": torch.zeros(96)}
    assert_refused(tmp_path, re.escape(lacking), without(stored, lacking))
    assert_refused(tmp_path, r"lm_head\.bias", stored | more)
    save_file(stored, file)
    message = "num_experts_per_tok is 3; only 2 is supported"
    assert_refused(tmp_path, message, num_experts_per_tok=3)


def test_the_router_by_its_definition() -> None:
    """In plain loops over experts, with ties and with scores below 0."""
    make = torch.Generator().manual_seed(4)
    router = SparseMixerRouter(5, 7, tolerance=0.2).double()
    x = torch.randn(40, 5, generator=make, dtype=torch.float64)
    x[:6] = 0  # all scores are equal: the first two are chosen
    router.linear.weight.data.normal_(generator=make)
    router.requires_grad_(False)
    weights, experts = router(x)
    for n, row in enumerate(x @ router.linear.weight.T):
        scores, left = row.tolist(), [*range(7)]
        for place in range(2):
            best = max(left, key=lambda e: (scores[e], -e))
            m = scores[best]
            near = [
                e
                for e in left
                if not (m - scores[e]) > 0.4 * max(abs(scores[e]), m)  # no division by 0
            ]
            total = sum(torch.tensor([scores[e] for e in near]).exp().tolist())
            share = float(torch.tensor(m).exp()) / total
            assert int(experts[n, place]) == best
            assert abs(float(weights[n, place]) - share) < 1e-6
            left.remove(best)
    assert 1.5 < float(weights.sum(-1).max()) <= 2 + 1e-9
    with pytest.raises(ArgumentError, match="tolerance"):
        SparseMixerRouter(5, 7, tolerance=-0.1)
    with pytest.raises(ArgumentError, match="k is 2"):
        SparseMixerRouter(5, 1, tolerance=0.1)


@pytest.mark.full
def test_published_size() -> None:
    """Phi-3.5-MoE has 41.9 billion parameters, of which a token uses 6.6 billion."""
    raw = {
        "model_type": "phimoe",
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 131072,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.01,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
            "short_mscale": 1.243163121016122,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
    }
    config, network = build(raw)
    sizes = config.sizes("phi-3.5-moe")
    assert count(network) == sizes.parameters == 41_873_153_344
    embedding = 32064 * 4096  # of which a token uses a row, and the paper counts all
    assert round((sizes.active_parameters + embedding) / 1e9, 1) == 6.6
