"""What an audit says: findings, what was held, what could not be tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One fault, with the smallest input that shows it.

    Attributes:
        name: the fault, such as "future-leak"; `regard.inspect.audit.FAULTS` has a sentence for
            each.
        severity: "error" changes what a model computes; "warning" costs memory, or will be noticed
            later.
        sentence: what is wrong, for this code.
        example: the smallest input found: lengths, rows, positions, chunks.
        expected, got: the numbers of that example.
        look: where to look.

    >>> Finding("future-leak", "error", "Query 0 sees key 1.", {"T": 2}, 0.0, 0.5, "the mask").name
    'future-leak'
    """

    name: str
    severity: Severity
    sentence: str
    example: dict[str, Any]
    expected: float | str
    got: float | str
    look: str

    @property
    def size(self) -> int:
        """How large the example is: what shrinking makes small."""
        sizes = (self.example.get(key, 1) for key in ("B", "T", "heads", "head_dim"))
        return sum(value for value in sizes if isinstance(value, int))


@dataclass(frozen=True)
class Checked:
    """One check that was run to its end and found nothing."""

    name: str
    what: str


@dataclass(frozen=True)
class NotTried:
    """One check that was not made on this code, and why.

    Attributes:
        applies: whether there is something to check, so that a fault may hide there. False: the
            code takes no cache, no window is claimed, and so on.
    """

    name: str
    why: str
    applies: bool = True


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        target: what was audited.
        called: how it was called.
        findings: faults, worst first.
        held: checks that found nothing.
        not_tried: checks that were not made, with the reason; those that apply leave the audit
            incomplete.
        accepted: faults that were found, and that the caller said it knows of.
        seed: of every random number.

    >>> Audit("f", "f(x)", ()).clean
    True
    """

    target: str
    called: str
    findings: tuple[Finding, ...]
    held: tuple[Checked, ...] = ()
    not_tried: tuple[NotTried, ...] = ()
    accepted: tuple[Finding, ...] = ()
    seed: int = 0
    claims: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether nothing was found, besides what is accepted."""
        return not self.findings

    @property
    def untried(self) -> tuple[NotTried, ...]:
        """The checks that apply to this code and could not be made."""
        return tuple(check for check in self.not_tried if check.applies)

    @property
    def complete(self) -> bool:
        """Whether every check that applies was made."""
        return not self.untried

    @property
    def exit_code(self) -> int:
        """What the command exits with: 1 for findings, 3 for none while a check could not be made,
        else 0.
        """
        return 1 if self.findings else 0 if self.complete else 3

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the findings, in their order."""
        return tuple(finding.name for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as values that JSON can say."""
        return {"clean": self.clean, "complete": self.complete, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.target}, called {self.called}"]
        for f in self.findings:
            shown = ", ".join(f"{key}={value}" for key, value in f.example.items())
            lines.append(f"{f.severity}: {f.name}: {f.sentence}")
            lines.append(f"  smallest example: {shown}")
            lines.append(f"  expected {_say(f.expected)}, got {_say(f.got)}; look at {f.look}")
        lines += [f"accepted: {known.name}: {known.sentence}" for known in self.accepted]
        for skipped in self.not_tried:
            word = "could not be made" if skipped.applies else "does not apply"
            lines.append(f"{word}: {skipped.name}: {skipped.why}")
        counts = f"{len(self.findings)} findings, {len(self.held)} checks held"
        lines.append(f"{counts}, {len(self.untried)} could not be made")
        return "\n".join(lines)


def _say(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"
