"""Which steps reproduce an output: the fewest faults that do, held by the error rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from regard.audit.definition import PARTS, RIGHT_ROTARY, WRONG, Given, Steps, attend
from regard.audit.probe import Probe, gap
from regard.audit.subject import CannotTry, Projections

LENGTH = 5
EXACT = 1e-9
"""Two computations in float64 differ by less, in units of the largest number."""
PAIRED = {
    "rotary": (
        "mixed",
        "mixed-back",
        "heads-half",
        "heads-interleaved",
        "values-half",
        "values-interleaved",
    ),
    "scale": ("none", "twice", "model_dim", "inverted"),
    "groups": ("tiled",),
    "mask": (
        "inverted",
        "own-hidden",
        "next-seen",
        "one-more",
        "one-less",
        "unmasked",
        "zeroed",
        "after",
    ),
    "softmax": ("queries", "heads", "absent"),
    "split": ("rows",),
    "join": ("rows",),
}
"""The faults that are looked for in pairs, too: those that go together in practice."""


@dataclass
class Reading:
    """One way to read the code: which map is which, and whether it is meant to be causal.

    Attributes:
        maps: the projections.
        causal: whether later keys are hidden.
        standard: whether faults are looked for under it; the other readings are tried as right ones
            only.
    """

    maps: Projections
    causal: bool
    standard: bool


class Search:
    """What the code gave for two lengths, against the definition under every reading."""

    def __init__(self, probe: Probe, T: int = LENGTH) -> None:
        self.probe, self.window = probe, probe.subject.claim.window
        self.readings = list(_readings(probe))
        self.asked = [self._ask(n) for n in (T, T + 2)]
        if not all(bool(out.isfinite().all()) for _, out in self.asked):
            raise CannotTry("its output is not finite")
        self.exact: dict[int, Tensor] = {}
        self.memo: dict[tuple[int, bool, int, torch.dtype, int], Given] = {}

    def _ask(self, n: int) -> tuple[Tensor, Tensor]:
        # scores that are far from even, and do not saturate
        x = self.probe.inputs(2, n, turn=3) * 1.5
        return x, self.probe.ask(x).out

    def given(self, reading: Reading, x: Tensor, dtype: torch.dtype, turn: int = 0) -> Given:
        """What the definition is given for tokens x; equal questions share what they compute."""
        key = (id(reading.maps), reading.causal, x.shape[1], dtype, turn)
        if key not in self.memo:
            self.memo[key] = given(self.probe, reading, x, dtype)
        return self.memo[key]

    def fits(self, reading: Reading, steps: Steps) -> bool:
        """Whether the steps give both outputs: by the error rule, or, of faults, in float64."""
        if all(self._one(reading, steps, x, out) for x, out in self.asked):
            return True
        return bool(steps.wrong) and all(self._exactly(reading, steps, n) for n in range(2))

    def _exactly(self, reading: Reading, steps: Steps, n: int) -> bool:
        """Whether the steps give the output of the code in float64: a fault may make rounding
        large.
        """
        if self.probe.wide is None:
            return False
        x, _ = self.asked[n]
        ref = attend(self.given(reading, x, torch.float64), steps)
        if n not in self.exact:
            self.exact[n] = self.probe.ask(x, subject=self.probe.wide).out
        out = self.exact[n]
        return out.shape == ref.shape and float((out - ref).abs().max()) <= EXACT * float(
            ref.abs().max()
        )

    def _one(self, reading: Reading, steps: Steps, x: Tensor, out: Tensor) -> bool:
        ref = attend(self.given(reading, x, torch.float64), steps)
        if ref.shape != out.shape:
            return False
        # far off: no need for the plain computations, which cost as much again
        near = 1e-2 * float(ref.abs().max()) + 1e-3
        if out.dtype == torch.float32 and not float((out.double() - ref).abs().max()) <= near:
            return False
        return gap(out, plains(self.probe, reading, steps, x), ref) is None

    def error(self, reading: Reading, steps: Steps) -> float:
        """How far the first output is from these steps."""
        x, out = self.asked[0]
        ref = attend(self.given(reading, x, torch.float64), steps)
        return float((out.double() - ref).abs().max()) if ref.shape == out.shape else torch.inf

    def found(self) -> tuple[Reading, Steps] | None:
        """The fewest faults that reproduce the output: none, one, another scale, or two."""
        known = self.probe.notes.get("steps")
        for n in range(3):
            for reading in self.readings:
                for steps in self._candidates(reading, n):
                    if (known is None or _within(steps, known)) and self.fits(reading, steps):
                        return reading, steps
            if n == 1 and (known is None or known.scale == "fitted"):
                fitted = self.fitted(known)
                if fitted is not None:
                    return fitted
        return None

    def _candidates(self, reading: Reading, n: int) -> tuple[Steps, ...]:
        if n and not reading.standard:
            return ()
        maps = reading.maps
        return candidates(
            maps.heads,
            maps.groups,
            maps.head_dim,
            maps.bases,
            n,
            windowed=self.window is not None,
            named=maps.named,
            sinks=maps.sinks is not None,
            mapped=maps.o is not None,
            biased=self.probe.subject.bias(2) is not None,
        )

    def fitted(self, known: Steps | None) -> tuple[Reading, Steps] | None:
        """Right steps with another scale: the number that reproduces both outputs."""
        for reading in self.readings:
            for steps in self._candidates(reading, 0) if reading.standard else ():
                tried = replace(steps, scale="fitted")
                right = reading.maps.head_dim**-0.5
                factor = known.factor if known is not None else self._factor(reading, tried, right)
                if self.fits(reading, replace(tried, factor=factor)):
                    return reading, replace(tried, factor=factor)
        return None

    def _factor(self, reading: Reading, steps: Steps, right: float) -> float:
        """The scale that comes nearest: a grid of powers, then golden sections around its best."""

        def off(power: float) -> float:
            return self.error(reading, replace(steps, factor=right * 2.0**power))

        grid = [n / 2 for n in range(-16, 17)]
        best = min(grid, key=off)
        low, high = best - 0.5, best + 0.5
        ratio = (5**0.5 - 1) / 2
        for _ in range(56):
            a, b = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (low, b) if off(a) < off(b) else (a, high)
        return right * math.pow(2, (low + high) / 2)

    def rights(self, reading: Reading) -> tuple[Steps, ...]:
        """The steps without a fault."""
        return self._candidates(reading, 0)

    def nearest(self) -> tuple[Reading, Steps]:
        """The right steps that come nearest."""
        both = [
            (reading, steps) for reading in self.readings for steps in self._candidates(reading, 0)
        ]
        return min(both, key=lambda each: self.error(*each))


def given(probe: Probe, reading: Reading, x: Tensor, dtype: torch.dtype) -> Given:
    """What the definition is given for tokens x in this dtype."""
    claim, T = probe.subject.claim, x.shape[1]
    declared = probe.subject.shown(T)
    keep = probe.pattern(T, T, causal=reading.causal) if declared is None else declared
    bias = probe.subject.bias(T)
    softcap = probe.notes.get("softcap")
    return Given(x.to(dtype), reading.maps, keep, claim.scale, claim.window, bias, softcap=softcap)


def plains(probe: Probe, reading: Reading, steps: Steps, x: Tensor) -> list[Tensor]:
    """Plain computations of equal standing: on x, on its rows in another order, and with angles in
    float32.
    """
    dtype = probe.subject.dtype
    found = [attend(given(probe, reading, x, dtype), steps)]
    found.append(attend(given(probe, reading, x.flip(0), dtype), steps).flip(0))
    if steps.rotary != "none":
        found.append(attend(replace(given(probe, reading, x, dtype), rounded=True), steps))
    return found


def _readings(probe: Probe) -> Iterator[Reading]:
    """Every reading of the maps; where nothing is claimed, of causal code, too."""
    meant = {probe.causal, True} if probe.subject.claim.causal is None else {probe.causal}
    for maps in probe.subject.projections():
        for causal in sorted(meant):
            yield Reading(maps, causal, standard=maps.standard)


def _within(steps: Steps, known: Steps) -> bool:
    """Whether the faults are among those that explained a larger example."""
    return all(getattr(steps, f) == getattr(known, f) for f in steps.wrong)


@cache
def candidates(
    heads: int,
    groups: int,
    head_dim: int,
    bases: tuple[float, ...],
    n: int,
    *,
    windowed: bool = False,
    named: bool = True,
    sinks: bool = False,
    mapped: bool = True,
    biased: bool = False,
) -> tuple[Steps, ...]:
    """Steps with n faults; under each, every rotary and bias that may be meant."""
    rights = list(_rights(head_dim, bases))
    allowed = {
        "windowed": windowed,
        "named": named,
        "sinks": sinks,
        "mapped": mapped,
        "biased": biased,
    }
    table = PAIRED if n > 1 else WRONG
    faults = [
        (name, value)
        for name, values in table.items()
        for value in values
        if _sensible(name, value, heads, groups, head_dim)
        and all(allowed[need] for need in _NEEDS.get(value, _NEEDS.get(name, ())))
    ]
    found = []
    for chosen in combinations(faults, n):
        changes: dict[str, Any] = dict(chosen)
        if len(changes) < n:  # two faults of one step
            continue
        under = rights
        if n > 1:  # a rotary of part of a head, and ALiBi, are looked for with one fault only
            under = [r for r in rights if r.part == 1 and r.bias == "none"]
        if "rotary" in changes:
            under = list(
                dict.fromkeys(Steps(base=r.base, part=r.part) for r in under if r.rotary != "none")
            )
        if "bias" in changes:
            under = [Steps()]
        found += [replace(right, **changes) for right in under]
    return tuple(found)


_NEEDS: dict[str, tuple[str, ...]] = {
    "one-more": ("windowed",),
    "one-less": ("windowed",),
    "roles": ("named",),
    "sink": ("sinks",),
    "output": ("mapped",),
    "given-back": ("biased",),
}


def _rights(head_dim: int, bases: tuple[float, ...]) -> Iterator[Steps]:
    """Steps with no fault."""
    yield Steps()
    parts = [n for n in (1, *PARTS) if head_dim % (2 * n) == 0]
    for layout in RIGHT_ROTARY[1:]:
        yield from (Steps(rotary=layout, base=b, part=n) for n in parts for b in bases)
    yield Steps(bias="alibi")


def _sensible(name: str, value: str, heads: int, groups: int, head_dim: int) -> bool:
    """Whether the fault changes anything for these sizes."""
    if value == "fitted":
        return False
    if name == "roles":
        return value == "keys-values" or groups == heads
    if name == "groups":
        return 1 < groups < heads
    if name in ("split", "join") or value == "heads":
        return heads > 1
    if name == "rotary":
        mixes = "mixed" in value or value.startswith("each")
        return head_dim % 2 == 0 and (head_dim > 2 or not mixes)
    return True
