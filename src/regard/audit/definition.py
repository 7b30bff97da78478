"""Attention from its definition, with every place where code goes wrong made explicit: right, or
wrong in a named way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from regard.audit.subject import Map, Projections


@dataclass(frozen=True)
class Steps:
    """One way to compute attention: each field is a step, and its default is right.

    >>> Steps(scale="none").wrong
    ('scale',)
    """

    roles: str = "named"
    rotary: str = "none"
    base: float = 10000.0
    part: int = 1
    scale: str = "head_dim"
    factor: float = 0.0
    bias: str = "none"
    sink: str = "right"
    groups: str = "adjacent"
    mask: str = "right"
    softmax: str = "keys"
    split: str = "heads"
    join: str = "heads"
    output: str = "mapped"

    @property
    def wrong(self) -> tuple[str, ...]:
        """The fields that are not right."""
        return tuple(
            f.name
            for f in fields(self)
            if f.name in WRONG and getattr(self, f.name) in WRONG[f.name]
        )


RIGHT_ROTARY = ("none", "half", "interleaved")
PARTS = (2, 4)
"""A rotary may turn the first half of a head, or the first quarter."""
WRONG: dict[str, tuple[str, ...]] = {
    "roles": ("keys-values", "queries-keys", "queries-values"),
    "rotary": (
        "mixed",
        "mixed-back",
        "each-half",
        "each-interleaved",
        "heads-half",
        "heads-interleaved",
        "values-half",
        "values-interleaved",
        "queries-half",
        "queries-interleaved",
        "apart-half",
        "apart-interleaved",
    ),
    "scale": ("none", "twice", "model_dim", "length", "inverted", "fitted"),
    "bias": ("alibi-grows", "given-back"),
    "sink": ("renormalised",),
    "groups": ("tiled",),
    "softmax": ("queries", "heads", "absent", "linear", "unnormalised", "sigmoid", "uniform"),
    "mask": (
        "inverted",
        "own-hidden",
        "own-hidden-first",
        "own-hidden-zero",
        "next-seen",
        "one-more",
        "one-less",
        "unmasked",
        "zeroed",
        "after",
    ),
    "split": ("rows",),
    "join": ("rows",),
    "output": ("absent",),
}
"""Field -> the values that are faults."""


@dataclass
class Given:
    """What one evaluation of the definition is given, and what it has computed already for other
    steps.

    Attributes:
        x: tokens [B,T,M].
        maps: weights; converted to the dtype of x.
        keep: bool [T,T], the right mask.
        scale: the right scale, or None for 1/sqrt(D).
        window: W, where the mask has one.
        bias: a bias [1,H,T,T] that the code was given, or None.
        rounded: whether rotary angles are computed in float32, as most code does.
        softcap: c of c tanh(scores / c), or None.
    """

    x: Tensor
    maps: Projections
    keep: Tensor
    scale: float | None = None
    window: int | None = None
    bias: Tensor | None = None
    rounded: bool = False
    softcap: float | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, computed once for each key."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def attend(given: Given, steps: Steps) -> Tensor:
    """Self-attention of x [B,T,M] by these steps -> [B,T,M], in the dtype of x.

    q, k, v = heads of x Wq, x Wk, x Wv;  out = join(softmax(mask(scale(q k^T) + bias)) v) Wo
    """
    products, v = qk(given, steps)
    scores = products * factor(given, steps)
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    bias = _bias(given, steps)
    if bias is not None:
        scores = scores + bias
    z = _pattern(scores, given, steps) @ v
    return finished(given, steps, z)


def qk(given: Given, steps: Steps) -> tuple[Tensor, Tensor]:
    """Products q k^T [B,H,T,T] before the scale, and v [B,H,T,D]."""
    key = (steps.roles, steps.rotary, steps.base, steps.part, steps.split, steps.groups)

    def make() -> tuple[Tensor, Tensor]:
        q, k, v = _heads(given, steps)
        return q @ k.transpose(-1, -2), v

    found: tuple[Tensor, Tensor] = given._once(("qk", key), make)
    return found


def _heads(given: Given, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,H,T,D], k and v as many heads."""
    maps = given.maps
    H, G, D = maps.heads, maps.groups, maps.head_dim

    def split() -> tuple[Tensor, ...]:
        made = ((maps.q, H), (maps.k, G), (maps.v, G))
        return tuple(_split(_linear(given.x, m), n, D, steps.split) for m, n in made)

    q, k, v = given._once(("split", steps.split), split)
    if steps.roles == "keys-values":
        k, v = v, k
    elif steps.roles == "queries-keys":
        q, k = k, q
    elif steps.roles == "queries-values":
        q, v = v, q
    q, k, v = _rotated(q, k, v, steps, rounded=given.rounded)
    if G != H:
        k, v = (_spread(t, H // G, steps.groups) for t in (k, v))
    return q, k, v


def finished(given: Given, steps: Steps, z: Tensor) -> Tensor:
    """Heads z [B,H,T,D] joined and mapped to the output [B,T,M]."""
    B, H, T, D = z.shape
    joined = (z if steps.join == "rows" else z.transpose(1, 2)).reshape(B, T, H * D)
    maps = given.maps
    if maps.o is None or steps.output == "absent":
        return joined
    out = _linear(joined, maps.o)
    if maps.norm is None:
        return out
    weight, bias, eps = maps.norm
    both = (out + given.x, (given.x.shape[-1],), weight.to(out.dtype), bias.to(out.dtype), eps)
    return torch.nn.functional.layer_norm(*both)


def factor(given: Given, steps: Steps) -> float:
    """What the products are multiplied by."""
    D, M = given.maps.head_dim, given.x.shape[-1]
    right = D**-0.5 if given.scale is None else given.scale
    found = {
        "none": 1.0,
        "twice": right * right,
        "model_dim": M**-0.5,
        "length": given.x.shape[1] ** -0.5,
        "inverted": 1 / right,
        "fitted": steps.factor,
    }
    scale: float = found.get(steps.scale, right)
    return scale


def slopes(H: int) -> Tensor:
    """The slopes of ALiBi for H heads, as its paper gives them: a geometric series, interleaved
    where H is no power of 2.

    >>> slopes(2)
    tensor([0.0625, 0.0039], dtype=torch.float64)
    """

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    near = 2 ** (H.bit_length() - 1)
    found = series(near) + series(2 * near)[::2][: H - near]
    return torch.tensor(found, dtype=torch.float64)


def alibi(H: int, T: int) -> Tensor:
    """-slope * distance, [1,H,T,T]."""
    i = torch.arange(T, dtype=torch.float64)
    return -slopes(H)[None, :, None, None] * (i[:, None] - i).abs()


def _bias(given: Given, steps: Steps) -> Tensor | None:
    if steps.bias in ("alibi", "alibi-grows"):
        made: Tensor = given._once("alibi", lambda: alibi(given.maps.heads, given.x.shape[1]))
        return (made if steps.bias == "alibi" else -made).to(given.x.dtype)
    if given.bias is None:
        return None
    return given.bias.to(given.x.dtype) * (-1 if steps.bias == "given-back" else 1)


def _linear(x: Tensor, weights: Map) -> Tensor:
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


def _mask(given: Given, how: str) -> Tensor:
    """Which pairs are shown."""
    keep = given.keep
    T = keep.shape[0]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    wide = T if given.window is None else given.window
    found = {
        "inverted": ~keep,
        "own-hidden": keep & (i != j),
        "next-seen": keep | (j == i + 1),
        "own-hidden-first": keep & ((i != j) | (i == 0)),
        "own-hidden-zero": keep & (i != j),
        "unmasked": torch.ones_like(keep),
        "one-more": keep | (i - j == wide),
        "one-less": keep & (i - j != wide - 1),
    }
    return found.get(how, keep)


def _pattern(scores: Tensor, given: Given, steps: Steps) -> Tensor:
    """Weights from scores [B,H,T,S]; a row that sees nothing is even, as -1e9 makes it."""
    keep: Tensor = given._once(("mask", steps.mask), lambda: _mask(given, steps.mask))
    axis = {"queries": -2, "heads": 1}.get(steps.softmax, -1)
    if steps.mask == "zeroed":  # hidden scores become 0 instead of -inf
        return torch.softmax(scores.masked_fill(~keep, 0.0), axis)
    if steps.mask == "after":  # weights are hidden behind the softmax
        return torch.softmax(scores, axis).masked_fill(~keep, 0.0)
    if steps.softmax in NOT_SOFTMAX:
        return NOT_SOFTMAX[steps.softmax](scores, keep)
    low = -1e9 if scores.dtype != torch.float16 else -6e4
    hidden = scores.masked_fill(~keep, low)
    if given.maps.sinks is not None:
        hidden = torch.cat([hidden, _sinks(given, scores)], -1)
        weights = torch.softmax(hidden, -1)[..., :-1]
        renormalised = steps.sink == "renormalised"
        return weights / weights.sum(-1, keepdim=True) if renormalised else weights
    weights = torch.softmax(hidden, axis)
    return weights.masked_fill(~keep, 0.0) if steps.mask == "own-hidden-zero" else weights


def _sinks(given: Given, scores: Tensor) -> Tensor:
    assert given.maps.sinks is not None  # those who call it looked
    B, H, T, _ = scores.shape
    return given.maps.sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)


def _linearly(scores: Tensor, keep: Tensor) -> Tensor:
    shown = scores.masked_fill(~keep, 0.0)
    return shown / shown.sum(-1, keepdim=True)


def _exponentials(scores: Tensor, keep: Tensor) -> Tensor:
    shown = scores.masked_fill(~keep, -torch.inf)
    return torch.exp(shown - shown.amax(-1, keepdim=True))


def _evenly(scores: Tensor, keep: Tensor) -> Tensor:
    shown = keep.to(scores.dtype).expand_as(scores)
    return shown / shown.sum(-1, keepdim=True)


NOT_SOFTMAX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "absent": lambda scores, keep: scores.masked_fill(~keep, 0.0),
    "linear": _linearly,
    "unnormalised": _exponentials,
    "sigmoid": lambda scores, keep: torch.sigmoid(scores).masked_fill(~keep, 0.0),
    "uniform": _evenly,
}
"""What stands in the place of a softmax."""


