"""The smallest example of a finding: fewer tokens first, then fewer heads and dims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.inspect.audit.begin import smaller
from regard.inspect.audit.checks.table import Check
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Finding
from regard.inspect.audit.subject import CannotTry

MOST, LONGEST = 8, 24
SHRUNK_BY_LENGTH = (
    "future",
    "window",
    "keys",
    "definition",
    "batch",
    "mask rows",
    "padding",
    "left padding",
    "empty rows",
    "weights",
    "large scores",
    "repeatable",
    "state",
    "input",
    "positions",
)


def shrunk(probe: Probe, check: Check, finding: Finding) -> Finding:
    """The smallest example that still has this name, with the same kind of numbers."""
    best = finding
    if check.name in SHRUNK_BY_LENGTH:
        for T in range(1, min(int(finding.example.get("T", MOST)), LONGEST)):
            found = _again(probe, check, finding.name, T)
            if found is not None:
                best = found
                break
    length = best.example.get("T") if check.name in (*SHRUNK_BY_LENGTH, "cache") else None
    for subject in probe.subject.smaller():
        found = _again(smaller(probe, subject), check, finding.name, length)
        if found is not None and found.size <= _sized(best, probe).size:
            claim = subject.claim
            sizes: dict[str, Any] = {
                "heads": claim.heads,
                "head_dim": claim.head_dim or (claim.dim or 0) // (claim.heads or 1),
            }
            if claim.kv_heads and claim.kv_heads != claim.heads:
                sizes["kv_heads"] = claim.kv_heads
            return replace(found, example={**found.example, **sizes})
    return best


def _again(probe: Probe, check: Check, name: str, T: int | None) -> Finding | None:
    """The finding of this name, if the check still makes it."""
    try:
        found = check.run(probe) if T is None else check.run(probe, T)
    except CannotTry:
        return None
    except Exception:  # a size that the code refuses
        return None
    return next((f for f in found if f.name == name), None)


def _sized(finding: Finding, probe: Probe) -> Finding:
    claim = probe.subject.claim
    sizes = {"heads": claim.heads or 1, "head_dim": (claim.dim or 1) // (claim.heads or 1)}
    return replace(finding, example={**sizes, **finding.example})
