"""Multi-head latent attention from the paper's equations: Python floats and loops, and nothing of
regard.

`plain` is the same on whole tensors, the yardstick of the error rule in low precision.

arXiv 2405.04434, equations 37 to 47, with the norms behind both latents (section 3.1.2) and the
rotary angles and factors of the released code: interleaved pairs, YaRN ramp by pair index, mscale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.oracles.heads import normed, times

Vector = list[float]
Matrix = list[Vector]


class Weights(NamedTuple):
    """Matrices [out, in]; up-projections have, head by head, the rows of the first part, then those
    of the second.
    """

    q_down: Tensor | None
    q_norm: Tensor | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    kv_up: Tensor
    output: Tensor


class Yarn(NamedTuple):
    """What a DeepSeek config says of its rotary scaling."""

    factor: float
    length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


class Sizes(NamedTuple):
    """H, d_nope, d_rope, E; the base; the scaling; eps of the norms."""

    heads: int
    nope: int
    rope: int
    value: int
    base: float = 10000.0
    yarn: Yarn | None = None
    eps: float = 1e-6


def frequencies(sizes: Sizes) -> Vector:
    """Radians per position of each pair."""
    d, b, yarn = sizes.rope, sizes.base, sizes.yarn
    plain = [b ** (-2 * i / d) for i in range(d // 2)]
    if yarn is None:
        return plain

    def pair(rotations: float) -> float:
        return d * math.log(yarn.length / (rotations * 2 * math.pi)) / (2 * math.log(b))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair(yarn.beta_slow)), d - 1)
    high = high + 0.001 if high == low else high
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(d // 2)]
    return [theta * (1 - r) + theta / yarn.factor * r for theta, r in zip(plain, ramp, strict=True)]


def mscale(factor: float, m: float) -> float:
    """0.1 m ln s + 1."""
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def factors(sizes: Sizes) -> tuple[float, float]:
    """On cos and sin, and on the softmax scale."""
    yarn = sizes.yarn
    if yarn is None:
        return 1.0, 1.0
    all_dim = mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, yarn.mscale) / all_dim, all_dim**2


def softmax_scale(sizes: Sizes) -> float:
    """1 / sqrt(d_nope + d_rope), times the scaling's factor."""
    return factors(sizes)[1] / math.sqrt(sizes.nope + sizes.rope)


def turned(x: Vector, position: int, sizes: Sizes) -> Vector:
    """Pair (x_2i, x_2i+1) turned by position * frequency i."""
    factor, result = factors(sizes)[0], list(x)
    for i, omega in enumerate(frequencies(sizes)):
        a, b, c, s = x[2 * i], x[2 * i + 1], math.cos(position * omega), math.sin(position * omega)
        result[2 * i], result[2 * i + 1] = (a * c - b * s) * factor, (b * c + a * s) * factor
    return result


def latent_attention(
    x: Tensor, weights: Weights, sizes: Sizes, positions: Sequence[Sequence[int]]
) -> Tensor:
    """x [B,T,M] at positions [B][T], -1 for no token: out [B,T,M] in float64; causal by
    position.
    """
    w = {
        name: None if part is None else part.detach().double().tolist()
        for name, part in weights._asdict().items()
    }
    rows = x.detach().double().tolist()
    out = [_sequence(row, w, sizes, where) for row, where in zip(rows, positions, strict=True)]
    return torch.tensor(out, dtype=torch.float64)


def _sequence(row: Matrix, w: dict, sizes: Sizes, positions: Sequence[int]) -> Matrix:
    H, dn, dr, dv = sizes.heads, sizes.nope, sizes.rope, sizes.value
    rank = len(w["kv_norm"])
    keys, values = {}, {}
    for j, h_j in enumerate(row):
        if positions[j] < 0:
            continue
        down = times(w["kv_down"], h_j)
        c_kv = normed(down[:rank], w["kv_norm"], sizes.eps)  # equation 41
        k_rope = turned(down[rank:], positions[j], sizes)  # 43: one for all heads
        up = times(w["kv_up"], c_kv)  # 42 and 45
        for h in range(H):
            first = h * (dn + dv)
            keys[j, h] = up[first : first + dn] + k_rope  # 44
            values[j, h] = up[first + dn : first + dn + dv]
    result = []
    for i, h_i in enumerate(row):
        if positions[i] < 0:
            result.append([0.0] * len(w["output"]))
            continue
        c_q = h_i
        if w["q_down"] is not None:
            c_q = normed(times(w["q_down"], h_i), w["q_norm"], sizes.eps)  # 37
        up = times(w["q_up"], c_q)  # 38 and 39
        joined: Vector = []
        for h in range(H):
            first = h * (dn + dr)
            q = up[first : first + dn]
            q = q + turned(up[first + dn : first + dn + dr], positions[i], sizes)  # 40
            seen = [j for j in range(len(row)) if 0 <= positions[j] <= positions[i]]
            s = [softmax_scale(sizes) * times([keys[j, h]], q)[0] for j in seen]
            e = [math.exp(y - max(s)) for y in s]
            p = [y / math.fsum(e) for y in e]
            joined += [
                math.fsum(p_j * values[j, h][d] for p_j, j in zip(p, seen, strict=True))
                for d in range(dv)
            ]  # 46
        result.append(times(w["output"], joined))  # 47
    return result


def plain(
    w: Weights,
    x: Tensor,
    sizes: Sizes,
    start: int,
    *,
    absorb: bool,
    tables: torch.dtype = torch.float64,
) -> Tensor:
    """The equations on whole tensors in the dtype of x, absorbed or not; angles in the dtype of
    tables.
    """

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + sizes.eps).sqrt() * weight

    def turned(y: Tensor) -> Tensor:  # y [..., T, d_rope]
        p = torch.arange(start, start + x.shape[1], dtype=tables)[:, None]
        angle = p * torch.tensor(frequencies(sizes), dtype=tables)
        factor = factors(sizes)[0]
        cos, sin = ((f(angle) * factor).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = y[..., 0::2], y[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    rank, dn = len(w.kv_norm), sizes.nope
    q = x if w.q_down is None else normed(x @ w.q_down.T, w.q_norm)
    q = (q @ w.q_up.T).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
    q_c, q_r = q[..., :dn], turned(q[..., dn:])
    down = x @ w.kv_down.T
    c, k_r = normed(down[..., :rank], w.kv_norm), turned(down[..., rank:])
    up = w.kv_up.unflatten(0, (sizes.heads, -1))
    w_k, w_v = up[:, :dn], up[:, dn:]
    if absorb:
        s = (q_c @ w_k) @ c[:, None].mT + q_r @ k_r[:, None].mT
    else:
        s = q_c @ (c[:, None] @ w_k.mT).mT + q_r @ k_r[:, None].mT
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    p = (s * softmax_scale(sizes)).masked_fill(future, -math.inf).softmax(-1)
    z = (p @ c[:, None]) @ w_v.mT if absorb else p @ (c[:, None] @ w_v.mT)
    return z.transpose(1, 2).flatten(2) @ w.output.T
