"""Attention of Llama, Qwen3, OLMo 2, Gemma 2 and gpt-oss as transformers computes it, against the
catalogue's, local layers too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from regard.masks import Causal, Window
from regard.nn.variants import (
    gqa,
    learned_sink,
    qk_norm,
    qk_norm_after_rotary,
    qk_norm_flat,
    softcap,
)
from regard.positions import Rotary, YaRN
from tests.parity import layers
from tests.parity.families.changes import put, swap, zeros
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
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
LOCAL_SIZES = SIZES | {
    "sliding_window": WINDOW,
    "bos_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
LINEAR = {
    "q_proj.weight": "project.q.linear.weight",
    "k_proj.weight": "project.k.linear.weight",
    "v_proj.weight": "project.v.linear.weight",
    "o_proj.weight": "output.weight",
}
IN_HEADS = {
    "q_norm.weight": "project.q.steps.0.weight",
    "k_norm.weight": "project.k.steps.0.weight",
}
FLAT = {"q_norm.weight": "project.q.flat.weight", "k_norm.weight": "project.k.flat.weight"}
BIASES = {name.replace("weight", "bias"): LINEAR[name].replace("weight", "bias") for name in LINEAR}
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


def with_eps(module: Any, config: Any) -> Any:
    """Norms with the eps of a configuration; the catalogue's is 1e-6."""
    for part in (module.project.q, module.project.k):
        for norm in (part.flat, *part.steps):
            if hasattr(norm, "eps"):
                norm.eps = config.rms_norm_eps
    return module


def build(name: str) -> Any:
    make: Any = {"Llama": gqa, "Qwen3": qk_norm, "Olmo2": qk_norm_flat}[name]
    return lambda config, layer: with_eps(
        make(M, H, groups=G, head_dim=D, base=config.rope_parameters["rope_theta"]), config
    )


FAMILIES = {
    name: Family(
        name,
        SIZES | {"rms_norm_eps": 1e-2, "rope_parameters": PLAIN},
        "layers.{}.self_attn",
        LINEAR | norms,
        build(name),
    )
    for name, norms in (("Llama", {}), ("Qwen3", IN_HEADS), ("Olmo2", FLAT))
} | {
    "Gemma2": Family(
        "Gemma2",
        LOCAL_SIZES
        | {"attn_logit_softcapping": CAP, "query_pre_attn_scalar": 3, "rope_parameters": PLAIN},
        "layers.{}.self_attn",
        LINEAR,
        gemma2,
    ),
    "GptOss": Family(
        "GptOss",
        LOCAL_SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": PLAIN},
        "layers.{}.self_attn",
        LINEAR | BIASES | {"sinks": "sink"},
        gpt_oss,
    ),
}
LOCAL = ("Gemma2", "GptOss")
LAYERS = [(name, 1) for name in FAMILIES] + [(name, 0) for name in LOCAL]


@functools.cache
def made(name: str, layer: int) -> Pair:
    return Pair(FAMILIES[name], layer)


