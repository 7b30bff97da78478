"""The latent cache: one part of rank + rotary numbers per token, and nothing else (bug class
28).
"""

from __future__ import annotations

import pytest
import torch

import regard
from regard.caches import Latent
from regard.span import Span


def test_deepseek_v3_keeps_576_numbers_per_token() -> None:
    """DeepSeek-V3: 512 + 64 numbers, 1152 bytes in bf16 per token and layer; 61 layers are 70,272
    bytes.
    """
    for capacity in (None, 5):
        cache = Latent(512, 64, capacity=capacity)
        cache.update((torch.zeros(1, 1, 5, 576, dtype=torch.bfloat16),), Span(0, 5))
        assert cache.elements == 576
        assert cache.bytes == 5 * 1152
        assert 61 * cache.bytes // 5 == 70_272
        assert cache.settings == {"rank": 512, "rotary": 64, "capacity": capacity}


def test_expanded_keys_and_values_are_refused() -> None:
    """Bug class 28: 128 heads of 192 and 128 numbers are 40,960 per token, 71 times as many."""
    expanded = torch.zeros(1, 128, 3, 192), torch.zeros(1, 128, 3, 128)
    latent, rotary = torch.zeros(1, 1, 3, 512), torch.zeros(1, 1, 3, 64)
    others = torch.zeros(1, 2, 3, 576), torch.zeros(1, 3, 576)
    for memory in (expanded, (latent, rotary), (latent,), *((x,) for x in others), ()):
        cache = Latent(512, 64)
        with pytest.raises(regard.ArgumentError, match=r"a Latent cache takes one part .*, 576]"):
            cache.update(memory, Span(0, 3))
        assert (len(cache), cache.contents()) == (0, {})
        with pytest.raises(regard.ArgumentError, match="a Latent cache takes one part"):
            cache.fill({"memory.0": torch.zeros(1, 2, 3, 576), "positions": Span(0, 3)})


def test_preallocated_steps_are_written_in_place() -> None:
    cache = Latent(3, 2, capacity=4)
    (first,), _ = cache.update((torch.zeros(1, 1, 2, 5),), Span(0, 2))
    (held,), positions = cache.update((torch.ones(1, 1, 2, 5),), Span(2, 2))
    assert held.data_ptr() == first.data_ptr()
    assert positions == Span(0, 4)
    with pytest.raises(regard.ArgumentError, match="Fixed holds 4 of 4 slots and 1 more do not"):
        cache.update((torch.ones(1, 1, 1, 5),), Span(4, 1))
    assert len(cache) == 4


def test_sizes_are_checked() -> None:
    for rank, rotary in ((0, 2), (2, -1)):
        with pytest.raises(regard.ArgumentError, match="rank must be at least 1 and rotary at"):
            Latent(rank, rotary)
    with pytest.raises(regard.ArgumentError, match="Fixed capacity is 0; it must be at least 1"):
        Latent(3, 2, capacity=0)
