"""A call as tensors, numbers and text: nothing is lost, nothing is kept, and what holds Python code
is refused.
"""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import biases, masks
from regard.biases import BIASES
from regard.masks import MASKS
from regard.ops.softmax import packed_call
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.packed_call import pack, unpack, unpackable_parts
from regard.span import as_tensor
from tests.ops.softmax.cases import CONTRACT, Case, make

BOOL = torch.tensor([[True, False], [True, True]])
RULES: list[masks.Mask] = [
    masks.Causal() & (masks.Window(3, ahead=1) | ~masks.Sinks(1)),
    masks.Heads((masks.Full(), masks.Causal() & masks.Dense(BOOL))),
    masks.Document(((0, 1, 2), (0, 2))),
    masks.Padding.left((1, 2), 2),
    masks.BigBird(1, 2, random=0, causal=True),
]


def call_with(mask: masks.Mask, bias: Any = None) -> Call:
    q = torch.randn(2, 2, 2, 4)
    return make_call(q, q, q, mask=mask, bias=bias)


@pytest.mark.parametrize("mask", RULES, ids=str)
def test_a_mask_is_the_same_afterwards(mask: masks.Mask) -> None:
    bias = biases.ALiBi(2) + biases.DenseBias(torch.randn(2, 2))
    packed = pack(call_with(mask, bias), "cpu")
    assert json.loads(packed.rules)
    assert all(type(x) is int for x in packed.numbers)
    found = unpack(packed)
    assert found.mask == mask
    assert found.bias == bias
    assert str(found.mask) == str(mask)


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_a_call_is_the_same_afterwards(case: Case) -> None:
    call = make(case, torch.float32, gradient=True).call()
    if unpackable_parts(call):
        assert case.mask == "fn" or case.bias == "fn"
        return
    found = unpack(pack(call, "auto"))
    positions = call.q_positions, call.k_positions
    for name in ("q_positions", "k_positions"):
        mine, its = getattr(found, name), getattr(call, name)
        assert type(mine) is type(its)
        assert torch.equal(as_tensor(mine), as_tensor(its))
    assert torch.equal(found.mask.block(*positions), call.mask.block(*positions))
    for name in ("scale", "softcap", "q", "k", "v", "B", "H", "G", "T", "S", "D", "E"):
        assert getattr(found, name) is getattr(call, name) or getattr(found, name) == getattr(
            call, name
        )
    if call.bias is not None:
        assert found.bias is not None
        assert torch.equal(found.bias.block(*positions), call.bias.block(*positions))
        trained = [x.requires_grad for x in call.bias.tensors()]
        assert packed_call.trained_bias_tensors(pack(call, "auto")) == [
            i for i, learns in enumerate(trained) if learns
        ]


def test_the_text_holds_no_length() -> None:
    """So that one graph serves every length."""

    def packed(n: int) -> packed_call.PackedCall:
        x = torch.empty(1, 1, n, 4)
        return pack(make_call(x, x, x, mask=masks.Window(n + 1)), "auto")

    assert packed(5).rules == packed(9).rules
    assert packed(5).numbers == [0, 0, 6]
    assert packed(9).numbers == [0, 0, 10]


def test_what_holds_python_code_is_refused() -> None:
    fifth = masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth")
    bias = biases.FnBias(lambda q, k: 0.1 * (q - k))
    assert unpackable_parts(call_with(masks.Causal() & fifth)) == [
        "a graph cannot hold the function in fifth"
    ]
    assert unpackable_parts(call_with(masks.Full(), biases.ALiBi(2) + bias)) == [
        f"a graph cannot hold the function in {bias}"
    ]

    with MASKS.temporary(), BIASES.temporary():

        @dataclass(frozen=True, eq=False)
        class Third(masks.Mask):
            step: int

            def allows(self, q: Tensor, k: Tensor) -> Tensor:
                return (q - k) % self.step == 0

        own = Third(3)
        assert unpackable_parts(call_with(own)) == []
        assert unpack(pack(call_with(own), "auto")).mask == own

        class Heir(Third):
            pass

        assert unpackable_parts(call_with(Heir(3))) == [
            f"a graph cannot hold {Heir(3)}: its class is no dataclass, or not known by its name"
        ]
    assert unpackable_parts(call_with(own)) != []


def test_a_field_that_is_not_packed_is_refused() -> None:
    """A call that gets one more field must not lose it in a graph."""
    call = call_with(masks.Causal())
    assert unpackable_parts(call, ("softcap",)) == []
    assert unpackable_parts(call, ("scale",)) == ["a graph cannot hold scale of a call"]


@pytest.mark.full
def test_nothing_is_kept() -> None:
    """Texts and rules of numbers are remembered, a bounded number of them; tensors never."""
    assert packed_call._readers.cache_info().maxsize == 256
    table = torch.ones(2, 2, dtype=torch.bool)
    alive = weakref.ref(table)
    call = call_with(masks.Dense(table) & masks.Causal())
    packed = pack(call, "auto")
    assert unpack(packed).mask == call.mask
    del call, packed, table
    gc.collect()
    assert alive() is None
