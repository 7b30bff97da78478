"""Masks and biases as data: they mean what the rules mean, and no tile is called full or empty
wrongly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import biases, masks
from regard.masks import EMPTY, FULL
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.triton import call_data as lowering
from regard.ops.softmax.triton.call_data import (
    BiasData,
    MaskData,
    bias_data,
    make_lists,
    mask_data,
    tile_kinds,
    tile_lists,
    why_no_bias_data,
)
from regard.span import Span, next_positions
from tests.ops.softmax.cases import MASKS, Case, make

POSITIONS = ("", "shift", "rows")


def call_of(mask: str, positions: str, shape: tuple[int, ...] = (2, 4, 2, 19, 33, 8, 8)) -> Call:
    return make(Case(mask, shape, positions=positions, seed=3), torch.float32).call()


def dense(data: MaskData) -> Tensor:
    """The pairs that the data shows, with the comparisons that the kernel makes."""
    k = data.k_positions[:, None, None]
    visible = (k >= 0).expand(-1, -1, data.q_positions.shape[1], -1)
    if data.starts is not None:
        assert data.stops is not None
        inside = (k[..., None] >= data.starts[:, :, :, None]) & (
            k[..., None] < data.stops[:, :, :, None]
        )
        visible = visible & inside.any(-1)
    if data.bits is not None:
        j = torch.arange(k.shape[-1])
        visible = visible & ((data.bits[..., j // 8] >> (j % 8)) & 1).bool()
    return visible


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_data_is_the_mask_and_the_tiles_are_sound(mask: str, positions: str) -> None:
    call = call_of(mask, positions)
    right = call.mask.block(call.q_positions, call.k_positions)
    data = mask_data(call)
    found = dense(data)
    assert torch.equal(*torch.broadcast_tensors(found, right))
    for rows, keys in ((16, 8), (8, 16)):
        kinds = tile_kinds(data, rows, keys)
        exact = call.mask.tiles(call.q_positions, call.k_positions, (rows, keys))
        kinds, exact = torch.broadcast_tensors(kinds, exact)
        assert (exact[kinds == FULL] == FULL).all()
        assert (exact[kinds == EMPTY] == EMPTY).all()
        ragged = kinds[..., -1]  # 33 keys: the last tile has slots behind the end
        assert not (ragged == FULL).any()


@pytest.mark.parametrize("mask", ["causal", "window", "sinks", "none", "chunk"])
def test_the_closed_form_finds_most_tiles(mask: str) -> None:
    """A tile that is called partial without need costs time; for these masks there is none."""
    call = call_of(mask, "", (1, 4, 2, 64, 64, 8, 8))
    kinds = tile_kinds(mask_data(call), 16, 16)
    exact = call.mask.tiles(call.q_positions, call.k_positions, (16, 16))
    assert torch.equal(*torch.broadcast_tensors(kinds, exact))


def test_a_control_that_calls_a_ragged_tile_full_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with keys at 0 instead of -1 behind the end, the test above fails."""
    right = lowering.F.pad

    def padded(x: Tensor, missing: tuple[int, ...], value: int = 0) -> Tensor:
        return right(x, missing, value=0 if value == -1 else value)

    call = call_of("none", "")
    assert (tile_kinds(mask_data(call), 16, 8)[..., -1] != FULL).all()
    monkeypatch.setattr(lowering.F, "pad", padded)
    assert (tile_kinds(mask_data(call), 16, 8)[..., -1] == FULL).all()


def test_lists_hold_the_full_tiles_first() -> None:
    call = call_of("causal", "", (1, 1, 1, 40, 40, 8, 8))
    data = mask_data(call)
    lists = tile_lists(call, data, 8, 8)
    assert lists.counts[0, 0].tolist() == [[i, i + 1] for i in range(5)]
    assert [lists.tiles[0, 0, i, : i + 1].tolist() for i in range(5)] == [
        [*range(i), i] for i in range(5)
    ]
    across = tile_lists(call, data, 8, 8, transposed=True)
    assert across.counts[0, 0].tolist() == [[4 - i, 5 - i] for i in range(5)]
    assert across.tiles[0, 0, 1, :4].tolist() == [2, 3, 4, 1]
    assert make_lists(torch.zeros(1, 1, 1, 2, dtype=torch.int8)).counts.tolist() == [[[[0, 0]]]]


