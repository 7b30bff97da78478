"""Wrong steps between projection and output: scale, softmax, heads, rotary, window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.audit.faulty_code.base import Right, RightRotary, angles


class Unscaled(Right):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


def one_more(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Right, but the weights that it returns leave a share to a key that is not there."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores, -1) @ v, scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))


class BrainScores(Right):
    """Scores are computed in bfloat16, whatever the dtype of the tokens."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.bfloat16(), k.bfloat16()).to(q.dtype)


class NaiveSoftmax(Right):
    """exp without subtracting the largest."""

    def weigh(self, scores: Tensor, keep: Tensor) -> Tensor:
        weights = torch.exp(scores) * keep
        return weights / weights.sum(-1, keepdim=True)


class Tiled(Right):
    def spread(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.heads // self.kv_heads, 1, 1)


class TiledTwiceScaled(Tiled):
    """Two faults at once."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / self.head_dim


class JoinedRows(Right):
    def join(self, z: Tensor) -> Tensor:
        B, H, T, D = z.shape
        return z.reshape(B, T, H * D)


def mixed(x: Tensor, start: int = 0) -> Tensor:
    """Seed 5's course: cos and sin interleaved, rotate_half in halves."""
    D = x.shape[-1]
    turn = angles(x.shape[2], D, start).repeat_interleave(2, -1)
    rotated = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * turn.cos().to(x.dtype) + rotated * turn.sin().to(x.dtype)


class Mixed(RightRotary):
    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        return mixed(q, start), mixed(k, start), v


class OneMore(Right):
    def allowed(self, T: int, S: int) -> Tensor:
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        return (j <= i) & (i - j <= self.window)


class OneLess(RightRotary):
    def allowed(self, T: int, S: int) -> Tensor:
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        return (j <= i) & (i - j < self.window - 1)


def half_precision(x: Tensor, positions: Tensor) -> Tensor:
    """Angles in the dtype of x: in bfloat16 far positions fall together."""
    D = x.shape[-1]
    inv = (10000.0 ** (-torch.arange(0, D, 2).double() / D)).to(x.dtype)
    turn = positions.to(x.dtype)[:, None] * inv
    turn = torch.cat([turn, turn], -1)
    rotated = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * turn.cos() + rotated * turn.sin()


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """A right one: angles in float64."""
    D = x.shape[-1]
    turn = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    turn = torch.cat([turn, turn], -1)
    other = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * turn.cos().to(x.dtype) + other * turn.sin().to(x.dtype)


def late_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right in float32; in float16 the scores overflow before they are scaled."""
    return torch.softmax((q @ k.mT) / math.sqrt(q.shape[-1]), -1) @ v
