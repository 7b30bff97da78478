"""The function `audit`: run every check, and reduce each fault to a small example."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch

from regard.argument_checks import check_keyword_names, check_seed, check_usable_device
from regard.audit import rotary_audit
from regard.audit.adapters.base import AuditClaims, CheckNotApplicable, CheckNotPossible, run_on
from regard.audit.adapters.resolve_target import DtypeOverflow, resolve_target
from regard.audit.check_context import CheckContext, make_context, with_adapter
from regard.audit.checks import (
    calls,
    definition,
    leaks,
    masks,
    sequences,
)
from regard.audit.checks.masks import overflow_finding
from regard.audit.findings import (
    FAULTS,
    Audit,
    Finding,
    NotTried,
    PassedCheck,
    finding,
    root_causes,
)
from regard.errors import ArgumentError
from regard.language import Phrase
from regard.process_state import ignore_warnings


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
        reason = Phrase("{count} places kept no output, or dropout changed it", count=without)
        not_tried.append(NotTried("output", reason, applies=False))
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


DEFAULT_LENGTH, LONGEST_SHRUNK = 8, 24
"""`shrink` tries examples that are shorter than that of the finding (8 tokens if it has no length)
and shorter than 24 tokens.
"""
CHECKS_WITH_LENGTH = (
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
"""The checks whose examples become smaller with the number of tokens."""


class AuditCheck(NamedTuple):
    """One check of the audit."""

    name: str
    description: str
    run: Callable[..., list[Finding]]


REPEATABLE = AuditCheck(
    "repeatable",
    "equal calls give bitwise equal results in evaluation mode",
    calls.check_repeatable,
)
"""The first check. If it finds a fault, the results of the other checks would mean nothing."""

CHECKS = (
    AuditCheck("input", "a call does not change its input", calls.check_input_unchanged),
    AuditCheck("state", "a call does not affect later calls", calls.check_stateless),
    AuditCheck("masks", "a mask hides the keys that it should hide", masks.check_masks),
    AuditCheck("future", "no token depends on a later one, on any path", leaks.check_future),
    AuditCheck("window", "a query attends to as many keys as the window says", leaks.check_window),
    AuditCheck(
        "definition",
        "the output is that of the definition of attention with the code's weights",
        definition.check_definition,
    ),
    AuditCheck(
        "long texts",
        "the definition holds at 293 tokens, and with more keys than queries",
        sequences.check_long_sequences,
    ),
    AuditCheck("keys", "every visible key is used", leaks.check_keys_used),
    AuditCheck("batch", "the rows of a batch do not affect one another", leaks.check_batch_rows),
    AuditCheck("mask rows", "each row of a batch uses its own mask", masks.check_mask_rows),
    AuditCheck(
        "padding", "the content of padded slots affects no token", masks.check_padding_content
    ),
    AuditCheck(
        "left padding", "padding in front of a row changes nothing", masks.check_left_padding
    ),
    AuditCheck("garbage", "NaN in a masked slot reaches no output", masks.check_nan_behind_mask),
    AuditCheck(
        "empty rows",
        "a query whose keys are all hidden does not make other outputs NaN",
        masks.check_empty_rows,
    ),
    AuditCheck("weights", "the returned weights sum to 1", calls.check_weight_sums),
    AuditCheck(
        "positions", "shifting all positions changes nothing", sequences.check_position_shift
    ),
    AuditCheck("cache", "cached chunks give the result of one pass", sequences.check_cache),
    AuditCheck("cache size", "the cache of a window stops growing", sequences.check_cache_growth),
    AuditCheck("large scores", "large scores do not overflow", calls.check_large_scores),
    AuditCheck("parameters", "every weight is finite", calls.check_finite_parameters),
    AuditCheck("state dict", "no mask or cache is saved with the weights", calls.check_state_dict),
    AuditCheck(  # the last one: what no other check has passed
        "call arguments",
        "every argument of the code was passed in a call",
        calls.check_arguments,
    ),
)
"""All other checks. To add one, write its function and add a line to this table."""


def shrink(context: CheckContext, check: AuditCheck, finding: Finding) -> Finding:
    """Return the smallest example with the same fault: fewer tokens first, then smaller sizes."""
    smallest = finding
    if check.name in CHECKS_WITH_LENGTH:
        longest = min(int(finding.example.get("T", DEFAULT_LENGTH)), LONGEST_SHRUNK)
        for T in range(1, longest):
            shorter = _rerun(context, check, finding.name, T)
            if shorter is not None:
                smallest = shorter
                break
    length = smallest.example.get("T") if check.name in (*CHECKS_WITH_LENGTH, "cache") else None
    for adapter in context.adapter.smaller_versions():
        smaller = _rerun(with_adapter(context, adapter), check, finding.name, length)
        if smaller is not None and smaller.size <= _with_sizes(smallest, context).size:
            claims = adapter.claims
            sizes: dict[str, object] = {
                "heads": claims.heads,
                "head_dim": claims.head_dim or (claims.dim or 0) // (claims.heads or 1),
            }
            if claims.kv_heads and claims.kv_heads != claims.heads:
                sizes["kv_heads"] = claims.kv_heads
            return replace(smaller, example={**smaller.example, **sizes})
    return smallest


def _rerun(context: CheckContext, check: AuditCheck, name: str, T: int | None) -> Finding | None:
    """Run a check again; return its finding with this name, or None if there is none."""
    try:
        findings = check.run(context) if T is None else check.run(context, T)
    except CheckNotPossible:
        return None
    except Exception:  # the code refuses this size
        return None
    return next((f for f in findings if f.name == name), None)


def _with_sizes(finding: Finding, context: CheckContext) -> Finding:
    """Add the numbers of heads and features to the example of a finding."""
    claims = context.adapter.claims
    sizes = {"heads": claims.heads or 1, "head_dim": (claims.dim or 1) // (claims.heads or 1)}
    return replace(finding, example={**sizes, **finding.example})


class ClaimOptions(TypedDict, total=False):
    """The keyword arguments of `audit` that are claims: see `AuditClaims`."""

    dim: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    causal: bool | None
    window: int | None
    scale: float | None
    mask: str | None
    layout: str


def audit(
    target: Any,
    *,
    adapter: str | Callable[..., object] | None = None,
    options: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    seed: int = 0,
    strict: bool = False,
    accept: Collection[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    **claims: Unpack[ClaimOptions],
) -> Audit:
    """Check attention code against the definition of attention and against its own claims.

    A check that cannot be made on this code is reported as not tried, never as passed. Numbers are
    compared by the error rule: at most twice the error of plain computation in the same dtype,
    measured against float64.

    Args:
        target: a function attend(q, k, v); a module; a class or function that builds a module;
            "package.module:name" of any of these; a model of `regard.load`; a recording, whose
            rows and outputs are checked; or, with adapter="rotary", a function rotate(x) or
            rotate(x, positions).
        adapter: a function adapter(target, x, ...) of your own that calls the target, or its
            "package.module:name": see `regard.audit.adapters.functions.CustomAdapter`; or
            "rotary" for a rotary function.
        options: arguments of the target's constructor, besides the sizes.
        dtype: the floating-point dtype in which the code runs.
        device: where the code runs, such as "cuda"; None is the CPU. The checks compute on the
            CPU, from what the code returned.
        seed: the seed of all random numbers; equal seeds give equal audits.
        strict: also require what `regard` itself guarantees: NaN in a masked slot reaches no
            output, and a query whose keys are all hidden gives 0.
        accept: names of known faults, which are listed separately and do not count.
        progress: called before each check as progress(name, index, number of checks).
        **claims: dim, heads, kv_heads, head_dim, causal, window, scale, mask and layout: what the
            code is claimed to be, see `AuditClaims`.

    Returns:
        The faults that were found, the checks that passed, and the checks that were not made.

    Raises:
        ArgumentError, ArgumentTypeError: no way to call the target was found, the claims
            contradict one another or are made of a recording, or the device cannot be used.

    >>> import torch
    >>> def attend(q, k, v):
    ...     return torch.softmax(q @ k.mT, -1) @ v
    >>> report = audit(attend, heads=1, head_dim=4)
    >>> report.names, report.findings[0].example["T"]
    (('scale-missing',), 2)
    """
    if not dtype.is_floating_point:
        raise ArgumentError(
            f"dtype is {dtype}; it must be a floating-point dtype", argument="dtype"
        )
    unknown = sorted(set(accept) - set(FAULTS))
    if unknown:
        raise ArgumentError(
            f"{unknown[0]!r} is not a fault; the faults are {', '.join(FAULTS)}",
            argument="accept",
            value=unknown[0],
        )
    check_keyword_names("audit", claims, ClaimOptions.__annotations__)
    check_seed(seed)
    checked_claims = AuditClaims(**claims)
    reported_claims: dict[str, object] = {
        name: value for name, value in claims.items() if value is not None
    }
    if is_recording(target):
        arguments: dict[str, object] = {"adapter": adapter, "options": options, "device": device}
        arguments |= {name: value for name, value in claims.items() if value != "BHTD"}
        arguments |= {"strict": strict, "dtype": None if dtype == torch.float32 else dtype}
        for name, value in arguments.items():
            if value:
                raise ArgumentError(
                    f"{name} is {value!r}, which is about a call, and a recording has no code to "
                    "call; leave it out",
                    argument=name,
                )
        return _separate_accepted(audit_recording(target), accept)
    if device is not None:
        check_usable_device(device)
    # warnings of the audited code are not part of the audit
    with ignore_warnings(), run_on(device):
        if adapter == "rotary":
            report = rotary_audit.audit_rotary(
                target, checked_claims, dtype=dtype, seed=seed, reported_claims=reported_claims
            )
            return _separate_accepted(report, accept)
        try:
            target_adapter, mask_behavior = resolve_target(
                target, checked_claims, user_adapter=adapter, options=options, dtype=dtype
            )
        except DtypeOverflow as error:  # every call raises in this dtype
            report = Audit(
                error.adapter.name,
                error.adapter.called,
                (overflow_finding(error.adapter, "A number"),),
                seed=seed,
                claims=reported_claims,
            )
            return _separate_accepted(report, accept)
        context = make_context(target_adapter, mask_behavior, seed, strict=strict)
        findings, passed, skipped = run_checks(context, progress)
    report = Audit(
        target_adapter.name,
        context.adapter.called + (", causal mask given" if context.masked else ""),
        tuple(findings),
        tuple(passed),
        tuple(skipped),
        seed=seed,
        claims={"causal": context.causal, **reported_claims},
    )
    return _separate_accepted(report, accept)


def _separate_accepted(report: Audit, accept: Collection[str]) -> Audit:
    """Move the findings with accepted names to `Audit.accepted`."""
    accepted = tuple(f for f in report.findings if f.name in accept)
    remaining = tuple(f for f in report.findings if f not in accepted)
    return replace(report, findings=remaining, accepted=accepted)


def run_checks(
    context: CheckContext, progress: Callable[[str, int, int], None] | None = None
) -> tuple[list[Finding], list[PassedCheck], list[NotTried]]:
    """Run every check of the audit on one context."""
    findings: list[tuple[AuditCheck, Finding]] = []
    passed: list[PassedCheck] = []
    skipped: list[NotTried] = []
    checks = (REPEATABLE, *CHECKS)
    for n, check in enumerate(checks):
        if progress is not None:
            progress(check.name, n, len(checks))
        if findings and findings[0][0] is REPEATABLE and check.name != "state dict":
            skipped.append(
                NotTried(check.name, "its results change from call to call", applies=False)
            )
            continue
        try:
            new_findings = check.run(context)
        except CheckNotPossible as why:
            applies = not isinstance(why, CheckNotApplicable)
            skipped.append(NotTried(check.name, why.args[0], applies))
            continue
        except Exception as error:  # an error of the audited code is reported; it is not a fault
            skipped.append(
                NotTried(
                    check.name,
                    Phrase(
                        "the code raised {kind}: {error}",
                        kind=type(error).__name__,
                        error=str(error)[:300],
                    ),
                )
            )
            continue
        findings += [(check, f) for f in new_findings]
        if not new_findings:
            passed.append(PassedCheck(check.name, check.description))
    first_by_name = {f.name: (check, f) for check, f in reversed(findings)}
    causes = root_causes([f for _, f in findings])
    return [shrink(context, *first_by_name[f.name]) for f in causes], passed, skipped