def _rotated(
    q: Tensor, k: Tensor, v: Tensor, steps: Steps, *, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if steps.rotary == "none":
        return q, k, v
    what, _, layout = steps.rotary.rpartition("-")
    if steps.rotary in ("mixed", "mixed-back"):
        what, layout = "", steps.rotary
    axis = 1 if what == "heads" else 2

    def turn(x: Tensor, how: str = layout, sign: int = 1) -> Tensor:
        n = x.shape[-1] // steps.part
        turned = rotated(x[..., :n], steps.base, how, axis, sign, rounded=rounded)
        return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], -1)

    if what == "queries":
        return turn(q), k, v
    if what == "each":  # a layout for queries, the other one for keys
        return turn(q), turn(k, "interleaved" if layout == "half" else "half"), v
    if what == "apart":  # keys turn the other way round
        return turn(q), turn(k, sign=-1), v
    return turn(q), turn(k), turn(v) if what == "values" else v


def rotated(
    x: Tensor, base: float, layout: str, axis: int, sign: int = 1, *, rounded: bool = False
) -> Tensor:
    """x cos + turn(x) sin, with positions along the axis; mixed layouts take one half of each
    convention.

    >>> rotated(torch.ones(1, 1, 2, 4), 10000.0, "half", 2)[0, 0, 0]
    tensor([1., 1., 1., 1.])
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError("rotary needs an even head dim")
    precise = torch.float32 if rounded else torch.float64
    inv = base ** (-torch.arange(0, D, 2, dtype=precise) / D)
    angles = sign * torch.arange(x.shape[axis], dtype=precise)[:, None] * inv
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
