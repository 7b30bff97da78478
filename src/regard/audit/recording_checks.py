"""The audit of a recording: what was kept of each place must be attention by its own definition.

    sum_j exp(s_ij - lse_i) = 1        sum_j p_ij v_j = out_i

Scores come from the recorded q, k, mask, bias and scale. The recording itself computes both errors
and names a mask, a scale or a bias that was not applied (`regard.inspect.row_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from regard.audit.findings import FAULTS, Audit, Finding, NotTried, PassedCheck, finding
from regard.language import Phrase


class Recorded(Protocol):
    """What the audit reads of a `regard.inspect.Recording`."""

    @property
    def row_sums(self) -> Mapping[str, Any]:
        """The result of each place: a `regard.inspect.RowSums`."""

    @property
    def unrecorded(self) -> Sequence[Any]:
        """The calls that were not recorded, with reasons."""


def is_recording(target: object) -> bool:
    """Return whether an object is a recording."""
    return not isinstance(target, type) and hasattr(target, "row_sums")


def audit_recording(recording: Recorded, name: str = "a recording") -> Audit:
    """Return what is wrong with the numbers of a recording, place by place."""
    findings: list[Finding] = []
    passed: list[PassedCheck] = []
    not_tried: list[NotTried] = []
    without = 0
    for place, sums in recording.row_sums.items():
        has_output = sums.output is not None
        without += not has_output
        if sums.sound:
            text = (
                "rows sum to 1 and outputs are the weighted values: {rows} of {total} rows checked"
                if has_output
                else "rows sum to 1: {rows} of {total} rows checked"
            )
            passed.append(PassedCheck(place, Phrase(text, rows=sums.rows, total=sums.of)))
            continue
        findings.append(_finding(place, sums))
    not_tried += [NotTried(x.place, x.reason) for x in recording.unrecorded]
    if without:
        kept = Phrase("{count} places kept no output, or dropout changed it", count=without)
        not_tried.append(NotTried("output", kept, applies=False))
    why = "a recording has no code: its model or module is audited for what calls can change"
    not_tried.append(NotTried("call arguments", why, applies=False))
    called = Phrase("at {count} places of its run", count=len(recording.row_sums))
    return Audit(name, called, tuple(findings), tuple(passed), tuple(not_tried))


def _finding(place: str, sums: Any) -> Finding:
    """Return the fault of a place: of its rows, of its outputs, or of rows that see no key."""
    kind, error, allowed = "empty-row", 0.0, 0.0
    if not sums.residual <= sums.allowed:
        kind, error, allowed = "weights-sum", sums.residual, sums.allowed
    elif sums.output is not None and not sums.output <= sums.output_allowed:
        kind, error, allowed = "definition-differs", sums.output, sums.output_allowed
    example = {"place": place, "rows": f"{sums.rows}/{sums.of}", "found": "; ".join(sums.findings)}
    return finding(kind, FAULTS[kind].summary, example, f"<= {allowed:.3g}", error)
