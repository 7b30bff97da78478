"""The output against the definition: scale, softmax, heads, rotary and mask, named by the fewest faults that reproduce it."""

from __future__ import annotations

from regard.inspect.audit.definition import Steps
from regard.inspect.audit.explain import explain
from regard.inspect.audit.faults import FAULTS, finding
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Finding

NAMES = {
    ("scale", "none"): "scale-missing", ("scale", "twice"): "scale-twice",
    ("scale", "model_dim"): "scale-wrong-dim", ("scale", "inverted"): "scale-inverted",
    ("groups", "tiled"): "gqa-head-order", ("mask", "inverted"): "mask-polarity",
    ("mask", "own-hidden"): "own-key-hidden", ("mask", "next-seen"): "future-leak",
    ("mask", "unmasked"): "future-leak", ("mask", "one-more"): "window-off-by-one",
    ("mask", "one-less"): "window-off-by-one", ("mask", "zeroed"): "mask-zeroed",
    ("mask", "after"): "mask-after-softmax", ("softmax", "queries"): "softmax-axis",
    ("softmax", "heads"): "softmax-axis", ("softmax", "absent"): "softmax-missing",
    ("split", "rows"): "heads-split", ("join", "rows"): "heads-joined",
    ("rotary", "mixed"): "rotary-mixed", ("rotary", "mixed-back"): "rotary-mixed",
}  # fmt: skip
_ROTARY = {"heads": "rotary-axis", "values": "rotary-values", "queries": "rotary-one-sided"}


LONGEST = 64
"""A longer window is not reached here; the checks of windows and caches are."""


def name_of(field: str, value: str) -> str:
    """The fault's name.

    >>> name_of("rotary", "values-half"), name_of("scale", "none")
    ('rotary-values', 'scale-missing')
    """
    if (field, value) in NAMES:
        return NAMES[field, value]
    return _ROTARY[value.partition("-")[0]]


def explained(probe: Probe, T: int = 5) -> list[Finding]:
    """The output is that of the definition with the code's own weights."""
    W = probe.subject.claim.window
    if W and W + 2 <= LONGEST:
        T = max(T, W + 2)
    told = explain(probe, T)
    return [
        finding(name_of(field, getattr(told.steps, field)), _sentence(told.steps, field), told.example, told.expected, told.got)
        for field in told.steps.wrong
    ]  # fmt: skip


def _sentence(steps: Steps, field: str) -> str:
    others = [name_of(f, getattr(steps, f)) for f in steps.wrong if f != field]
    beside = f" together with {', '.join(others)}" if others else ""
    what = FAULTS[name_of(field, getattr(steps, field))].what.rstrip(".")
    return f"{what}: the definition with this fault{beside} reproduces the output, and without it does not."
