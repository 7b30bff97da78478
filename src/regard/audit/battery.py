"""The audit: find a way to call the code, make every check, name causes and make examples small."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, Unpack

import torch

from regard.argument_checks import check_keyword_names
from regard.audit import rotary
from regard.audit.adapters.find import ValueOverflow, find
from regard.audit.checks import cached, explained, leaks, masks, numbers, repeat
from regard.audit.checks.masks import overflow
from regard.audit.findings import FAULTS, Audit, Checked, Finding, NotTried, causes
from regard.audit.probe import Probe, begun, smaller
from regard.audit.subject import CannotTry, Claim, NotApplicable
from regard.errors import ArgumentError
from regard.process_state import ignore_warnings

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


class Check(NamedTuple):
    """A check: run(probe, T) -> findings.

    Attributes:
        name: of the check.
        what: a right answer, in words.
        run: the check; T is the length that it is made at, and shrunk to.
    """

    name: str
    what: str
    run: Callable[..., list[Finding]]


REPEATABLE = Check(
    "repeatable", "equal calls give equal bits in evaluation mode", repeat.repeatable
)
"""Made first: where it finds something, no other check can say anything."""

CHECKS = (
    Check("input", "the input is not changed", repeat.untouched),
    Check("state", "a call leaves nothing behind", repeat.stateless),
    Check("masks", "masks that are given hide what they should", masks.heard),
    Check("future", "no token sees a later one, on any path", leaks.future),
    Check("window", "a query sees as many keys as the window says", leaks.window),
    Check(
        "definition",
        "the output is that of the definition with the code's weights",
        explained.explained,
    ),
    Check(
        "long texts",
        "the definition holds at 293 tokens, and with more keys than queries",
        explained.long,
    ),
    Check("keys", "every key that may be seen is used", leaks.keys),
    Check("batch", "rows of a batch do not mix", leaks.rows),
    Check("mask rows", "each row of a batch has its own mask", masks.rows),
    Check("padding", "what stands in padding reaches no token", masks.content),
    Check("left padding", "padding in front changes nothing", masks.left),
    Check("garbage", "NaN behind a mask reaches nobody", masks.garbage),
    Check("empty rows", "a query that may see nothing gives numbers", masks.empty),
    Check("weights", "returned weights sum to 1", numbers.sums),
    Check("positions", "shifting all positions changes nothing", cached.shift),
    Check("cache", "cached chunks equal one pass", cached.differs),
    Check("cache size", "the cache of a window stops growing", cached.grows),
    Check("large scores", "large scores do not overflow", numbers.overflow),
    Check("parameters", "every weight is finite", numbers.finite),
    Check("state dict", "no mask or cache is saved with the weights", numbers.saved),
)
"""Every other check. A new one is a function here or in a file of its own, and one line of this
table.
"""


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


class Claims(TypedDict, total=False):
    """What the code says it is: see `Claim`."""

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
    adapter: str | Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    strict: bool = False,
    accept: Collection[str] = (),
    tell: Callable[[str, int, int], None] | None = None,
    **claims: Unpack[Claims],
) -> Audit:
    """Hold attention code against what attention is, and against what the code says it is.

    A check that this code gives no way to make is told as not tried, never as passed. Numbers are
    judged by the error
    rule: at most twice the error of plain computation in the same dtype, against float64.

    Args:
        target: a function of q, k, v; a module; a class or a function that makes one;
            "package.module:name" of such; a model of `regard.load`; or a function rotate(x) or
            rotate(x, positions), with adapter="rotary".
        adapter: the user's way to call it: see `regard.audit.adapters.functions`.
        options: arguments of the constructor, besides sizes.
        dtype: to compute in.
        seed: of every random number; equal seeds give equal audits.
        strict: hold it to what `regard` promises, too: NaN behind a mask reaches nobody, an empty
            row gives 0.
        accept: names of faults that are known, and do not count.
        tell: called before each check with its name, its number and how many there are.
        **claims: dim, heads, kv_heads, head_dim, causal, window, scale, mask, layout: see `Claim`.

    Raises:
        ArgumentError, ArgumentTypeError: no way to call the target is found, or a claim contradicts
            itself.

    >>> import torch
    >>> def attend(q, k, v):
    ...     return torch.softmax(q @ k.mT, -1) @ v
    >>> found = audit(attend, heads=1, head_dim=4)
    >>> found.names, found.findings[0].example["T"]
    (('scale-missing',), 2)
    """
    if not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {dtype}; it must be floating")
    strange = sorted(set(accept) - set(FAULTS))
    if strange:
        raise ArgumentError(f"{strange[0]!r} is no fault; there are {', '.join(FAULTS)}")
    check_keyword_names("audit", claims, Claims.__annotations__)
    claim = Claim(**claims)
    said = {name: value for name, value in claims.items() if value is not None}
    with ignore_warnings():  # what the code warns of is its own affair
        if adapter == "rotary":
            return _accepted(
                rotary.audited(target, claim, dtype=dtype, seed=seed, said=said), accept
            )
        try:
            subject, heard = find(target, claim, adapter=adapter, options=options, dtype=dtype)
        except ValueOverflow as error:  # no call can be made in this dtype
            found = overflow(error.subject, "A number")
            done = Audit(error.subject.name, error.subject.called, (found,), seed=seed, claims=said)
            return _accepted(done, accept)
        probe = begun(subject, heard, seed, strict=strict)
        findings, held, skipped = battery(probe, tell)
    called = probe.subject.called + (", causal mask given" if probe.masked else "")
    said = {"causal": probe.causal, **said}
    done = Audit(
        subject.name, called, tuple(findings), tuple(held), tuple(skipped), seed=seed, claims=said
    )
    return _accepted(done, accept)


def _accepted(done: Audit, accept: Collection[str]) -> Audit:
    known = tuple(f for f in done.findings if f.name in accept)
    return replace(done, findings=tuple(f for f in done.findings if f not in known), accepted=known)


def battery(
    probe: Probe, tell: Callable[[str, int, int], None] | None = None
) -> tuple[list[Finding], list[Checked], list[NotTried]]:
    """Every check: findings without those that others bring about, what held, what was not
    tried.
    """
    findings: list[tuple[Check, Finding]] = []
    held: list[Checked] = []
    skipped: list[NotTried] = []
    checks = (REPEATABLE, *CHECKS)
    for n, check in enumerate(checks):
        if tell is not None:
            tell(check.name, n, len(checks))
        if findings and findings[0][0] is REPEATABLE and check.name != "state dict":
            skipped.append(
                NotTried(check.name, "its results change from call to call", applies=False)
            )
            continue
        try:
            found = check.run(probe)
        except CannotTry as why:
            applies = not isinstance(why, NotApplicable)
            skipped.append(NotTried(check.name, str(why), applies))
            continue
        except Exception as error:  # the code's refusal is told, not taken for a fault
            skipped.append(
                NotTried(check.name, f"the code raised {type(error).__name__}: {str(error)[:300]}")
            )
            continue
        findings += [(check, f) for f in found]
        if not found:
            held.append(Checked(check.name, check.what))
    by = {f.name: (check, f) for check, f in reversed(findings)}
    kept = causes([f for _, f in findings])
    return [shrunk(probe, *by[f.name]) for f in kept], held, skipped
