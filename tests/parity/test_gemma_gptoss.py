"""Attention of Gemma 2 and gpt-oss as transformers computes it, against `softcap` and
`learned_sink`, local layers too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from regard.masks import Causal, Window
from regard.nn.variants import learned_sink, softcap
from regard.positions import Rotary, YaRN
from tests.parity import layers
from tests.parity.layers import LENGTH, Change, Family, Pair

M, H, G, D, WINDOW, CAP = 24, 6, 2, 8, 4, 2.5
SIZES = {
    "vocab_size": 8,
    "hidden_size": M,
    "intermediate_size": 16,
    "num_hidden_layers": layers.LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
LINEAR = {
    "q_proj.weight": "project.q.linear.weight",
    "k_proj.weight": "project.k.linear.weight",
    "v_proj.weight": "project.v.linear.weight",
    "o_proj.weight": "output.weight",
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
EXACT = {"rope_type": "default", "rope_theta": 256.0}
# the factor, betas and trained length of gpt-oss
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def local(ours: Any, config: Any, layer: int) -> Any:
    """A window in the layers that have one."""
    if config.layer_types[layer] == "sliding_attention":
        ours.mask = Causal() & Window(config.sliding_window)
    return ours


def gemma2(config: Any, layer: int) -> Any:
    made = softcap(
        M,
        H,
        groups=G,
        head_dim=D,
        base=config.rope_parameters["rope_theta"],
        cap=config.attn_logit_softcapping,
        scale=config.query_pre_attn_scalar**-0.5,
    )
    return local(made, config, layer)


def gpt_oss(config: Any, layer: int) -> Any:
    rope = config.rope_parameters
    made = learned_sink(M, H, groups=G, head_dim=D, base=rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        turn(made, truncate=rope["truncate"])
    return local(made, config, layer)


def turn(ours: Any, **change: Any) -> None:
    """Queries and keys rotated as YaRN has it."""
    rotary = Rotary(D, scaling=YaRN(32.0, 4096, **change))
    for part in (ours.project.q, ours.project.k):
        part.steps[-1] = rotary


BIASES = {name.replace("weight", "bias"): LINEAR[name].replace("weight", "bias") for name in LINEAR}
FAMILIES = {
    "Gemma2": Family(
        "Gemma2",
        SIZES
        | {"attn_logit_softcapping": CAP, "query_pre_attn_scalar": 3, "rope_parameters": PLAIN},
        "layers.{}.self_attn",
        LINEAR,
        gemma2,
    ),
    "GptOss": Family(
        "GptOss",
        SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": PLAIN},
        "layers.{}.self_attn",
        LINEAR | BIASES | {"sinks": "sink"},
        gpt_oss,
    ),
}
LAYERS = [(name, layer) for name in FAMILIES for layer in (0, 1)]


@functools.cache
def made(name: str, layer: int) -> Pair:
    return Pair(FAMILIES[name], layer)


@pytest.fixture(params=LAYERS, ids=lambda p: f"{p[0]} {('local', 'global')[p[1]]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    return made(*request.param)


def test_prefill(pair: Pair) -> None:
    assert LENGTH > 3 * WINDOW
    layers.assert_prefill(pair)


def test_chunks_and_decoding(pair: Pair) -> None:
    layers.assert_chunks(pair)


def test_left_padding(pair: Pair) -> None:
    layers.assert_left_padding(pair)


def test_offset(pair: Pair) -> None:
    layers.assert_offset(pair)
    layers.assert_shift(pair)


@pytest.mark.parametrize("name, layer", LAYERS)
def test_offset_with_exact_angles(name: str, layer: int) -> None:
    """With frequencies 1, 1/4, 1/16, 1/64, whose angles fp32 holds exactly."""
    layers.assert_offset(Pair(FAMILIES[name], layer, rope_parameters=EXACT), 4000)


@pytest.mark.parametrize("layer", [0, 1])
def test_sinks_with_yarn(layer: int) -> None:
    pair = Pair(FAMILIES["GptOss"], layer, rope_parameters=YARN)
    layers.assert_prefill(pair)
    layers.assert_chunks(pair)
    layers.assert_offset(pair)


def test_a_local_cache_keeps_a_window(pair: Pair) -> None:
    """The decoding above reads no more than that."""
    cache = pair.ours.new_cache()
    for x in pair.tokens(1).split(1, dim=1):
        pair.ours(x, cache=cache)
    assert len(cache) == (LENGTH if pair.layer else WINDOW)


def test_the_cap_bites_and_the_sinks_count() -> None:
    """What a wrong cap or sink would hide behind: scores below the cap, or sinks far below the
    scores.
    """
    pair = made("Gemma2", 1)
    x, _ = pair.run(pair.tokens(), use_cache=False)
    q, (k, _) = (
        pair.ours.project.query(x, torch.arange(LENGTH)[None]),
        pair.ours.project.remember(x, torch.arange(LENGTH)[None]),
    )
    scores = q @ k.repeat_interleave(H // G, 1).mT * pair.ours.scale
    assert float((scores.abs() > CAP).float().mean()) > 0.2
    sink = made("GptOss", 1).ours.sink
    assert float(sink.max() - sink.min()) > 0.5


# Negative controls: what must be told apart.


def no_cap(ours: Any) -> None:
    ours.softcap = None


def other_cap(ours: Any) -> None:
    ours.softcap = 1.1 * CAP


def head_dim_scale(ours: Any) -> None:
    ours.scale = None


def inverted_scale(ours: Any) -> None:
    ours.scale = 3.0


def longer_window(ours: Any) -> None:
    ours.mask = Causal() & Window(WINDOW + 1)


def shorter_window(ours: Any) -> None:
    ours.mask = Causal() & Window(WINDOW - 1)


def no_window(ours: Any) -> None:
    ours.mask = Causal()


def no_sink(ours: Any) -> None:
    ours.sink = None


def off_by_one(ours: Any) -> None:
    """Sinks of 0, as they start."""
    ours.sink.zero_()


def sinks_of_other_heads(ours: Any) -> None:
    """Laid out as [H/G, G]."""
    ours.sink.copy_(ours.sink.unflatten(0, (G, H // G)).T.flatten())


def scaled_sink(ours: Any) -> None:
    ours.sink.mul_(D**-0.5)


LOCAL = (longer_window, shorter_window, no_window)
WRONG = (
    [("Gemma2", 0, c) for c in (*LOCAL, no_cap, other_cap, head_dim_scale, inverted_scale)]
    + [("Gemma2", 1, c) for c in (longer_window, no_cap, other_cap, head_dim_scale)]
    + [("GptOss", 0, c) for c in (*LOCAL, no_sink, off_by_one, sinks_of_other_heads, scaled_sink)]
    + [("GptOss", 1, c) for c in (longer_window, no_sink, off_by_one, sinks_of_other_heads)]
)


@pytest.mark.parametrize("name, layer, change", WRONG, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_wrong_variant_is_far(name: str, layer: int, change: Change) -> None:
    layers.assert_wrong(made(name, layer), change)


WRONG_YARN: dict[str, Change] = {
    "whole pairs": lambda ours: turn(ours, truncate=True),
    "no factor": lambda ours: turn(ours, truncate=False, attention_factor=1.0),
    "squared factor": lambda ours: turn(
        ours, truncate=False, attention_factor=(0.1 * math.log(32) + 1) ** 2
    ),
}


@pytest.mark.parametrize("change", WRONG_YARN.values(), ids=WRONG_YARN)
def test_a_wrong_yarn_is_far(change: Change) -> None:
    layers.assert_wrong(Pair(FAMILIES["GptOss"], 1, rope_parameters=YARN), change)
