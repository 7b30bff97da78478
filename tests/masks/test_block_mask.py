"""Masks from and to torch's `BlockMask`, against `flex_attention` itself, uncompiled."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import regard
from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Document, Mask, Padding, Prefix, Sinks, Window
from regard.span import Span
from tests.masks.brute import CASES, B, H, pairs
from tests.oracles.plain import plain_attention
from tests.rules import assert_close_rule

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DOCUMENTS = torch.tensor([0] * 40 + [1] * 100 + [2] * 160)
LENGTHS = torch.tensor([130, 300])


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _slots(keys: int, queries: int) -> Mod:
    return lambda b, h, i, j: i + (keys - queries) >= j


MODS: dict[str, tuple[Mod, tuple[int | None, int | None, int, int], Mask]] = {
    "full": (lambda b, h, i, j: i >= 0, (None, None, 300, 300), masks.Full()),
    "causal": (_causal, (None, None, 300, 300), Causal()),
    "causal, queries last": (_slots(300, 40), (None, None, 40, 300), Causal()),
    "causal, more queries": (_slots(40, 300), (None, None, 300, 40), Causal()),
    "window": (
        lambda b, h, i, j: (i >= j) & (i - j < 70),
        (None, None, 300, 300),
        Causal() & Window(70),
    ),
    "two sides": (
        lambda b, h, i, j: (i - j < 9) & (j - i <= 4),
        (None, None, 300, 300),
        Window(9, ahead=4),
    ),
    "blocks": (
        lambda b, h, i, j: i // 32 >= j // 32,
        (None, None, 300, 300),
        masks.BlockCausal(32),
    ),
    "documents": (
        lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
        (None, None, 300, 300),
        Document((0, 40, 140, 300)),
    ),
    "causal documents": (
        lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
        (None, None, 300, 300),
        Causal() & Document((0, 40, 140, 300)),
    ),
    "windows of documents": (
        lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j) & (i - j < 20),
        (None, None, 300, 300),
        Causal() & Window(20) & Document((0, 40, 140, 300)),
    ),
    "prefix": (
        lambda b, h, i, j: (i >= j) | (j < 50),
        (None, None, 300, 300),
        Causal() | Prefix(50),
    ),
    "sinks": (
        lambda b, h, i, j: (i >= j) & ((i - j < 33) | (j < 4)),
        (None, None, 300, 300),
        Causal() & (Window(33) | Sinks(4)),
    ),
    "padding": (
        lambda b, h, i, j: j < LENGTHS[b],
        (2, None, 300, 300),
        Padding.right([130, 300]),
    ),
    "causal and padding": (
        lambda b, h, i, j: (i >= j) & (j < LENGTHS[b]),
        (2, None, 300, 300),
        Causal() & Padding.right([130, 300]),
    ),
    "heads": (
        lambda b, h, i, j: (i >= j) & ((h == 0) | (i - j < 5)),
        (None, 2, 300, 300),
        masks.Heads((Causal(), Causal() & Window(5))),
    ),
    "heads alike": (_causal, (2, 2, 150, 150), Causal()),
}
OTHERS: dict[str, tuple[Mod, tuple[int | None, int | None, int, int]]] = {
    "causal from the first key": (_causal, (None, None, 40, 300)),
    "every third": (lambda b, h, i, j: (i + j) % 3 == 0, (None, None, 300, 300)),
    "nothing": (lambda b, h, i, j: i < 0, (None, None, 200, 130)),
    "one pair more": (lambda b, h, i, j: (i >= j) | ((i == 3) & (j == 250)), (1, 1, 300, 300)),
    "one pair less": (lambda b, h, i, j: (i >= j) & ((i != 150) | (j != 7)), (1, 1, 300, 300)),
    "documents in turn": (
        lambda b, h, i, j: (i // 10) % 3 == (j // 10) % 3,
        (None, None, 300, 300),
    ),
    "one head of two": (
        lambda b, h, i, j: (i >= j) | ((h == 1) & ((i + j) % 7 == 0)),
        (None, 2, 300, 300),
    ),
}


def default_queries(T: int, S: int) -> Span:
    """The default positions of T queries of S keys."""
    return Span(S - T, T, tokens=S < T)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", MODS)
def test_a_rule_is_recognized(name: str) -> None:
    mod, (rows, heads, T, S), want = MODS[name]
    found = masks.from_block_mask(create_block_mask(mod, rows, heads, T, S, device="cpu"))
    assert found == want
    block = found.block(default_queries(T, S), Span(0, S))
    dense = create_mask(mod, rows, heads, T, S, device="cpu")
    assert block.expand_as(dense).equal(dense)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_rule_becomes_a_table(name: str) -> None:
    mod, (rows, heads, T, S) = OTHERS[name]
    found = masks.from_block_mask(create_block_mask(mod, rows, heads, T, S, device="cpu"))
    assert isinstance(found, masks.Dense)
    assert found.table.equal(create_mask(mod, rows, heads, T, S, device="cpu"))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["causal", "windows of documents", "causal and padding", "heads"])
def test_attend_equals_flex_attention(name: str) -> None:
    mod, (rows, heads, T, S), _ = MODS[name]
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, n, 16, generator=draw) for n in (T, S, S))
    block_mask = create_block_mask(mod, rows, heads, T, S, device="cpu")
    torch_flex._WARNINGS_SHOWN.add("flex_attention_performance")  # a warning is an error here
    want = torch_flex.flex_attention(q, k, v, block_mask=block_mask)
    found = regard.attend(q, k, v, mask=masks.from_block_mask(block_mask))
    visible = create_mask(mod, rows, heads, T, S, device="cpu")
    exact = plain_attention(q.double(), k.double(), v.double(), visible=visible)[0]
    plain = plain_attention(q, k, v, visible=visible)[0]
    for out in (want, found):
        assert_close_rule(out, plain, exact)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", CASES)
def test_to_block_mask_is_the_mask(name: str) -> None:
    mask, rule = CASES[name]
    for q, k in ((Span(0, 11), Span(0, 11)), (Span(6, 4), Span(0, 10))):
        found = masks.to_block_mask(mask, q, k, block_size=4)
        T, S = q.length, k.length
        assert found.seq_lengths == (T, S)
        dense = torch.tensor(pairs(rule, q, k))
        assert create_mask(found.mask_mod, B, H, T, S, device="cpu").equal(dense)
        assert (
            masks.from_block_mask(found)
            .block(default_queries(T, S), k)
            .expand(B, H, -1, -1)
            .equal(dense)
        )


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(100), Window(60, ahead=20)], ids=str)
def test_round_trip(mask: Mask) -> None:
    keys = Span(0, 500)
    block_mask = masks.to_block_mask(mask, keys, keys)
    assert masks.from_block_mask(block_mask) == mask
    want = create_block_mask(block_mask.mask_mod, None, None, 500, 500, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert getattr(block_mask, name).equal(getattr(want, name))
    assert block_mask.to_dense().equal(want.to_dense())


def test_blocks_alone_hide_as_the_compiled_kernels_do() -> None:
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    order = torch.tensor([[[[0, 9], [1, 0]]]], dtype=torch.int32)  # what is behind a count is noise
    found = masks.from_block_mask(
        BlockMask.from_kv_blocks(counts, order.clamp(max=1), BLOCK_SIZE=(3, 4), seq_lengths=(5, 7))
    )
    assert found.block(Span(2, 5), Span(0, 7))[0, 0].tolist() == [
        [j < 4 or i >= 3 for j in range(7)] for i in range(5)
    ]


def test_full_blocks_do_not_ask() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    never: Mod = lambda b, h, i, j: i < 0  # noqa: E731
    full = BlockMask.from_kv_blocks(one * 0, zero, one, zero, BLOCK_SIZE=8, mask_mod=never)
    assert masks.from_block_mask(full) == masks.Full()
    partial = BlockMask.from_kv_blocks(one, zero, BLOCK_SIZE=8, mask_mod=never)
    found = masks.from_block_mask(partial)
    assert not found.block(Span(0, 8), Span(0, 8)).any()


def test_what_is_refused() -> None:
    whole = create_block_mask(_causal, 1, 1, 300, 300, device="cpu")
    with pytest.raises(ArgumentError, match=r"(?s)cannot be evaluated: .*not a slice of it"):
        masks.from_block_mask(whole[0])
    for call, message in (
        (lambda: masks.from_block_mask(torch.ones(2, 2)), "block_mask is Tensor; it must be a"),
        (lambda: masks.to_block_mask(_causal, Span(0, 4), Span(0, 4)), "mask is function; it must"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{re.escape(message)}"):
            call()
    with pytest.raises(ArgumentError, match="block_size is 0; it must be 1 or more"):
        masks.to_block_mask(Causal(), Span(0, 4), Span(0, 4), block_size=0)
    with pytest.raises(ArgumentError, match="a BlockMask needs queries and keys, but there are 0"):
        masks.to_block_mask(Causal(), Span(0, 0), Span(0, 4))
