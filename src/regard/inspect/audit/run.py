"""The audit: find a way to call the code, make every check, name causes, shrink examples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch

from regard.arguments import check_names
from regard.errors import ArgumentError
from regard.inspect.audit import rotary
from regard.inspect.audit.adapters.find import ValueOverflow, find
from regard.inspect.audit.begin import begun
from regard.inspect.audit.checks.masks import overflow
from regard.inspect.audit.checks.table import CHECKS, REPEATABLE, Check
from regard.inspect.audit.faults import FAULTS, causes
from regard.inspect.audit.probe import Probe
from regard.inspect.audit.result import Audit, Checked, Finding, NotTried
from regard.inspect.audit.shrink import shrunk
from regard.inspect.audit.subject import CannotTry, Claim, NotApplicable
from regard.process import quiet


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
        adapter: the user's way to call it: see `regard.inspect.audit.adapters.custom`.
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
    check_names("audit", claims, Claims.__annotations__)
    claim = Claim(**claims)
    said = {name: value for name, value in claims.items() if value is not None}
    with quiet():  # what the code warns of is its own affair
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
