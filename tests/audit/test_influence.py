"""What one token changes in the others: small leaks and NaN are visible, rounding is not."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.adapters.base import influence


def test_a_small_leak_is_visible_and_nan_beside_nan_is_not() -> None:
    def run(x: Tensor) -> Tensor:
        out = x + 1e-3 * x[:, -1:]  # [1,T,1]: every token leaks a little of the last one
        out = torch.where(x[:, 1:2] > 5, torch.nan, out)
        return torch.cat([out, torch.full_like(out[:, :1], torch.nan)], 1)

    def changed(x: Tensor, j: int) -> Tensor:
        x = x.clone()
        x[:, j] += 9
        return x

    found = influence(run, torch.tensor([[[1.0], [2.0], [3.0]]]).float(), changed)
    assert found.visible[:3, 2].all(), "nine thousandths of 3"
    assert found.visible[:3, 1].all(), "NaN"
    assert found.visible[:, 0].tolist() == [True, False, False, False]
