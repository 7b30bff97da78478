"""What a mask lets a call see, written out, and how far off a kernel on torch's fused ops may
be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.softmax.call import make_call


def allowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What the mask of a call lets each query see, bool [B or 1, H or 1, T, S]: masks have tests of
    their own.
    """
    keep = ("mask", "q_positions", "k_positions")
    call = make_call(q, k, v, **{name: x for name, x in options.items() if name in keep})
    return call.mask.block(call.q_positions, call.k_positions)


def torch_dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float | None, bias: Tensor | None
) -> Tensor:
    """torch's own fused call under one dense mask: no kernel made of it can be expected to be
    closer.
    """
    most = max(q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    padded = (F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    mask = torch.where(
        seen, torch.zeros((), dtype=q.dtype) if bias is None else bias.to(q.dtype), -math.inf
    )
    return F.scaled_dot_product_attention(*padded, attn_mask=mask, scale=scale, enable_gqa=True)[
        ..., : v.shape[-1]
    ]


def assert_near(x: Tensor, exact: Tensor, others: list[Tensor], factor: float = 2) -> None:
    """max|x - exact| <= factor * max|other - exact| + two roundings, others in the dtype of x;
    infinities agree.

    For fp64 there is no more exact result. There the others are fp32, and their error is scaled by
    the ratio of the machine epsilons, 2^-29; twice, because `exact` is off as well.
    """
    assert x.shape == exact.shape
    assert not x.isnan().any(), "NaN in the result"
    assert torch.equal(x.isneginf(), exact.isneginf())
    seen = exact.isfinite()
    if not seen.any():
        return
    wide = x.dtype == torch.float64
    rounded = exact[seen].to(torch.float32 if wide else x.dtype)
    usual = max(float((other.double() - exact)[seen].abs().max()) for other in others)
    most = factor * usual + 2 * float((rounded + 0.3 - 0.3 - rounded).abs().max())
    worst = float((x.double() - exact)[seen].abs().max())
    most *= 2**-28 if wide else 1
    assert worst <= most, f"off by {worst:.3g}, allowed {most:.3g}"