@pytest.fixture(params=LAYERS, ids=lambda p: f"{p[0]} {p[1]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    return made(*request.param)


def test_prefill(pair: Pair) -> None:
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
    """Base 256 makes the frequencies 1, 1/4, 1/16, 1/64, so that fp32 angles are exact on both
    sides.

    With others, theirs are off by up to half a unit of an angle, which passes the bound at some
    4000 positions.
    """
    pair = Pair(FAMILIES[name], layer, rope_parameters=EXACT)
    assert pair.theirs.rotary_emb.inv_freq.tolist() == [1, 1 / 4, 1 / 16, 1 / 64]
    layers.assert_offset(pair, 4000)


@pytest.mark.parametrize("layer", [0, 1])
def test_sinks_with_yarn(layer: int) -> None:
    pair = Pair(FAMILIES["GptOss"], layer, rope_parameters=YARN)
    layers.assert_prefill(pair)
    layers.assert_chunks(pair)
    layers.assert_offset(pair)


def test_a_local_cache_keeps_a_window(pair: Pair) -> None:
    """The decoding above reads no more than that."""
    assert LENGTH > 3 * WINDOW
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


def interleaved(ours: Any) -> None:
    for part in (ours.project.q, ours.project.k):
        part.steps[-1] = Rotary(D, layout="interleaved")


def other_base(ours: Any) -> None:
    for part in (ours.project.q, ours.project.k):
        part.steps[-1] = Rotary(D, 9000.0)


def other_groups(ours: Any) -> None:
    """Query head h with key/value head h % G."""
    order = [h // (H // G) + G * (h % (H // G)) for h in range(H)]
    for linear, dim in ((ours.project.q.linear, 0), (ours.output, 1)):
        weight = linear.weight.data
        linear.weight.data = (
            weight.unflatten(dim, (H, D))
            .index_select(dim, torch.tensor(order))
            .flatten(dim, dim + 1)
        )


def norm_behind_rotary(ours: Any) -> Any:
    other = qk_norm_after_rotary(M, H, groups=G, head_dim=D)
    for mine, right in ((other.project.q, ours.project.q), (other.project.k, ours.project.k)):
        mine.linear, mine.steps[1] = right.linear, right.steps[0]
    other.project.v, other.output = ours.project.v, ours.output
    return other


def norm_head_by_head(ours: Any) -> None:
    """OLMo 2's weights in Qwen3's place."""
    q = ours.project.q
    flat = q.flat

    class EachHead(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (H, D))
            normed = heads * (heads.square().mean(-1, keepdim=True) + flat.eps).rsqrt()
            return normed.flatten(-2) * flat.weight

    q.flat = EachHead()


def sinks_of_other_heads(ours: Any) -> None:
    """Laid out as [H/G, G]."""
    ours.sink.copy_(ours.sink.unflatten(0, (G, H // G)).T.flatten())


def scaled_sink(ours: Any) -> None:
    ours.sink.mul_(D**-0.5)


EVERYWHERE: dict[str, Change] = {
    "interleaved": interleaved,
    "other base": other_base,
    "other scale": put("", scale=M**-0.5),
    "all but one key of one query": put("", mask=Causal() & Window(LENGTH - 1)),
    "not causal": put("", mask=None),
    "other groups": other_groups,
}
WINDOWS: dict[str, Change] = {
    "longer window": put("", mask=Causal() & Window(WINDOW + 1)),
    "shorter window": put("", mask=Causal() & Window(WINDOW - 1)),
    "no window": put("", mask=Causal()),
}
CAPS: dict[str, Change] = {
    "no cap": put("", softcap=None),
    "other cap": put("", softcap=1.1 * CAP),
    "scale of the head dim": put("", scale=None),
}
SINKS: dict[str, Change] = {
    "no sink": put("", sink=None),
    "sinks of 0, as they start": zeros("sink"),
    "sinks of other heads": sinks_of_other_heads,
}
LONGER = {"longer window": WINDOWS["longer window"]}
WRONG: dict[tuple[str, int], dict[str, Change]] = {
    ("Llama", 0): EVERYWHERE,
    ("Qwen3", 0): EVERYWHERE
    | {
        "other eps": put("project.[qk].steps.0", eps=1e-6),
        "norm behind rotary": norm_behind_rotary,
        "the queries' norm on keys": swap("project", "q.steps.0", "k.steps.0"),
    },
    ("Olmo2", 0): EVERYWHERE
    | {
        "no norm": put("project.k", flat=torch.nn.Identity()),
        "norm head by head": norm_head_by_head,
    },
    ("Gemma2", 0): WINDOWS | CAPS | {"inverted scale": put("", scale=3.0)},
    ("Gemma2", 1): LONGER | CAPS,
    ("GptOss", 0): WINDOWS | SINKS | {"scaled sink": scaled_sink},
    ("GptOss", 1): LONGER | SINKS,
}


@pytest.mark.parametrize(
    "name, layer, change", [(*place, name) for place, found in WRONG.items() for name in found]
)
def test_a_wrong_variant_is_far(name: str, layer: int, change: str) -> None:
    layers.assert_wrong(made(name, layer), WRONG[name, layer][change])


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
