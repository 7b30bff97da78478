"""Memory in large pages: the same numbers, at the beginning of a line; and what of the library
stands there.
"""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import huge_pages
from regard.caches import Quantized, quantized
from regard.span import Span


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_numbers_are_moved(dtype: torch.dtype) -> None:
    x = (100 * torch.rand(huge_pages.HUGE_PAGE_THRESHOLD // dtype.itemsize // 8, 9)).to(dtype)
    found = huge_pages.to_huge_pages(x)
    assert found is not x
    assert torch.equal(found, x)
    assert found.is_contiguous()
    assert found.data_ptr() % huge_pages.CACHE_LINE == 0
    assert huge_pages.to_huge_pages(x[:10]).data_ptr() == x.data_ptr(), "small ones stay"


def test_a_block_holds_one_tensor_after_another() -> None:
    block = huge_pages.HugePageBlock(9 << 20)
    sizes = [(3,), (5, 7), (1 << 20,), (0,), (2, 1 << 19)]
    tensors = [block.copy(torch.randn(size)) for size in sizes]
    filled = [x for x in tensors if x.numel()]
    assert filled[0].data_ptr() % huge_pages.HUGE_PAGE == 0
    for x, y in pairwise(filled):
        assert y.data_ptr() == x.data_ptr() + x.nbytes + -x.nbytes % huge_pages.CACHE_LINE
        assert x.untyped_storage().nbytes() == x.nbytes
    copies = [x.clone() for x in tensors]
    tensors[2] = torch.empty(0)  # freed: its neighbours keep their numbers
    for i in (0, 1, 3, 4):
        assert torch.equal(tensors[i], copies[i])
    half = block.copy(copies[1], torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half, copies[1].half())
    beyond = block.copy(torch.arange(1 << 20))
    assert torch.equal(beyond, torch.arange(1 << 20)), "what does not fit has memory of its own"


def test_the_pages_of_a_freed_tensor_are_given_back() -> None:
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
        return int(pages) * mmap.PAGESIZE

    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages")
    block, size = huge_pages.HugePageBlock(96 << 20), 32 << 20
    tensors = [block.empty((size,), dtype=torch.uint8).fill_(i) for i in range(3)]
    before = resident()
    del tensors[1]
    assert before - resident() > size - 2 * huge_pages.HUGE_PAGE
    assert [int(x.max()) for x in tensors] == [0, 2]
    other = tensors[0]
    del block, tensors
    assert int(other.max()) == 0, "a tensor outlives its block"


def test_a_small_block_takes_no_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    block = huge_pages.HugePageBlock(huge_pages.HUGE_PAGE_THRESHOLD - 1)
    monkeypatch.setattr(mmap, "mmap", None)
    assert block.copy(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]


def test_a_system_that_reserves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    x = torch.randn(1 << 20)
    assert torch.equal(huge_pages.HugePageBlock(x.nbytes).copy(x), x)


def test_codes_of_a_long_prompt_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that were left where they were made were read at half the speed; and they take no room
    that is not used.
    """
    made: list[tuple[int, ...]] = []

    def noted(x: Tensor, shape: Any) -> Tensor:
        made.append(tuple(shape))
        return huge_pages.empty_like(x, shape)

    monkeypatch.setattr(quantized, "empty_like", noted)
    cache = Quantized(8, group=16, residual=16)
    k, v = torch.randn(2, 1, 2, 80, 16)
    cache.update((k, v), Span(0, 80))
    codes = [cache.contents()[f"codes.{i}"] for i in range(2)]
    for x in codes:
        assert isinstance(x, Tensor)
        assert tuple(x.shape) in made
        assert x.untyped_storage().nbytes() == x.numel()
