"""Probe a subject: ask it in the right way for what it claims, and judge by one rule whether two
outputs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.audit.adapters.calibrate import Heard
from regard.audit.adapters.functions import Function
from regard.audit.subject import NEW, Ask, CannotTry, NotApplicable, Reply, Subject, influence
from regard.tolerance import allowed_error

MOST_NUMBERS = 500_000_000
"""Parameters of which no second copy in float64 is made."""
T = 6


class Gap(NamedTuple):
    """Where an output is furthest from what it should be: beyond the rule."""

    at: tuple[int, ...]
    expected: float
    got: float
    allowed: float


def gap(x: Tensor, plains: Sequence[Tensor], ref64: Tensor) -> Gap | None:
    """Where x differs from ref64 by more than the error rule allows, or None.

    max|x - ref64| <= 2 max|plain - ref64| + 2 max|((ref + 0.3) - 0.3) - ref|

    Args:
        x: what is judged.
        plains: straightforward computations of equal standing in the same dtype, over which the
            largest error counts.
        ref64: the definition, float64. NaN and infinities must stand at the same places.

    >>> gap(torch.ones(2), [torch.ones(2)], torch.ones(2).double())
    >>> gap(torch.tensor([1.0, 3.0]), [torch.ones(2)], torch.ones(2).double())[:3]
    ((1,), 1.0, 3.0)
    """
    if x.shape != ref64.shape:
        return Gap((), float(ref64.numel()), float(x.numel()), 0.0)
    error = (x.double() - ref64).abs()
    # equal infinities have no difference, and a NaN that both have is none
    same = (x.double() == ref64) | (x.isnan() & ref64.isnan())
    error = torch.where(same, 0.0, error)
    allowed = allowed_error(plains, ref64)
    worst = torch.where(error.isnan(), torch.inf, error)
    if not worst.numel() or float(worst.max()) <= allowed:
        return None
    at = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    return Gap(at, float(ref64[at]), float(x[at]), allowed)


Run: TypeAlias = "Callable[[Subject, Tensor], Tensor]"
"""From a subject, in one dtype or another, and tokens to an output."""


@dataclass
class Probe:
    """What checks work with.

    Attributes:
        subject: the code.
        causal: whether a query may see later tokens.
        masked: whether the causal mask must be given with each call.
        seed: of every random number.
        strict: whether it is held to what `regard` itself promises, too.
        notes: what calibration found: (verdict on masks, and so on).
        wide: the same code in float64, or None where it cannot run there.
    """

    subject: Subject
    causal: bool
    masked: bool
    seed: int = 0
    strict: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wide = widened(self.subject)

    def pattern(self, T: int, S: int, *, causal: bool | None = None) -> Tensor:
        """What the claim lets the last T of S tokens see, bool [T,S]; `causal` instead of what was
        found out.
        """
        causal = self.causal if causal is None else causal
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        seen = torch.ones(T, S, dtype=torch.bool)
        if causal:
            seen = seen & (j <= i)
        window = self.subject.claim.window
        if window and causal:
            seen = seen & (j > i - window)
        return seen

    def inputs(self, B: int, T: int, turn: int = 0) -> Tensor:
        """Tokens, others for each turn."""
        return self.subject.inputs(B, T, self.seed * 101 + turn)

    def changed(self, x: Tensor, j: int) -> Tensor:
        """x with another token at j."""
        other = x.clone()
        if x.is_floating_point():
            make = torch.Generator().manual_seed(self.seed * 101 + 7 + j)
            noise = torch.randn(x[:, j].shape, generator=make, dtype=torch.float64)
            other[:, j] = noise - x[:, j]
        else:
            other[:, j] = (x[:, j] + 1 + self.seed % 3) % self.subject.width
        return other

    def ask(
        self,
        x: Tensor,
        *,
        tokens: Tensor | None = None,
        start: int = 0,
        memory: Any = None,
        weights: bool = False,
        subject: Subject | None = None,
    ) -> Reply:
        """Call it on tokens x that begin at `start`, with the mask that its claim needs."""
        subject = subject or self.subject
        B, T = x.shape[:2]
        S = start + T if memory is not None else T
        keep = self.pattern(T, S)[None] if self.masked else None
        padding = None
        if tokens is not None:
            if "padding" in subject.takes:
                padding = tokens
            else:
                keep = self.pattern(T, S)[None] & tokens[:, None, :]
        positions = None
        if memory is not None:
            positions = torch.arange(start, start + T).expand(B, -1)
        return subject.ask(x, Ask(keep, padding, positions, memory, weights))

    def differs(self, x: Tensor, run: Run, reference: Run) -> Gap | None:
        """Where `run` differs from `reference` by the error rule, both on this code; float64 is the
        definition.

        The plain errors are those of the reference itself, on x and on what is x up to rounding: no
        single run's luck counts.
        """
        plains, ref = self.standard(x, reference)
        return gap(run(self.subject, x), plains, ref)

    def standard(self, x: Tensor, reference: Run) -> tuple[list[Tensor], Tensor]:
        """What an output on x is held against: plain computations, and float64."""
        plain = reference(self.subject, x)
        ref = plain.double() if self.wide is None else reference(self.wide, x).double()
        return [plain, *self._others(x, ref, reference)], ref

    def _others(self, x: Tensor, ref: Tensor, reference: Run) -> list[Tensor]:
        """Plain computations of equal standing: on x up to rounding, or, of ids, with the errors on
        other ids.
        """
        made = [torch.Generator().manual_seed(turn) for turn in range(2)]
        if x.is_floating_point():
            eps = torch.finfo(self.subject.dtype).eps
            signs = [torch.randn(x.shape, generator=g).sign().double() for g in made]
            return [reference(self.subject, x * (1 + eps * sign)) for sign in signs]
        if self.wide is None:
            return []
        like = [self.inputs(x.shape[0], x.shape[1], turn=50 + turn) for turn in range(2)]
        errors = [reference(self.subject, y).double() - reference(self.wide, y) for y in like]
        return [(ref + error).to(self.subject.dtype) for error in errors]

    def steps(self, x: Tensor, chunks: Sequence[int], subject: Subject) -> tuple[Tensor, Any]:
        """The output over cached chunks of these lengths, and the cache at the end.

        Raises:
            CannotTry: no cache is to be had.
        """
        if "memory" not in subject.takes:
            raise NotApplicable("it takes no cache")
        # a cache that lives in the module holds what stood there before: other tokens than these
        self.ask(self.inputs(x.shape[0], x.shape[1], turn=8), subject=subject)
        memory: Any = NEW
        outs, start = [], 0
        for n in chunks:
            reply = self.ask(x[:, start : start + n], start=start, memory=memory, subject=subject)
            memory = reply.memory
            if memory is NEW or memory is None:
                raise CannotTry("it gives no cache back: give an adapter")
            outs.append(reply.out)
            start += n
        return torch.cat(outs, 1), memory


def widened(subject: Subject) -> Subject | None:
    """The subject in float64, or None where it does not run there, or is too large."""
    state = subject.state()
    if state and sum(x.numel() for x in state.values()) > MOST_NUMBERS:
        return None
    try:
        wide = subject.at(torch.float64)
        out = wide.ask(subject.inputs(1, 3, 0)).out
    except Exception:  # its own limits are no finding
        return None
    return wide if out.dtype == torch.float64 else None


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
