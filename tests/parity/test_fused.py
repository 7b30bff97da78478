"""Fused matrices and ALiBi: BLOOM, MPT, GPT-2, GPT-NeoX and Falcon as transformers computes them,
against our parts.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

from regard.biases import ALiBi
from regard.biases.alibi import alibi_slopes
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.projections.fused import FusedQKV
from regard.nn.variants import alibi, gpt
from regard.positions import Rotary
from tests.parity import layers
from tests.parity.families.changes import put
from tests.parity.layers import Change, Family, Pair

H, G, D = 6, 2, 8
M = H * D
COMMON = {"vocab_size": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WHOLE = {"rope_type": "default", "rope_theta": 10000.0}


def names(fused: str, output: str, *, bias: bool = True) -> dict[str, str]:
    ends = ("weight", "bias") if bias else ("weight",)
    both = ((fused, "project.linear"), (output, "output"))
    return {f"{theirs}.{end}": f"{ours}.{end}" for theirs, ours in both for end in ends}


def fused(order: Any, groups: int = H, *, rotary_dim: int | None = None, bias: bool = True) -> Any:
    steps = [] if rotary_dim is None else [Rotary(D, rotary_dim=rotary_dim)]
    project = FusedQKV(M, H, groups, D, order=order, steps=steps, bias=bias)
    return Attention(project, nn.Linear(M, M, bias=bias), mask=Causal())


def with_alibi(ours: Any) -> Any:
    ours.bias = ALiBi(H)
    return ours


FAMILIES = {
    "Bloom": Family(
        "Bloom",
        COMMON | {"hidden_size": M, "n_head": H, "n_layer": layers.LAYERS},
        "h.{}.self_attention",
        names("query_key_value", "dense"),
        lambda config, layer: with_alibi(gpt(M, H, order="heads")),
        outlet="dense",
        positioned=False,  # its attention adds the residual
    ),
    "Mpt": Family(
        "Mpt",
        COMMON | {"d_model": M, "n_heads": H, "n_layers": layers.LAYERS, "max_seq_len": 64},
        "blocks.{}.attn",
        names("Wqkv", "out_proj", bias=False),
        lambda config, layer: with_alibi(gpt(M, H, order="parts", bias=False)),
        positioned=False,
    ),
    "GPT2": Family(
        "GPT2",
        COMMON | {"n_embd": M, "n_head": H, "n_layer": layers.LAYERS},
        "h.{}.attn",
        names("c_attn", "c_proj"),
        lambda config, layer: gpt(M, H),
        transposed=True,
    ),
    "GPTNeoX": Family(
        "GPTNeoX",
        COMMON
        | {
            "hidden_size": M,
            "num_attention_heads": H,
            "num_hidden_layers": layers.LAYERS,
            "intermediate_size": 16,
            "rope_parameters": HALF,
        },
        "layers.{}.attention",
        names("query_key_value", "dense"),
        lambda config, layer: fused("heads", rotary_dim=D // 2),
    ),
    "Falcon": Family(
        "Falcon",
        COMMON
        | {
            "hidden_size": M,
            "num_attention_heads": H,
            "num_kv_heads": G,
            "alibi": False,
            "num_hidden_layers": layers.LAYERS,
            "new_decoder_architecture": True,
            "bias": True,
            "rope_parameters": WHOLE,
        },
        "h.{}.self_attention",
        names("query_key_value", "dense"),
        lambda config, layer: fused("groups", G, rotary_dim=D),
    ),
}


@functools.cache
def made(name: str, layer: int = 0) -> Pair:
    return Pair(FAMILIES[name], layer)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return made(request.param, 1)


def test_prefill(pair: Pair) -> None:
    layers.assert_prefill(pair)


def test_chunks_and_decoding(pair: Pair) -> None:
    layers.assert_chunks(pair)


def test_left_padding(pair: Pair) -> None:
    layers.assert_left_padding(pair)


@pytest.mark.parametrize("name", ["GPTNeoX", "Falcon"])
def test_offset(name: str) -> None:
    layers.assert_offset(made(name))


def test_shift(pair: Pair) -> None:
    """Rotary, ALiBi and no positions at all alike."""
    layers.assert_shift(pair)


def separated(pair: Pair) -> Any:
    """The catalogue's `alibi` with the rows of BLOOM's matrix sorted out by hand: head by head q,
    k, v.
    """
    made = alibi(M, H, bias=True).requires_grad_(False)
    source = pair.ours.project.linear
    for i, part in enumerate((made.project.q, made.project.k, made.project.v)):
        rows = [h * 3 * D + i * D + d for h in range(H) for d in range(D)]
        part.linear.weight.copy_(source.weight[rows])
        part.linear.bias.copy_(source.bias[rows])
    made.output = pair.ours.output
    return made


def test_alibi_of_the_catalogue_is_blooms() -> None:
    pair = Pair(FAMILIES["Bloom"])
    pair.ours = separated(pair)
    layers.assert_prefill(pair)
    layers.assert_chunks(pair)
    layers.assert_left_padding(pair)


def test_six_heads_have_slopes_between_those_of_four() -> None:
    """No power of two, where implementations part."""
    assert alibi_slopes(H) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)


# Negative controls: what must be told apart.


def other_order(order: Any) -> Change:
    def change(ours: Any) -> Any:
        old = ours.project
        made = FusedQKV(M, H, old.groups, D, order=order, steps=tuple(old.steps))
        made.linear = old.linear
        ours.project = made

    change.__name__ = f"order {order}"
    return change


def slopes(values: Any, name: str) -> Change:
    def change(ours: Any) -> Any:
        ours.bias = ALiBi(slopes=values)

    change.__name__ = name
    return change


def untransposed(ours: Any) -> None:
    """The square matrix [in, out] taken for [out, in]."""
    ours.output.weight.data = ours.output.weight.data.T


def rotary(**options: Any) -> Change:
    def change(ours: Any) -> Any:
        ours.project.steps[0] = Rotary(D, **options)

    change.__name__ = f"rotary {options}"
    return change


def rotated_values(ours: Any) -> None:
    """Keys where values stand."""
    right = ours.project.remember

    def remember(x: Tensor, positions: Any) -> Any:
        k, _ = right(x, positions)
        return k, k

    ours.project.remember = remember


FROM_ZERO = slopes([2.0**-h for h in range(H)], "slopes from 2^0")
EVENLY = slopes([2.0 ** (-8 * (h + 1) / H) for h in range(H)], "slopes 2^(-8h/6)")
SORTED = slopes(sorted(alibi_slopes(H), reverse=True), "slopes sorted")
WRONG = [
    *(("Bloom", c) for c in (other_order("parts"), put("", bias=None), FROM_ZERO, EVENLY, SORTED)),
    *(("Mpt", c) for c in (other_order("heads"), put("", bias=None), FROM_ZERO, EVENLY)),
    *(("GPT2", c) for c in (other_order("heads"), untransposed, rotated_values)),
    *(
        ("GPTNeoX", c)
        for c in (
            other_order("parts"),
            rotary(),
            rotary(rotary_dim=4, layout="interleaved"),
            rotated_values,
        )
    ),
    *(
        ("Falcon", c)
        for c in (
            other_order("parts"),
            rotary(layout="interleaved"),
            rotary(rotary_dim=4),
        )
    ),
]


@pytest.mark.parametrize("name, change", WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_variant_is_far(name: str, change: Change) -> None:
    layers.assert_wrong(made(name), change)
