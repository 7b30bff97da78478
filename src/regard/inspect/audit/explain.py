"""Which steps reproduce an output? The fewest faults that do, held by the error rule."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.inspect.audit.definition import RIGHT_ROTARY, WRONG, Steps, attend
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.rule import gap
from regard.inspect.audit.subject import CannotTry, Projections

MOST_FAULTS = 2
LENGTH = 5


class Explanation(NamedTuple):
    """Steps that give what the code gives, and what the right ones would have given where it differs most."""

    steps: Steps
    example: dict[str, int]
    expected: float
    got: float


def explain(probe: Probe, T: int = LENGTH) -> Explanation:
    """The fewest faults that reproduce the output on two lengths; where nothing is claimed, of causal code, too.

    Raises:
        CannotTry: the maps of the code are not known, or no steps reproduce it: it does something else besides.
    """
    maps = probe.subject.projections()
    if maps is None:
        raise CannotTry(
            "its projections have no names that are known (q_proj k_proj v_proj o_proj, c_attn, in_proj_weight, ...)"
        )
    asked = [(x, probe.ask(x).out) for x in (_inputs(probe, n) for n in (T, T + 2))]
    if not all(bool(out.isfinite().all()) for _, out in asked):
        raise CannotTry("its output is not finite")
    meant = {probe.causal, True} if probe.subject.claim.causal is None else {probe.causal}
    for causal in sorted(meant):
        judged = copy(probe)
        judged.causal = causal
        known = probe.notes.get("steps")
        for steps in candidates(maps, window=probe.subject.claim.window):
            if (known is None or _within(steps, known)) and all(
                fits(judged, maps, steps, x, out) for x, out in asked
            ):
                probe.notes["steps"] = steps
                return _told(judged, maps, steps, *asked[0])
    raise CannotTry(
        "its projections were read, and no plain attention with them reproduces its output: it has other steps, "
        "such as a norm, a gate or a bias"
    )


def _within(steps: Steps, known: Steps) -> bool:
    """Whether the faults are among those that explained a larger example."""
    return all(getattr(steps, f) == getattr(known, f) for f in steps.wrong)


def candidates(maps: Projections, window: int | None) -> tuple[Steps, ...]:
    """Steps with no fault, then with one, then with two; under each, every rotary that may be meant."""
    return _candidates(
        maps.heads, maps.groups, maps.head_dim, maps.bases, windowed=window is not None
    )


@cache
def _candidates(
    heads: int, groups: int, head_dim: int, bases: tuple[float, ...], *, windowed: bool
) -> tuple[Steps, ...]:
    layouts = RIGHT_ROTARY if head_dim % 2 == 0 else RIGHT_ROTARY[:1]
    rights = [
        Steps(rotary=r, base=b) for r in layouts for b in (bases if r != "none" else bases[:1])
    ]
    faults = [
        (name, value)
        for name, values in WRONG.items()
        for value in values
        if _sensible(name, value, heads, groups, head_dim) and (windowed or value not in _WINDOWED)
    ]
    found = []
    for n in range(MOST_FAULTS + 1):
        for chosen in combinations(faults, n):
            changes: dict[str, Any] = dict(chosen)
            if len(changes) < n:  # two faults of one step
                continue
            turning = "rotary" in changes
            under = [Steps(base=b) for b in bases] if turning else rights
            found += [replace(right, **changes) for right in under]
    return tuple(found)


_WINDOWED = ("one-more", "one-less")


def _sensible(name: str, value: str, heads: int, groups: int, head_dim: int) -> bool:
    """Whether the fault changes anything for these sizes."""
    if name == "groups":
        return 1 < groups < heads
    if name in ("split", "join") or value == "heads":
        return heads > 1
    if name == "rotary":
        return head_dim % 2 == 0 and (head_dim > 2 or "mixed" not in value)
    return True


def fits(probe: Probe, maps: Projections, steps: Steps, x: Tensor, out: Tensor) -> bool:
    """Whether the steps give this output, by the error rule."""
    ref = _run(probe, maps, steps, x, torch.float64)
    if ref.shape != out.shape:
        return False
    # far off: no need for the plain computation, which costs as much again
    if (
        float((out.double() - ref).abs().max()) > 1e-2 * float(ref.abs().max()) + 1e-3
        and out.dtype == torch.float32
    ):
        return False
    plains = [_run(probe, maps, steps, y, probe.subject.dtype) for y in (x, x.flip(0))]
    return gap(out, [plains[0], plains[1].flip(0)], ref) is None


def _run(probe: Probe, maps: Projections, steps: Steps, x: Tensor, dtype: torch.dtype) -> Tensor:
    claim, T = probe.subject.claim, x.shape[1]
    return attend(x.to(dtype), maps, steps, probe.pattern(T, T), claim.scale, claim.window)


def _inputs(probe: Probe, T: int) -> Tensor:
    return probe.inputs(2, T, turn=3) * 1.5  # scores that are far from even, and do not saturate


def _told(probe: Probe, maps: Projections, steps: Steps, x: Tensor, out: Tensor) -> Explanation:
    """Where the output is furthest from what the right steps give."""
    mended: dict[str, Any] = {name: _right(name, steps) for name in steps.wrong}
    right = replace(steps, **mended)
    ref = _run(probe, maps, right, x, torch.float64)
    if steps.wrong and gap(out, [_run(probe, maps, right, x, out.dtype)], ref) is None:
        raise CannotTry(f"{x.shape[1]} tokens show no difference")
    error = (out.double() - ref).abs()
    b, t, c = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    example = {
        "T": x.shape[1],
        "row": b,
        "query": t,
        "feature": c,
        "heads": maps.heads,
        "head_dim": maps.head_dim,
    }
    return Explanation(steps, example, float(ref[b, t, c]), float(out[b, t, c]))


def _right(name: str, steps: Steps) -> str:
    if name != "rotary":
        return str(getattr(Steps(), name))
    return "interleaved" if steps.rotary.endswith(("interleaved", "mixed")) else "half"
