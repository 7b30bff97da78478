"""Known mistakes of attention kernels: which one would give exactly the numbers that were
recorded?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.evidence import Evidence, lse_of
from regard.masks import All, Mask
from regard.span import as_tensor


class Suspect(NamedTuple):
    """A mistake in words, and the scores that it would have made; a sink takes part in outputs as
    it should.
    """

    words: str
    scores: Callable[[Evidence], Tensor]


def explain_lse(every: list[Evidence], allowed: float) -> tuple[Suspect | None, str]:
    """The mistake that explains every recorded lse, and its words."""
    words = _of_the_number(every, allowed)
    if words is not None:
        return None, words
    for suspect in suspects(every):
        if all(_close(lse_of(suspect.scores(e)), e.lse, allowed) for e in every):
            return suspect, suspect.words
    return None, _first_wrong(every, allowed)


def explain_output(
    every: list[Evidence], allowed: float, wrong: Suspect | None
) -> tuple[bool, str]:
    """Whether the mistake of the lse explains the outputs as well; else, in words, one that
    does.
    """
    kept = [e for e in every if e.out is not None]

    def fits(suspect: Suspect) -> bool:
        return all(_gives(e, suspect.scores(e), e.step.sink, allowed) for e in kept)

    if wrong is not None and fits(wrong):
        return True, ""
    if all(bool((e.out == 0).all()) for e in kept if e.out is not None):
        return False, "the output is zero everywhere: it was not written"
    if any(e.step.sink is not None for e in kept) and all(
        _gives(e, _right(e), None, allowed) for e in kept
    ):
        return False, "the sink took no part in the output (the mass that is missing is P_sink)"
    for suspect in suspects(kept):
        if fits(suspect):
            return False, f"{suspect.words} in the output, though not in the lse"
    return (
        False,
        "the output is not the weighted sum of the values recorded: other values, or other weights",
    )


def suspects(every: list[Evidence]) -> Iterator[Suspect]:
    """Mistakes that these calls could show."""
    step = every[0].step
    D = step.q.shape[-1]
    scales = {
        "not applied": 1.0,
        "applied twice": step.scale**2,
        "1/D": 1 / D,
        "1/sqrt(D)": D**-0.5,
    }
    for words, scale in scales.items():
        if scale != step.scale:
            yield Suspect(
                f"the scale was {words} ({scale:.4g}, not {step.scale:.4g})", _scaled(scale)
            )
    if step.softcap is not None:
        yield Suspect("the softcap was not applied", lambda e: e.made.scores(e.step.scale, None))
    if step.bias is not None:
        yield Suspect("the bias was not added", lambda e: _with(e, bias=None))
    if step.sink is not None:
        yield Suspect("the sink is counted in the lse, which is without it", _with_sink)
    yield Suspect(
        "the mask was not applied: masked keys have mass",
        lambda e: _with(e, visible=torch.ones_like(e.made.visible)),
    )
    yield from _masks(step.mask)
    yield Suspect("the newest keys were not seen: the cache is stale", _older)
    fitted = _fitted_scale(every)
    if fitted is not None:
        yield Suspect(f"the scale was {fitted:.4g}, not {step.scale:.4g}", _scaled(fitted))


def _of_the_number(every: list[Evidence], allowed: float) -> str | None:
    """A mistake of the number itself: zero, another base, off by a constant."""
    got = torch.cat([e.lse.double().flatten() for e in every])
    true = torch.cat([e.true_lse.flatten() for e in every])
    seen = true.isfinite()
    got, true = got[seen], true[seen]
    if bool((got == 0).all()):
        return "the lse is 0 everywhere: it was not written"
    for words, c in (("a log of base 2", 1 / math.log(2)), ("multiplied by ln 2", math.log(2))):
        if float((got - c * true).abs().max()) <= 2 * allowed:
            return f"the lse is {c:.4g} times the natural one: {words}"
    apart = got - true
    d = float(apart.mean())
    if len(apart) > 1 and float((apart - d).abs().max()) <= 2 * allowed:
        ln2 = ", which is ln 2" * (abs(abs(d) - math.log(2)) <= 2 * allowed)
        return f"the lse is off by the constant {d:.4g}{ln2}"
    return None


def _masks(mask: Mask) -> Iterator[Suspect]:
    """A term of the mask that was not applied, or a window that was one off."""
    terms = mask.terms()
    for i, term in enumerate(terms):
        others = [x for n, x in enumerate(terms) if n != i]
        if others:
            rest = others[0] if len(others) == 1 else All(tuple(others))
            yield Suspect(f"the mask {term} was not applied", _masked(rest))
        for other in term.near_misses():
            both = reduce(lambda a, b: a & b, [*terms[:i], other, *terms[i + 1 :]])
            yield Suspect(f"{term} was taken as {other}", _masked(both))


def _right(e: Evidence) -> Tensor:
    return e.made.scores(e.step.scale, e.step.softcap)


def _with(e: Evidence, **change: Tensor | None) -> Tensor:
    return e.made._replace(**change).scores(e.step.scale, e.step.softcap)  # type: ignore[arg-type]


def _scaled(scale: float) -> Callable[[Evidence], Tensor]:
    return lambda e: e.made.scores(scale, e.step.softcap)


def _with_sink(e: Evidence) -> Tensor:
    """The scores, and the sink's as one key more, which an output would not have: it is for the
    lse.
    """
    s = _right(e)
    sink = e.step.sink
    assert sink is not None, "asked where there is one"
    return torch.cat([s, sink.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)


def _masked(mask: Mask) -> Callable[[Evidence], Tensor]:
    def scores(e: Evidence) -> Tensor:
        step = e.step
        rows = slice(e.own.start + step.first, e.own.stop + step.first)
        seen = mask.block(step.q_positions, step.k_positions, rows)
        seen = seen[:, list(e.place.heads)] if seen.shape[1] > 1 else seen
        return _with(e, visible=seen.expand(e.made.dot.shape))

    return scores


def _older(e: Evidence) -> Tensor:
    """Without the keys at the positions of the call's own queries, or behind."""
    asked = as_tensor(e.step.q_positions)
    first = torch.where(asked >= 0, asked, 1 << 62).amin(1)
    old = as_tensor(e.step.k_positions) < first[:, None]  # [b,s]
    return _with(e, visible=e.made.visible & old[:, None, None])