def test_what_is_computed_from_numbers_only_is_kept() -> None:
    first, again = (call_of("window", "") for _ in range(2))
    assert mask_data(first) is mask_data(again)
    assert tile_lists(first, mask_data(first), 8, 8) is tile_lists(again, mask_data(again), 8, 8)
    table = masks.Dense(torch.ones(19, 33, dtype=torch.bool))
    changed = replace(first, mask=table)
    assert mask_data(changed) is not mask_data(changed)


def test_the_layers_of_a_step_share_the_data_and_the_next_step_does_not() -> None:
    """The positions of the keys are overwritten between the steps, as in a static cache."""
    q, k, v = (torch.randn(1, 1, n, 4) for n in (1, 4, 4))
    slots = torch.tensor([[0, 1, 2, -1]])

    def data(mask: masks.Mask, positions: Tensor) -> MaskData:
        return mask_data(make_call(q, k, v, mask=mask, q_positions=positions, k_positions=slots))

    causal, window = masks.Causal(), masks.Causal() & masks.Window(2)
    first = next_positions(slots, 1)
    slots[0, 3] = 3
    assert data(causal, first) is data(masks.Causal(), first)
    assert data(window, first) is not data(causal, first)
    assert dense(data(window, first)).flatten().tolist() == [False, False, True, True]
    second = next_positions(slots, 1)
    slots[0, 0] = 4
    assert dense(data(window, second)).flatten().tolist() == [True, False, False, True]
    assert data(causal, second.clone()) is not data(causal, second)


def test_many_ranges_become_bits() -> None:
    q = torch.zeros(1, 1, 40, 8)
    strided = masks.Fn(lambda q, k: (k % 2) == 0, "even")
    assert mask_data(make_call(q, q, q, mask=strided)).bits is not None
    five = masks.Causal() & (masks.Sinks(1) | masks.Prefix(3) & ~masks.Sinks(2) | masks.Window(2))
    data = mask_data(make_call(q, q, q, mask=five))
    assert data.ranges in (2, 4)
    assert data.starts is not None


def test_a_position_that_int32_cannot_hold_fails() -> None:
    q = torch.zeros(1, 1, 2, 8)
    far = torch.tensor([[0, 2**40]])
    call = make_call(q, q, q, mask=masks.Causal(), q_positions=far, k_positions=far)
    with pytest.raises(RuntimeError, match="a position is above 2147483646"):
        mask_data(call)


def written_out(call: Call, data: BiasData) -> Tensor:
    """The bias that the data shows, with the operations of the kernel."""
    q, k = (
        (x.tensor() if isinstance(x, Span) else x) for x in (call.q_positions, call.k_positions)
    )
    distance = k[:, None, None, :] - q[:, None, :, None]
    total = torch.zeros(1)
    if data.slopes is not None:
        signed = distance.abs() if data.symmetric else -distance
        total = total - data.slopes[:, None, None] * signed
    if data.buckets is not None:
        assert data.weights is not None
        most = data.buckets.numel() // 2
        found = data.buckets[distance.clamp(-most, most)[:, 0] + most]
        total = total + data.weights[:, found].movedim(0, 1)
    return total if data.table is None else total + data.table


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", ["t5", "dense", "key", "fn", "alibi"])
def test_the_data_is_the_bias(kind: str, positions: str) -> None:
    made = make(Case("causal", bias=kind, positions=positions, seed=5), torch.float32)
    call = made.call()
    assert call.bias is not None
    assert made.bias is not None
    found = written_out(call, bias_data(call, call.bias))
    filled = made.visible
    torch.testing.assert_close(
        found.expand(filled.shape)[filled], made.bias.expand(filled.shape)[filled]
    )
    both = call.bias + biases.ALiBi(4)
    assert bias_data(call, both).slopes is not None
    expected = both.block(call.q_positions, call.k_positions).expand(filled.shape)
    found = written_out(call, bias_data(call, both)).expand(filled.shape)
    torch.testing.assert_close(found[filled], expected[filled])


def test_a_table_that_would_be_too_large_is_refused() -> None:
    x = torch.empty(1, 32, 65536, 8, device="meta")
    rule = biases.FnBias(lambda q, k: (q - k).float(), ())
    call = replace(make_call(x, x, x), bias=rule)
    assert why_no_bias_data(call) == ["a table of fn(<lambda>) may take 512 GiB; limit 4.00 GiB"]
    assert why_no_bias_data(replace(call, bias=biases.ALiBi(32))) == []
