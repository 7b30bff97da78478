"""The RMS norm, in fp32 or better whatever the dtype."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.gemv import at_hand

FEW = 1 << 14
"""Numbers of a call up to which the compiled one is the faster."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) for x [..., M] and weight [M] -> [..., M], rounded once.

    >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(4), 0.0).tolist()
    [1.2000000476837158, 1.600000023841858, 0.0, 0.0]

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    if 0 < x.numel() <= FEW and weight.is_contiguous() and at_hand(x, weight):
        return _few(x, weight, eps, offset)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + offset if offset else weight.to(wide)
    return F.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)


def _few(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    entry, run = _compiled()
    x = x.contiguous()
    y, M = torch.empty_like(x), x.shape[-1]
    bits = struct.unpack("2q", struct.pack("2d", eps, offset))
    at = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    run(entry(x.dtype), (0, x.numel() // M, M, *at, *bits), 1)
    return y


@cache
def _compiled() -> Any:
    from regard.ops.jit import norm, team

    return norm.entry, team.run
