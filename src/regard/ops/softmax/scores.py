"""What a score is, for any block of a call: scale, then softcap, then bias, then mask. Shared by the kernels that compute it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.softmax.call import Call
from regard.process import is_compiling

ALL = slice(None)


def scores(call: Call, rows: slice = ALL, columns: slice = ALL) -> tuple[Tensor, Tensor]:
    """The scores [B,H,t,s] of a block, -inf where masked, and which of them are visible (bool, broadcastable).

    s_ij = softcap(scale * q_i . k_j) + bias_ij, computed in fp32 (fp64 for fp64); the query is scaled first, so that
    a half-precision product cannot overflow.
    """
    visible = call.mask.block(
        call.q_positions, call.k_positions, rows, columns, device=call.q.device
    )
    s = dot(call, rows, columns)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + call.bias.block(
            call.q_positions, call.k_positions, rows, columns, dtype=s.dtype, device=s.device
        )
    return s.masked_fill(~visible, -math.inf), visible


def dot(call: Call, rows: slice = ALL, columns: slice = ALL) -> Tensor:
    """scale * q k^T [B,H,t,s]; query head h reads key head h // (H/G), without repeating the keys."""
    q = call.q[:, :, rows].to(call.score_dtype) * call.scale
    k = call.k[:, :, columns].to(call.score_dtype)
    s = _grouped(q, k.mT)
    if is_compiling() or call.finite:
        return s
    # The gradient of a masked score is 0, and 0 times a NaN in q or k would poison its neighbours: differentiate
    # the product of the finite entries, and show the value of the whole.
    clean = _grouped(_finite_only(q), _finite_only(k).mT)
    return torch.where(s.isfinite(), clean, s.detach())


def mix(pattern: Tensor, visible: Tensor, v: Tensor, *, finite: bool) -> Tensor:
    """The weighted sum of the values [B,H,t,E]; a value that a query may not see does not reach it, NaN included."""
    v = v.to(pattern.dtype)
    # a masked weight is 0 already; its gradient is selected too, since that of a huge masked value may be infinite
    pattern = pattern.masked_fill(~visible, 0)
    if finite:
        return _grouped(pattern, v)
    out = _grouped(pattern, _finite_only(v))
    # 0 x NaN is NaN: so the non-finite values go to those queries that see them, by counting, not by multiplying.
    seen = visible.expand(pattern.shape).to(pattern.dtype)
    n_nan, n_up, n_down = (
        _grouped(seen, bad.to(v.dtype)) > 0 for bad in (v.isnan(), v.isposinf(), v.isneginf())
    )
    out = out.masked_fill(n_up, math.inf).masked_fill(n_down, -math.inf)
    return out.masked_fill(n_nan | (n_up & n_down), math.nan)


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x [B,H,t,a] @ y [B,G,a,b] -> [B,H,t,b]: the H/G query heads of a group are rows of one product."""
    H, t, G = x.shape[1], x.shape[2], y.shape[1]
    x = x.unflatten(1, (G, H // G)).flatten(2, 3)  # [B,G,(H/G)t,a]
    return (x @ y).unflatten(2, (H // G, t)).flatten(1, 2)


def _finite_only(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)
