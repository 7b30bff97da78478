"""The preallocated cache: what it gives out equals what transformers' own gives out, and a step
copies no old token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import ArgumentError
from tests.integrations.families import (
    DECODERS,
    PreallocatedCache,
    PreallocatedLayer,
    decoder,
    tokens,
    transformers,
)

DynamicLayer = transformers.cache_utils.DynamicLayer
Sliding = transformers.cache_utils.DynamicSlidingWindowLayer
B, G, D, E = 3, 2, 4, 5
WINDOW = 6


def new(n: int, rows: int = B) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, G, n, D), torch.randn(rows, G, n, E)


def pair(window: int | None, max_length: int | None = None) -> tuple[PreallocatedLayer, Any]:
    theirs = DynamicLayer() if window is None else Sliding(window)
    return PreallocatedLayer(window, max_length, spare=2), theirs


def assert_same(ours: PreallocatedLayer, theirs: Any, n: int, rows: int = B) -> None:
    """One update, and the sizes that are said before it."""
    assert ours.get_mask_sizes(n) == theirs.get_mask_sizes(n)
    assert ours.get_seq_length() == theirs.get_seq_length()
    k, v = new(n, rows)
    for a, b in zip(ours.update(k, v), theirs.update(k, v), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_length", [None, 40])
@pytest.mark.parametrize("window", [None, 2, WINDOW, 64])
@pytest.mark.parametrize(
    "chunks", [(1,) * 30, (17, 1, 1, 1, 5, 1), (3, 4, 9, 1, 2, 1, 11), (0, 2, 1)]
)
def test_it_gives_out_what_transformers_own_gives_out(
    chunks: tuple[int, ...], window: int | None, max_length: int | None
) -> None:
    ours, theirs = pair(window, max_length)
    for n in chunks:
        assert_same(ours, theirs, n)
    assert ours.is_sliding == (window is not None)


def test_a_window_of_one_gives_out_the_new_tokens_alone() -> None:
    """As said by `get_mask_sizes`; transformers' own layer says so too, but gives out
    everything.
    """
    layer = PreallocatedLayer(1)
    for n in (3, 1, 2):
        k, v = new(n)
        assert layer.get_mask_sizes(n)[0] == n
        assert all(torch.equal(a, b) for a, b in zip(layer.update(k, v), (k, v), strict=True))


def test_a_step_writes_its_own_token_and_moves_no_other() -> None:
    layer = PreallocatedLayer(max_length=64)
    keys, values = layer.update(*new(8))
    where = keys.data_ptr(), values.data_ptr()
    for i in range(9, 65):
        keys, values = layer.update(*new(1))
        assert keys.shape[2] == i
        assert (keys.data_ptr(), values.data_ptr()) == where
    with pytest.raises(ArgumentError, match="has max_length=64, but needs 65 tokens"):
        layer.update(*new(1))


def moves(layer: PreallocatedLayer, steps: int) -> int:
    """In how many steps the memory is another one."""
    seen = []
    for _ in range(steps):
        layer.update(*new(1, 1))
        assert layer._slots is not None
        seen.append(layer._slots)  # kept, so that no address comes twice
    return sum(a is not b for a, b in pairwise(seen))


def test_room_doubles_when_it_is_used_up() -> None:
    assert moves(PreallocatedLayer(), 4000) <= 4  # 257, 514, ...
    layer = PreallocatedLayer()
    layer.update(*new(1000, 1))
    assert layer._slots is not None
    assert layer._slots.capacity < 1000 + 300  # a prompt does not double itself


def test_a_window_needs_room_for_two_and_moves_rarely() -> None:
    window, steps = 300, 3000
    layer = PreallocatedLayer(window)
    layer.update(*new(5000, 1))
    assert moves(layer, steps) <= steps / window + 2
    assert layer._slots is not None
    assert layer._slots.capacity <= 2 * window


@pytest.mark.parametrize("window", [None, WINDOW])
def test_what_a_crop_took_back_never_was(window: int | None) -> None:
    ours, theirs = pair(window)
    assert_same(ours, theirs, 9)
    ours.activate_past_recording()
    if window is not None:
        theirs.activate_past_recording()
    for n, back in ((4, 2), (1, 0), (5, 5), (4, 1), (3, 3), (4, 4), (1, 1), (2, 0), (7, 6)):
        assert_same(ours, theirs, n)
        for layer in (ours, theirs):
            layer.crop(-back)
    assert_same(ours, theirs, 1)


def test_a_crop_needs_the_tokens_in_front_of_it() -> None:
    layer = PreallocatedLayer(WINDOW, spare=2)
    layer.crop(-3)  # nothing is there yet
    for _ in range(12):
        layer.update(*new(1))
    before = [x.clone() for x in (layer.keys, layer.values)]
    with pytest.raises(
        ArgumentError, match=r"crop\(-8\) needs 4 tokens before the remaining ones, but has \d"
    ):
        layer.crop(-8)
    with pytest.raises(ArgumentError, match=r"crop\(2\): give the number .* as a negative number"):
        layer.crop(2)
    assert layer.get_seq_length() == 12
    assert all(torch.equal(a, b) for a, b in zip(before, (layer.keys, layer.values), strict=True))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_are_reordered_repeated_and_selected(window: int | None) -> None:
    ours, theirs = pair(window)
    for layer in (ours, theirs):  # nothing to do yet
        layer.reorder_cache(torch.tensor([0]))
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0]))
    assert_same(ours, theirs, 8)
    steps = (
        lambda x: x.reorder_cache(torch.tensor([2, 0, 0])),
        lambda x: x.reorder_cache(torch.tensor([0, 1, 2])),
        lambda x: x.batch_repeat_interleave(2),
        lambda x: x.batch_select_indices(torch.tensor([5, 1])),
        lambda x: x.batch_select_indices(torch.tensor([False, True])),
    )
    for step, rows in zip(steps, (3, 3, 6, 2, 1), strict=True):
        step(ours)
        step(theirs)
        assert torch.equal(ours.keys[:, :, -3:], theirs.keys[:, :, -3:])
        assert_same(ours, theirs, 2, rows)
    ours.reset()
    theirs.reset()
    assert_same(ours, theirs, 3)


def test_a_gradient_goes_through_what_was_stored() -> None:
    layer = PreallocatedLayer(max_length=8)
    k, v = (x.requires_grad_() for x in new(3))
    layer.update(k, v)
    keys, values = layer.update(*new(2))
    (keys.sum() + 2 * values.sum()).backward()
    assert torch.equal(k.grad, torch.ones_like(k))
    assert torch.equal(v.grad, torch.full_like(v, 2))


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("max_length", 0)])
def test_sizes_are_checked(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} is {value}; it must be at least 1, or None"):
        PreallocatedLayer(**{name: value})


def test_each_layer_has_the_window_of_the_config() -> None:
    config = decoder("Gemma3", "regard").config
    cache = PreallocatedCache(config, max_length=32)
    windows = [layer.window for layer in cache.layers]
    assert windows == [4 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert len(set(windows)) == 2
    assert cache.is_sliding == [w is not None for w in windows]
    assert (cache.get_max_length(), cache.is_compileable, cache.is_croppable) == (32, False, True)
    assert PreallocatedCache(config).get_max_length() == -1


def test_other_layers_keep_the_cache_of_transformers() -> None:
    config = transformers.Lfm2Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    conv, full = PreallocatedCache(config).layers
    assert isinstance(full, PreallocatedLayer)
    assert isinstance(conv, transformers.cache_utils.LinearAttentionLayer)


def test_a_step_of_a_model_moves_no_memory() -> None:
    model = decoder("Llama", "regard")
    cache = PreallocatedCache(model.config, max_length=32)
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
        before = [layer.keys.data_ptr() for layer in cache.layers]
        for i in range(6, 20):
            model(tokens(1, 1, seed=i), past_key_values=cache)
            assert [layer.keys.data_ptr() for layer in cache.layers] == before
    assert cache.get_seq_length() == 19
    assert DECODERS["Llama"]["num_hidden_layers"] == len(before)


def test_what_a_crop_may_need_outlives_a_larger_buffer() -> None:
    layer = PreallocatedLayer(window=3, spare=1)

    def feed(first: int, stop: int) -> None:
        x = torch.arange(first, stop).double()[None, None, :, None]
        layer.update(x, x)

    feed(0, 4)
    layer.activate_past_recording()
    for i in range(4, 16):
        feed(i, i + 1)
    layer.crop(-12)
    assert layer.keys is not None
    assert layer.keys.flatten().tolist() == [2, 3]
