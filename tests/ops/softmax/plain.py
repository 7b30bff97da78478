"""Softmax attention as one page of plain torch, in the dtype of its inputs, and the rule that judges a kernel by it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.ops.softmax.call import make_call


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B,H,T,E], lse [B,H,T]), differentiable as every kernel is that keeps out and lse, not the weights:

    p = exp(s - lse);  ds = p (dO . v - dO . O + d lse);  rows that see nothing: out 0, lse -inf, gradient 0.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.to(s.dtype)
    blind = ~allowed.any(-1, keepdim=True).expand(*s.shape[:-1], 1)
    s = s.masked_fill(~allowed, -math.inf).masked_fill(blind, 0)
    lse = torch.logsumexp(s, -1, keepdim=True).detach()
    p = torch.exp(s - lse).masked_fill(blind, 0)
    nothing = p.sum(-1, keepdim=True) - (~blind).to(p.dtype)  # 0, but its gradient is p
    out = p @ v
    out, lse = out - out.detach() * nothing, lse + nothing
    if sink is not None:
        out = out * torch.sigmoid(lse - sink[:, None, None])
    return out, lse.masked_fill(blind, -math.inf)[..., 0]


def allowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What the mask of a call lets each query see, bool [B or 1, H or 1, T, S]: masks have tests of their own."""
    keep = ("mask", "q_positions", "k_positions")
    call = make_call(q, k, v, **{name: x for name, x in options.items() if name in keep})
    return call.mask.block(call.q_positions, call.k_positions)


def assert_near(x: Tensor, exact: Tensor, same_dtype: Tensor, factor: float = 2) -> None:
    """max|x - exact| <= factor * max|plain math in the same dtype - exact| + two roundings; infinities agree.

    For fp64 there is no more exact result: plain math and the kernel may then each be off by as much as plain fp32
    math is off from fp64, scaled by the ratio of their machine epsilons.
    """
    assert x.shape == exact.shape
    assert x.isnan().logical_not().all(), "NaN in the result"
    assert torch.equal(x.isneginf(), exact.isneginf())
    x, exact, same_dtype = (y.masked_fill(y.isneginf(), 0) for y in (x, exact, same_dtype))
    if x.numel():
        worst, most = float((x.double() - exact).abs().max()), bound(exact, same_dtype, x.dtype, factor)
        assert worst <= most, f"off by {worst:.3g}, allowed {most:.3g}"


def bound(exact: Tensor, same_dtype: Tensor, dtype: torch.dtype, factor: float) -> float:
    """The error that is allowed."""
    wide = dtype == torch.float64
    rounded = exact.to(torch.float32 if wide else dtype)
    roundings = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().double()
    plain_error = (same_dtype.double() - exact).abs().max()
    most = float(factor * plain_error + roundings)
    return most * 2**-29 * 2 if wide else most  # eps of fp64 / eps of fp32 = 2 ** -29
