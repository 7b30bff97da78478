"""Attention from its definition, with every place where code goes wrong made explicit: right, or wrong in a named way."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard.inspect.audit.subject import Projections


@dataclass(frozen=True)
class Steps:
    """One way to compute attention: each field is a step, and the first value of `CHOICES` is the right one.

    >>> Steps(scale="none").wrong
    ('scale',)
    """

    rotary: str = "none"
    base: float = 10000.0
    scale: str = "head_dim"
    groups: str = "adjacent"
    mask: str = "right"
    softmax: str = "keys"
    split: str = "heads"
    join: str = "heads"

    @property
    def wrong(self) -> tuple[str, ...]:
        """The fields that are not right."""
        return tuple(
            f.name
            for f in fields(self)
            if f.name in WRONG and getattr(self, f.name) in WRONG[f.name]
        )


RIGHT_ROTARY = ("none", "half", "interleaved")
WRONG: dict[str, tuple[str, ...]] = {
    "rotary": ("mixed", "mixed-back", "heads-half", "heads-interleaved", "values-half", "values-interleaved", "queries-half", "queries-interleaved"),
    "scale": ("none", "twice", "model_dim", "inverted"),
    "groups": ("tiled",),
    "mask": ("inverted", "own-hidden", "next-seen", "one-more", "one-less", "unmasked", "zeroed", "after"),
    "softmax": ("queries", "heads", "absent"),
    "split": ("rows",),
    "join": ("rows",),
}  # fmt: skip
"""Field -> the values that are faults."""


def attend(
    x: Tensor,
    maps: Projections,
    steps: Steps,
    keep: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Self-attention of x [B,T,M] by these steps -> [B,T,M], in the dtype of x.

    q, k, v = heads of x Wq, x Wk, x Wv;  out = join(softmax(mask(scale(q k^T))) v) Wo

    Args:
        x: tokens.
        maps: weights; converted to the dtype of x.
        steps: what is done, rightly or wrongly.
        keep: bool [T,T], the right mask.
        scale: the right scale, or None for 1/sqrt(D).
        window: W, where the mask has one.
    """
    H, G, D = maps.heads, maps.groups, maps.head_dim
    q = _split(_linear(x, maps.q), H, D, steps.split)
    k, v = (_split(_linear(x, m), G, D, steps.split) for m in (maps.k, maps.v))
    q, k, v = _rotated(q, k, v, steps)
    if G != H:
        k, v = (_spread(t, H // G, steps.groups) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * _factor(steps.scale, D, x.shape[-1], scale)
    z = _pattern(scores, _mask(keep, steps.mask, window), steps) @ v
    B, _, T, _ = z.shape
    joined = (
        z.reshape(B, T, H * D) if steps.join == "rows" else z.transpose(1, 2).reshape(B, T, H * D)
    )
    return _linear(joined, maps.o)


def _linear(x: Tensor, weights: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, bias = weights
    out = x @ weight.to(x.dtype).T
    return out if bias is None else out + bias.to(x.dtype)


def _split(x: Tensor, heads: int, D: int, how: str) -> Tensor:
    B, T, _ = x.shape
    if how == "rows":  # view as [B,H,T,D] without a transpose
        return x.reshape(B, heads, T, D)
    return x.reshape(B, T, heads, D).transpose(1, 2)


def _spread(x: Tensor, times: int, how: str) -> Tensor:
    """Key/value heads for query heads: each for adjacent ones, or all of them again and again."""
    B, G, T, D = x.shape
    if how == "tiled":
        return x.repeat(1, times, 1, 1)
    return x[:, :, None].expand(B, G, times, T, D).reshape(B, G * times, T, D)


def _factor(how: str, D: int, M: int, scale: float | None) -> float:
    right = D**-0.5 if scale is None else scale
    return {"none": 1.0, "twice": right * right, "model_dim": M**-0.5, "inverted": 1 / right}.get(
        how, right
    )


def _mask(keep: Tensor, how: str, window: int | None) -> Tensor:
    """Which pairs are shown."""
    T = keep.shape[0]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    wide = T if window is None else window
    found = {
        "inverted": ~keep, "own-hidden": keep & (i != j), "next-seen": keep | (j == i + 1),
        "unmasked": torch.ones_like(keep), "one-more": keep | (i - j == wide),
        "one-less": keep & (i - j != wide - 1),
    }  # fmt: skip
    return found.get(how, keep)


def _pattern(scores: Tensor, keep: Tensor, steps: Steps) -> Tensor:
    """Weights from scores [B,H,T,S]; a row that sees nothing is even, as -1e9 makes it."""
    axis = {"queries": -2, "heads": 1}.get(steps.softmax, -1)
    if steps.mask == "zeroed":  # hidden scores become 0 instead of -inf
        return torch.softmax(scores.masked_fill(~keep, 0.0), axis)
    if steps.mask == "after":  # weights are hidden behind the softmax
        return torch.softmax(scores, axis).masked_fill(~keep, 0.0)
    if steps.softmax == "absent":
        return scores.masked_fill(~keep, 0.0)
    return torch.softmax(
        scores.masked_fill(~keep, -1e9 if scores.dtype != torch.float16 else -6e4), axis
    )


def _rotated(q: Tensor, k: Tensor, v: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    if steps.rotary == "none":
        return q, k, v
    what, _, layout = steps.rotary.rpartition("-")
    if steps.rotary in ("mixed", "mixed-back"):
        what, layout = "", steps.rotary
    axis = 1 if what == "heads" else 2
    turned = rotated(q, steps.base, layout, axis)
    if what == "queries":
        return turned, k, v
    values = rotated(v, steps.base, layout, axis) if what == "values" else v
    return turned, rotated(k, steps.base, layout, axis), values


def rotated(x: Tensor, base: float, layout: str, axis: int) -> Tensor:
    """x cos + turn(x) sin, with positions along the axis; mixed layouts take one half of each convention.

    >>> rotated(torch.ones(1, 1, 2, 4), 10000.0, "half", 2)[0, 0, 0]
    tensor([1., 1., 1., 1.])
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError("rotary needs an even head dim")
    inv = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(x.shape[axis], dtype=torch.float64)[:, None] * inv
    paired = layout in ("interleaved", "mixed")
    angles = angles.repeat_interleave(2, -1) if paired else torch.cat([angles, angles], -1)
    if axis == 1:
        angles = angles[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turn_paired = layout in ("interleaved", "mixed-back")
    if turn_paired:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * cos + turned * sin
