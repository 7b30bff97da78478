"""Memory in large pages: the same numbers, at the beginning of a line; and what of the library
stands there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import huge_pages
from regard.caches import Quantised, quantized
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


def test_codes_of_a_long_prompt_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that were left where they were made were read at half the speed; and they take no room
    that is not used.
    """
    made: list[tuple[int, ...]] = []

    def noted(x: Tensor, shape: Any) -> Tensor:
        made.append(tuple(shape))
        return huge_pages.empty_like(x, shape)

    monkeypatch.setattr(quantized, "empty_like", noted)
    cache = Quantised(8, group=16, residual=16)
    k, v = torch.randn(2, 1, 2, 80, 16)
    cache.update((k, v), Span(0, 80))
    codes = [cache.contents()[f"codes.{i}"] for i in range(2)]
    for x in codes:
        assert isinstance(x, Tensor)
        assert tuple(x.shape) in made
        assert x.untyped_storage().nbytes() == x.numel()
