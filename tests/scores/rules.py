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


def _relu(power: float) -> Callable[[list[Tensor]], list[Tensor]]:
    def weights(row: list[Tensor]) -> list[Tensor]:
        return [s**power / len(row) if s > 0 else s * 0 for s in row]

    return weights


def _softpick(row: list[Tensor]) -> list[Tensor]:
    low = max(0.0, max(s.item() for s in row))  # a common factor, so that no exponential overflows
    sizes = [torch.exp(s - low) - math.exp(-low) for s in row]
    total = torch.stack([abs(x) for x in sizes]).sum()
    return [x / total if x > 0 else x * 0 for x in sizes]


def _entmax(alpha: float) -> Callable[[list[Tensor]], list[Tensor]]:
    """The threshold by trying every number of kept keys, as the definition has it."""

    def weights(row: list[Tensor]) -> list[Tensor]:
        z = [(alpha - 1) * s for s in row]
        for n in range(len(z), 0, -1):
            kept = sorted(range(len(z)), key=lambda i: -z[i].item())[:n]
            mean = torch.stack([z[i] for i in kept]).sum() / n
            if alpha == 2:
                tau = mean - 1 / n
            else:
                rest = 1 - torch.stack([(z[i] - mean) ** 2 for i in kept]).sum()
                if rest <= 0:
                    continue
                tau = mean - torch.sqrt(rest / n)
            if all(z[i] > tau for i in kept):
                return [
                    (z[i] - tau) ** (1 / (alpha - 1)) if i in kept else z[i] * 0
                    for i in range(len(z))
                ]
        raise AssertionError("one key can always be kept")

    return weights


def _signed(row: list[Tensor]) -> list[Tensor]:
    largest = max(abs(s.item()) for s in row)
    sizes = [torch.exp(abs(s) - largest) for s in row]
    total = torch.stack(sizes).sum()
    return [x / total if s > 0 else -x / total for s, x in zip(row, sizes, strict=True)]


def _stick(row: list[Tensor]) -> list[Tensor]:
    left, weights = torch.ones_like(row[0]), []
    for s in row:  # from the nearest key on
        share = 1 / (1 + torch.exp(-s))
        weights.append(left * share)
        left = left * (1 - share)
    return weights


def _scalable(a: Tensor) -> Meant:
    return Meant(scores.ScalableSoftmax(a), Steps(scalable=lambda h: a[h]), (a,))


MADE: dict[str, tuple[Callable[..., Meant], tuple[tuple[int, ...], ...]]] = {
    "fn": (_fn, ((H,),)),
    "wave": (_wave, ()),
    "clamp": (lambda: Meant(scores.SoftClamp(1.5), Steps((_clamp,))), ()),
    "number": (lambda: Meant(scores.Temperature(0.5), Steps((lambda s, *_: s / 0.5,))), ()),
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
    "before": (lambda w: Meant(scores.TalkingHeads(before=w), Steps(before=w), (w,)), ((H, H),)),
    "after": (lambda w: Meant(scores.TalkingHeads(after=w), Steps(after=w), (w,)), ((H, H),)),
    "talking": (_talking, ((H, H), (H, H))),
    "cope": (lambda e: Meant(scores.CoPE(e), Steps(cope=e), (e,)), ((3, D),)),
    "cope-by-head": (lambda e: Meant(scores.CoPE(e), Steps(cope=e), (e,)), ((H, 5, D),)),
    "top": (lambda: Meant(scores.TopK(2), Steps(top=2)), ()),
    "sigmoid": (lambda: Meant(scores.Sigmoid(), Steps(sigmoid=lambda h, n: -math.log(n))), ()),
    "sigmoid-by-head": (
        lambda b: Meant(scores.Sigmoid(b), Steps(sigmoid=lambda h, n: b[h]), (b,)),
        ((H,),),
    ),
    "relu": (lambda: Meant(scores.ReLU(), Steps(normalize=_relu(1))), ()),
    "relu-squared": (lambda: Meant(scores.ReLU(2.0), Steps(normalize=_relu(2))), ()),
    "softpick": (lambda: Meant(scores.Softpick(), Steps(normalize=_softpick)), ()),
    "sparsemax": (lambda: Meant(scores.Entmax(2.0), Steps(normalize=_entmax(2.0))), ()),
    "entmax": (lambda: Meant(scores.Entmax(), Steps(normalize=_entmax(1.5))), ()),
    "signed": (lambda: Meant(scores.SignedSoftmax(), Steps(normalize=_signed)), ()),
    "stick": (lambda: Meant(scores.StickBreaking(), Steps(normalize=_stick)), ()),
    "scalable": (lambda: Meant(scores.ScalableSoftmax(0.43), Steps(scalable=lambda h: 0.43)), ()),
    "scalable-by-head": (_scalable, ((H,),)),
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
