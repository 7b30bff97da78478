"""Whether a call is a function of its input: two equal calls, calls in between, and the input after
the call.
"""

from __future__ import annotations

from functools import partial

import torch

from regard.audit.findings import Finding, finding
from regard.audit.probe import Probe
from regard.audit.subject import Subject, influence
from regard.process_state import seeded

CALLS = 6


def repeatable(probe: Probe, T: int = 8) -> list[Finding]:
    """Equal calls give equal bits; if not, equal seeds tell dropout from the rest."""
    x = probe.inputs(2, T)
    with seeded(None):
        outs = []
        for turn in range(CALLS):
            torch.manual_seed(turn)
            outs.append(probe.ask(x).out)
        torch.manual_seed(0)
        again = probe.ask(x).out
    off = [(out - outs[0]).abs() for out in outs]
    worst = max(off, key=lambda each: float(each.max()))
    if all(_same(out, outs[0]) for out in outs):
        return []
    at = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    other = next(out for out, each in zip(outs, off, strict=True) if each is worst)
    name, why = "dropout-in-eval", "the random seed alone changes the result, in evaluation mode"
    if not _same(again, outs[0]):
        fresh = [probe.ask(x, subject=probe.subject.at(probe.subject.dtype)).out for _ in range(2)]
        kept = _same(
            fresh[0], fresh[1]
        )  # copies that were never called agree: a call left something behind
        name = "state-kept" if kept else "not-repeatable"
        why = "a second call differs from the first" if kept else "equal calls differ"
    return [
        finding(
            name,
            f"For one input, {why}.",
            {"T": T, "output": list(at)},
            float(outs[0][at]),
            float(other[at]),
        )
    ]


def untouched(probe: Probe, T: int = 4) -> list[Finding]:
    """The input is what it was before the call."""
    x = probe.inputs(1, T).to(probe.subject.dtype) if _floats(probe) else probe.inputs(1, T)
    before = x.clone()
    inner = getattr(probe.subject, "between", None)
    if inner is not None:
        return _untouched_heads(probe, T)
    probe.ask(x)
    if torch.equal(before, x):
        return []
    at = tuple(int(i) for i in (before != x).nonzero()[0])
    return [
        finding(
            "input-changed",
            "The tokens are changed by the call.",
            {"T": T, "input": list(at)},
            float(before[at]),
            float(x[at]),
        )
    ]


def _untouched_heads(probe: Probe, T: int) -> list[Finding]:
    """The same for q, k and v of a function."""
    subject = probe.subject
    heads = subject._heads(probe.inputs(1, T).to(subject.dtype))  # type: ignore[attr-defined]
    before = [h.clone() for h in heads]
    keep = probe.pattern(T, T)[None] if probe.masked else None
    from regard.audit.subject import Ask

    subject.between(*heads, Ask(keep))  # type: ignore[attr-defined]
    for name, was, is_ in zip("qkv", before, heads, strict=True):
        if not torch.equal(was, is_):
            at = tuple(int(i) for i in (was != is_).nonzero()[0])
            return [
                finding(
                    "input-changed",
                    f"{name} is changed by the call.",
                    {"T": T, name: list(at)},
                    float(was[at]),
                    float(is_[at]),
                )
            ]
    return []


def stateless(probe: Probe, T: int = 5) -> list[Finding]:
    """Another call in between, of another length and batch, changes nothing."""
    x = probe.inputs(2, T)
    first = probe.ask(x).out
    probe.ask(probe.inputs(2, T, turn=1))
    probe.ask(probe.inputs(1, T + 3, turn=2))
    again = probe.ask(x).out
    if first.shape == again.shape and _same(first, again):
        return _lengths(probe, T)
    if first.shape != again.shape:
        return [
            finding(
                "state-kept",
                "The shape of the output changes.",
                {"T": T},
                str(tuple(first.shape)),
                str(tuple(again.shape)),
            )
        ]
    worst = (again - first).abs()
    at = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    sentence = "The same call gives another result after calls with other tokens."
    return [
        finding(
            "state-kept", sentence, {"T": T, "output": list(at)}, float(first[at]), float(again[at])
        )
    ]


def _answer(probe: Probe, subject: Subject, x: torch.Tensor) -> torch.Tensor:
    return probe.ask(x, subject=subject).out


def _lengths(probe: Probe, T: int) -> list[Finding]:
    """A call of another length gives what it gives to code that was never called: no mask is kept
    from the first.
    """
    n = T + 3
    used, fresh = (probe.subject.at(probe.subject.dtype) for _ in range(2))
    x = probe.inputs(1, n, turn=2)
    probe.ask(probe.inputs(1, T, turn=1), subject=used)
    later, alone = probe.ask(x, subject=used).out, probe.ask(x, subject=fresh).out
    if later.shape == alone.shape and float((later - alone).abs().max()) <= 1e-3 * float(
        alone.abs().max()
    ):
        return []
    if later.shape != alone.shape or later.isnan().any() or alone.isnan().any():
        return []
    worst = (later - alone).abs()
    at = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    masked = torch.ones(n, n).triu(1).bool()
    seen = [
        influence(partial(_answer, probe, subject), x, probe.changed).seen
        for subject in (used, fresh)
    ]
    kept = bool((seen[0] != seen[1])[masked].any())
    name = "mask-kept" if kept else "state-kept"
    sentence = f"{n} tokens behind a call of {T} give other results than alone."
    return [
        finding(
            name,
            sentence,
            {"T": n, "before": T, "output": list(at)},
            float(alone[at]),
            float(later[at]),
        )
    ]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _floats(probe: Probe) -> bool:
    return probe.inputs(1, 1).is_floating_point()
