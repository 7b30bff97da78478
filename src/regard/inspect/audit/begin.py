"""A probe from a subject: what it shows when nobody masks, and so what it must be given."""

from __future__ import annotations

from typing import Any

import torch

from regard.inspect.audit.adapters.calibrate import Heard
from regard.inspect.audit.adapters.functions import Function
from regard.inspect.audit.influence import influence
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.subject import Subject

T = 6


def begun(subject: Subject, heard: dict[str, Heard], seed: int, *, strict: bool) -> Probe:
    """The probe, which knows whether the code is causal, and whether it must be given its mask.

    Where nothing is claimed, code that shows no later token is causal, code that shows everything
    is what its mask makes it, and of other code it is not judged which tokens it shows.
    """
    claimed = subject.claim.causal
    plain = Probe(subject, causal=False, masked=False, seed=seed, strict=strict)
    wide = plain.wide or subject
    seen = influence(lambda x: wide.ask(x).out, plain.inputs(1, T), plain.changed).seen
    later, earlier = torch.ones(T, T).triu(1).bool(), torch.ones(T, T).tril(-1).bool()
    everything = bool(seen[later].all()) and bool(seen[earlier].all())
    masks = "mask" in subject.takes
    notes: dict[str, Any] = {"heard": heard}
    if isinstance(subject, Function) and subject.keywords.causal and claimed is not False:
        notes["flag"] = subject.flagged()
    triangular = not bool(seen[later].any())
    if claimed is None and not everything and not triangular:
        notes["unclear"] = True
    causal = (
        claimed
        if claimed is not None
        else triangular or (everything and (masks or "flag" in notes))
    )
    masked = causal and masks and bool(seen[later].any())
    if causal and not masked and "flag" in notes and bool(seen[later].any()):
        subject = notes["flag"]
    return Probe(subject, causal=bool(causal), masked=masked, seed=seed, strict=strict, notes=notes)


def smaller(probe: Probe, subject: Subject) -> Probe:
    """The same probe on another subject."""
    return Probe(
        subject,
        causal=probe.causal,
        masked=probe.masked,
        seed=probe.seed,
        strict=probe.strict,
        notes=_without_flag(probe),
    )


def _without_flag(probe: Probe) -> dict[str, Any]:
    return {name: value for name, value in probe.notes.items() if name != "flag"}
