"""Score rules for tests: each with its meaning written a second time, as steps of the loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import scores
from regard.scores import ScoreRule
from tests.oracles.scores import Steps

H, D = 4, 4
"""The heads, and the head dimension, for which the rules are made."""


@dataclass
class Meant:
    """A rule, and what it means; `tensors` are in the order of `rule.tensors()`."""

    rule: ScoreRule
    steps: Steps
    tensors: tuple[Tensor, ...] = ()


def by_distance(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    # an integer times a Python number is float32, whatever the scores are
    return s + w[h] * s * s - 0.1 * (q - k).to(s.dtype) + 0.2 * b.to(s.dtype)


def wave(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q + k) % 3 == 0, torch.sin(s), s * 0.5 + h)


def _fn(w: Tensor) -> Meant:
    def pair(s, b, h, i, j):
        return s + w[h] * s * s - 0.1 * (i - j) + 0.2 * b

    return Meant(scores.FnScore(by_distance, (w,)), Steps((pair,)), (w,))


def _wave() -> Meant:
    def pair(s, b, h, i, j):
        return torch.sin(s) if (i + j) % 3 == 0 else s * 0.5 + h

    return Meant(scores.FnScore(wave), Steps((pair,)))


def _by_head(tau: Tensor) -> Meant:
    return Meant(scores.Temperature(tau), Steps((lambda s, b, h, i, j: s / tau[h],)), (tau,))


def _by_place(tau: Tensor) -> Meant:
    steps = Steps((lambda s, b, h, i, j: s / tau[h, max(i, 0)],))
    return Meant(scores.Temperature(tau), steps, (tau,))


def _clamp(s: Tensor, *_: object) -> Tensor:
    return 1.5 * torch.tanh(s / 1.5)


def _talking(before: Tensor, after: Tensor) -> Meant:
    rule = scores.TalkingHeads(before, after)
    return Meant(rule, Steps(before=before, after=after), (before, after))


def _long(tau: Tensor, before: Tensor, bias: Tensor, after: Tensor) -> Meant:
    rule = (
        scores.Temperature(tau)
        >> scores.TalkingHeads(before=before)
        >> scores.Sigmoid(bias)
        >> scores.TalkingHeads(after=after)
    )
    steps = Steps(
        (lambda s, b, h, i, j: s / tau[h],),
        before=before,
        sigmoid=lambda h, n: bias[h],
        after=after,
    )
    return Meant(rule, steps, (tau, before, bias, after))


MADE: dict[str, tuple[Callable[..., Meant], tuple[tuple[int, ...], ...]]] = {
    "fn": (_fn, ((H,),)),
    "wave": (_wave, ()),
    "clamp": (lambda: Meant(scores.SoftClamp(1.5), Steps((_clamp,))), ()),
    "number": (
        lambda: Meant(scores.Temperature(0.5), Steps((lambda s, *_: s / 0.5,))),
        (),
    ),
    "by-head": (_by_head, ((H,),)),
    "by-place": (_by_place, ((H, 200),)),
    "clamp-then-head": (
        lambda tau: Meant(
            scores.SoftClamp(1.5) >> scores.Temperature(tau),
            Steps((_clamp, lambda s, b, h, i, j: s / tau[h])),
            (tau,),
        ),
        ((H,),),
    ),
    "before": (
        lambda w: Meant(scores.TalkingHeads(before=w), Steps(before=w), (w,)),
        ((H, H),),
    ),
    "after": (lambda w: Meant(scores.TalkingHeads(after=w), Steps(after=w), (w,)), ((H, H),)),
    "talking": (_talking, ((H, H), (H, H))),
    "cope": (lambda e: Meant(scores.CoPE(e), Steps(cope=e), (e,)), ((3, D),)),
    "cope-by-head": (lambda e: Meant(scores.CoPE(e), Steps(cope=e), (e,)), ((H, 5, D),)),
    "top": (lambda: Meant(scores.TopK(2), Steps(top=2)), ()),
    "sigmoid": (
        lambda: Meant(scores.Sigmoid(), Steps(sigmoid=lambda h, n: -math.log(n))),
        (),
    ),
    "sigmoid-by-head": (
        lambda b: Meant(scores.Sigmoid(b), Steps(sigmoid=lambda h, n: b[h]), (b,)),
        ((H,),),
    ),
    "long": (_long, ((H,), (H, H), (H,), (H, H))),
}
"""For each rule how it is made from tensors, and their shapes."""

POSITIVE = ("by-head", "by-place", "clamp-then-head", "long")
"""Rules whose first tensor is a temperature."""


def tensors_for(name: str, seed: int) -> list[Tensor]:
    """The tensors of a rule in float64."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in MADE[name][1]]
    if name in POSITIVE:
        made[0] = made[0].abs() + 0.5
    return made


def make(name: str, tensors: list[Tensor]) -> Meant:
    """The rule of these tensors."""
    return MADE[name][0](*tensors)
