"""Positions that are given: attention depends on distances, not on where the text begins."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.inspect.audit.faults import finding
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Finding
from regard.inspect.audit.subject import Ask, NotApplicable, Subject

SHIFT = 11


def shift(probe: Probe, T: int = 5) -> list[Finding]:
    """All positions moved by a number change nothing."""
    subject = probe.subject
    if "positions" not in subject.takes:
        raise NotApplicable("it takes no positions")
    if getattr(subject, "addressed", False):
        raise NotApplicable("its positions address the cache that it keeps")
    if not subject.relative:
        raise NotApplicable("whether positions are relative is not claimed")
    x = probe.inputs(1, T)
    keep = probe.pattern(T, T)[None] if probe.masked else None

    def at(start: int, subject: Subject, x: Tensor) -> Tensor:
        return subject.ask(x, Ask(keep=keep, positions=torch.arange(start, start + T)[None])).out

    off = probe.differs(x, lambda s, x: at(SHIFT, s, x), lambda s, x: at(0, s, x))
    if off is None:
        return []
    sentence = f"Positions {SHIFT} to {SHIFT + T - 1} give other results than 0 to {T - 1}."
    return [
        finding(
            "position-shift",
            sentence,
            {"T": T, "shift": SHIFT, "output": list(off.at)},
            off.expected,
            off.got,
        )
    ]