def _fitted_scale(every: list[Evidence]) -> float | None:
    """The scale that makes the lse of the row with the most to say right, by bisection; None where
    there is none.
    """
    e = every[-1]  # of several steps the one with the most keys
    apart = (e.true_lse - e.lse.double()).abs()
    at = apart.masked_fill(~apart.isfinite(), -1).argmax()
    row = torch.unravel_index(at, apart.shape)
    target = float(e.lse[row])
    made = e.made._replace(
        dot=e.made.dot[row],
        visible=e.made.visible[row],
        bias=None if e.made.bias is None else e.made.bias.expand(e.made.dot.shape)[row],
    )
    low, high = 0.0, 64 * abs(e.step.scale)

    def miss(c: float) -> float:
        return float(lse_of(made.scores(c, e.step.softcap))) - target

    if not miss(low) * miss(high) < 0:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if miss(low) * miss(middle) > 0 else (low, middle)
    return (
        None
        if math.isclose(low, abs(e.step.scale), rel_tol=1e-3)
        else math.copysign(low, e.step.scale)
    )


def _close(suspected: Tensor, got: Tensor, allowed: float) -> bool:
    """Scores of another size have other roundings: the bound grows with them."""
    got = got.double()
    seen = suspected.isfinite()
    if not torch.equal(seen, got.isfinite()):
        return False
    room = 2 * allowed * max(1.0, float(suspected[seen].abs().max()) if bool(seen.any()) else 1.0)
    return not bool(seen.any()) or float((suspected - got)[seen].abs().max()) <= room


def _gives(e: Evidence, s: Tensor, sink: Tensor | None, allowed: float) -> bool:
    if s.shape[-1] != e.made.dot.shape[-1]:
        return False
    out = e.output(s, sink)
    assert out is not None, "asked where it was kept"
    assert e.out is not None, "asked where it was kept"
    seen = out.isfinite()
    return not bool(seen.any()) or float((out - e.out.double())[seen].abs().max()) <= 2 * allowed


def _first_wrong(every: list[Evidence], allowed: float) -> str:
    """What is known where no mistake explains all."""
    for e in every:
        wrong = (e.true_lse - e.lse.double()).abs() > allowed
        if bool(wrong.any()):
            return (
                "q, k and the rule recorded are not what the kernel used, first in row "
                f"{e.row(wrong)}: "
                "stale or other keys, or another rule"
            )
    return "the lse is not that of the scores"
