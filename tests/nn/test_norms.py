"""Norms whose weight or groups differ from torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from regard.nn.blocks.norms import JoinedHeadsRMSNorm, OffsetLayerNorm


def test_an_offset_weight_is_added_to_1() -> None:
    norm, x = OffsetLayerNorm(4), torch.randn(3, 4)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    assert torch.equal(norm(x), F.layer_norm(x, (4,), 1 + norm.weight, norm.bias, norm.eps))


def test_each_group_of_heads_has_its_own_mean() -> None:
    norm, x = JoinedHeadsRMSNorm(4, 3, groups=2).double(), torch.randn(1, 4, 5, 3).double()
    torch.nn.init.normal_(norm.weight)
    found = norm(x)
    for t in range(5):
        for g in range(2):
            part = x[0, 2 * g : 2 * g + 2, t]
            size = (part.square().mean() + norm.eps).sqrt()
            weight = norm.weight.view(4, 3)[2 * g : 2 * g + 2]
            assert torch.allclose(found[0, 2 * g : 2 * g + 2, t], part / size * weight)
