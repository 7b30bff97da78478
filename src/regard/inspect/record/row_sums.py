"""The audit of a recording: are the recorded q, k, lse, mask and bias consistent, and do they give
the output of the kernel?

    sum_j exp(s_ij - lse_i) = 1        sum_j p_ij v_j = out_i
    for a row that sees no key: lse = -inf, out = 0

The scores s are computed in fp64 from the recorded q, k, mask and bias. The bound on the error is
the error rule of CONTRIBUTING.md: twice the error of plain arithmetic in the dtype of the kernel
(over several orders of summation), plus two roundings, plus two roundings at the size of the terms
that a score sums, because plain arithmetic may be accurate by chance on a few rows.

Where rows are wrong, each `FaultHypothesis` computes such rows as a faulty kernel would. The first
one that reproduces the recorded numbers names the fault.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspect.record.recorded_place import Place, RecordedStep, ScoreInputs
from regard.masks import And, Mask
from regard.span import as_tensor
from regard.tolerance import two_roundings
from regard.units import plural
from regard.untrusted_text import short_repr

PLAIN_ORDERS = 4
"""Number of orders in which plain arithmetic sums; a single order may be accurate by chance."""


@dataclass(frozen=True, eq=False)
class AuditSample:
    """Some rows of a step as they were recorded, with the terms of their scores in fp64."""

    place: Place
    step: RecordedStep
    first: int
    own: slice
    score_inputs: ScoreInputs
    values: Tensor | None

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(range(self.own.start, self.own.stop))

    @cached_property
    def k(self) -> Tensor:
        """Return the keys that each recorded head reads, `[B, h, s, D]`."""
        return self.place.keys(self.step)[:, self.place.groups_read(self.step)]

    @cached_property
    def scores(self) -> Tensor:
        """Compute the scores without any fault, in fp64."""
        return self.score_inputs.scores(self.step.scale, self.step.softcap)

    @property
    def lse(self) -> Tensor:
        """Return the recorded lse, `[B, h, t]`."""
        return self.step.lse[:, :, self.own]

    @property
    def out(self) -> Tensor | None:
        """Return the recorded output, `[B, h, t, E]`; None without one, or with dropout."""
        if self.step.out is None or self.values is None or self.step.dropout:
            return None
        return self.step.out[:, :, self.own]

    @cached_property
    def true_lse(self) -> Tensor:
        """Compute ln sum_j exp(s_ij) in fp64, with the scores of an edit if there are any."""
        if self.step.scores is not None:
            return lse_of(self.step.scores[:, :, self.own].double())
        return lse_of(self.scores)

    @cached_property
    def true_out(self) -> Tensor | None:
        """Compute sum_j p_ij v_j in fp64; NaN where a visible value is not finite."""
        if self.step.edited:
            return _edited_output(self, torch.float64)
        return self.output(self.scores, self.step.sink)

    def output(self, s: Tensor, sink: Tensor | None) -> Tensor | None:
        """Compute the output from scores, with or without a sink; 0 for a row that sees no key."""
        if self.values is None:
            return None
        v = self.values.double()
        non_finite = ~v.isfinite().all(-1)  # [B,h,s]
        sees_non_finite = (~s.isneginf() & non_finite[:, :, None]).any(-1)
        denominator = lse_of(s)
        if sink is not None:
            denominator = torch.logaddexp(denominator, sink.double()[:, None])
        p = torch.exp(s - denominator.masked_fill(denominator.isneginf(), math.inf)[..., None])
        out = p.masked_fill(s.isneginf(), 0) @ v.masked_fill(non_finite[..., None], 0)
        return out.masked_fill(sees_non_finite[..., None], math.nan)

    def row(self, wrong: Tensor) -> int:
        """Return the first row of the place in which `wrong`, bool `[B, h, t]`, is True."""
        return self.first + int(wrong.any(0).any(0).nonzero()[0])

    @cached_property
    def _plain(self) -> list[tuple[Tensor, Tensor | None]]:
        """Compute (lse, out) by plain arithmetic, in several orders of summation."""
        return [_plain(self, order) for order in range(PLAIN_ORDERS)]

    @cached_property
    def rounding(self) -> float:
        """Return 2 eps (largest sum of |terms| of a visible score + largest |lse|)."""
        lse_dtype = self.lse.dtype
        if self.step.scores is not None:
            size = self.step.scores[:, :, self.own].to(lse_dtype).abs()
        else:
            q = self.step.q[:, :, self.own].to(lse_dtype)
            size = abs(self.step.scale) * (q.abs() @ self.k.to(lse_dtype).abs().mT)
            size = size if self.score_inputs.bias is None else size + self.score_inputs.bias.abs()
        visible_sizes = size.masked_fill(~self.score_inputs.visible | ~size.isfinite(), 0)
        lse = self.true_lse.abs()
        largest = _largest(visible_sizes) + _largest(lse.masked_fill(~lse.isfinite(), 0))
        return 2 * torch.finfo(lse_dtype).eps * largest

    @cached_property
    def rounding_of_output(self) -> float:
        """Return `rounding` times the largest |v|: the effect of rounded scores on an output."""
        if self.values is None:
            return 0.0
        v = self.values.double().abs()
        return self.rounding * _largest(v.masked_fill(~v.isfinite(), 0))

    @property
    def plain_lse(self) -> list[Tensor]:
        """Return the lse by plain arithmetic, in several orders."""
        return [lse for lse, _ in self._plain]

    @property
    def plain_out(self) -> list[Tensor]:
        """Return the output by plain arithmetic, in several orders."""
        return [out for _, out in self._plain if out is not None]


def audit_sample(place: Place, number: int, own: slice) -> AuditSample:
    """Collect what the audit needs about some rows of a step."""
    step, heads = place.steps[number], place.heads
    inputs = place.score_inputs(step, own, slice(0, len(step.columns)), heads)
    inputs = inputs._replace(visible=inputs.visible.expand(inputs.dot.shape))
    v = place.values(step)
    if v is not None:
        v = v[:, place.groups_read(step)]
    return AuditSample(place, step, place.first_row(number) + own.start, own, inputs, v)


def _largest(x: Tensor) -> float:
    """Return the largest entry, or 0 for an empty tensor."""
    return float(x.max()) if x.numel() else 0.0


def lse_of(s: Tensor) -> Tensor:
    """Compute ln sum_j exp(s_ij), `[..., t]`; -inf for a row that sees no key."""
    return torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)


def _edited_output(sample: AuditSample, dtype: torch.dtype) -> Tensor | None:
    """Compute sum_j p_ij v_j with edited weights; NaN where a used value is not finite."""
    if sample.values is None:
        return None
    p = sample.place.step_block(
        sample.step, sample.own, slice(0, len(sample.step.columns)), sample.place.heads
    ).weights.to(dtype)
    non_finite = ~sample.values.isfinite()
    out = p @ sample.values.to(dtype).masked_fill(non_finite, 0)
    return out.masked_fill((p @ non_finite.any(-1, keepdim=True).to(dtype)) > 0, math.nan)


def _plain(sample: AuditSample, order: int) -> tuple[Tensor, Tensor | None]:
    """Compute (lse, out) by matmul and exp in the dtype of q, in a given order of sums."""
    step = sample.step
    if step.edited:
        lse = sample.true_lse.to(step.lse.dtype)
        return lse, None if sample.out is None else _edited_output(sample, sample.out.dtype)
    q, k = step.q[:, :, sample.own], sample.k
    generator = torch.Generator().manual_seed(order)
    keys, dims = (
        torch.randperm(n, generator=generator) if order else torch.arange(n)
        for n in (k.shape[2], k.shape[3])
    )
    s = (q[..., dims] * step.scale) @ k[:, :, keys][..., dims].mT
    if step.softcap is not None:
        s = step.softcap * torch.tanh(s / step.softcap)
    if sample.score_inputs.bias is not None:
        s = s + sample.score_inputs.bias[..., keys].to(s.dtype)
    s = s.masked_fill(~sample.score_inputs.visible[..., keys], -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    top = top.masked_fill(top.isneginf(), 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    sees_no_key = total == 0
    lse = top + total.masked_fill(sees_no_key, 1).log()
    lse = lse.masked_fill(sees_no_key, -math.inf)[..., 0]
    if sample.out is None or sample.values is None:
        return lse, None
    v = sample.values[:, :, keys]
    v = v.masked_fill(~v.isfinite(), 0)
    if step.sink is not None:
        sink = step.sink.to(s.dtype)[:, None, None]
        higher = torch.maximum(top.masked_fill(sees_no_key, -math.inf), sink)
        p = torch.exp(s - higher)
        total = p.sum(-1, keepdim=True) + torch.exp(sink - higher)
    return lse, p / total.masked_fill(total == 0, 1) @ v


class FaultHypothesis(NamedTuple):
    """A fault in words, and its scores; the sink is assumed to enter the outputs correctly."""

    words: str
    scores: Callable[[AuditSample], Tensor]


def explain_lse(samples: list[AuditSample], allowed: float) -> tuple[FaultHypothesis | None, str]:
    """Return the fault that explains every recorded lse, or None, and its description."""
    words = _fault_of_lse_value(samples, allowed)
    if words is not None:
        return None, words
    for hypothesis in hypotheses(samples):
        if all(_is_close(lse_of(hypothesis.scores(x)), x.lse, allowed) for x in samples):
            return hypothesis, hypothesis.words
    return None, _unexplained(samples, allowed)


def explain_output(
    samples: list[AuditSample], allowed: float, wrong: FaultHypothesis | None
) -> tuple[bool, str]:
    """Return whether the fault of the lse explains the outputs, or describe one that does."""
    kept_samples = [sample for sample in samples if sample.out is not None]

    def fits(hypothesis: FaultHypothesis) -> bool:
        return all(
            _gives_output(sample, hypothesis.scores(sample), sample.step.sink, allowed)
            for sample in kept_samples
        )

    if wrong is not None and fits(wrong):
        return True, ""
    if all(bool((sample.out == 0).all()) for sample in kept_samples if sample.out is not None):
        return False, "the output is zero everywhere: it was not written"
    if any(sample.step.sink is not None for sample in kept_samples) and all(
        _gives_output(sample, sample.scores, None, allowed) for sample in kept_samples
    ):
        return False, "the sink was left out of the output (the missing weight is P_sink)"
    for hypothesis in hypotheses(kept_samples):
        if fits(hypothesis):
            return False, f"{hypothesis.words} in the output, though not in the lse"
    return False, (
        "the output is not the weighted sum of the recorded values: the kernel used other "
        "values or other weights"
    )


def hypotheses(samples: list[AuditSample]) -> Iterator[FaultHypothesis]:
    """Generate the faults that these calls could show."""
    step = samples[0].step
    D = step.q.shape[-1]
    scales = {
        "not applied": 1.0,
        "applied twice": step.scale**2,
        "1/D": 1 / D,
        "1/sqrt(D)": D**-0.5,
    }
    for words, scale in scales.items():
        if scale != step.scale:
            yield FaultHypothesis(
                f"the scale was {words} ({scale:.4g}, not {step.scale:.4g})",
                _scores_at_scale(scale),
            )
    if step.softcap is not None:
        yield FaultHypothesis(
            "the softcap was not applied",
            lambda sample: sample.score_inputs.scores(sample.step.scale, None),
        )
    if step.bias is not None:
        yield FaultHypothesis(
            "the bias was not added", lambda sample: _changed_scores(sample, bias=None)
        )
    if step.sink is not None:
        yield FaultHypothesis("the lse includes the sink, although it must not", _with_sink)
    yield FaultHypothesis(
        "the mask was not applied: masked keys have weight",
        lambda sample: _changed_scores(
            sample, visible=torch.ones_like(sample.score_inputs.visible)
        ),
    )
    yield from _mask_faults(step.mask)
    yield FaultHypothesis("the newest keys were not used: the cache is stale", _without_newest_keys)
    fitted = _fitted_scale(samples)
    if fitted is not None:
        yield FaultHypothesis(
            f"the scale was {fitted:.4g}, not {step.scale:.4g}", _scores_at_scale(fitted)
        )


def _fault_of_lse_value(samples: list[AuditSample], allowed: float) -> str | None:
    """Return a fault of the stored number: zero, another logarithm, a constant offset."""
    recorded = torch.cat([sample.lse.double().flatten() for sample in samples])
    true = torch.cat([sample.true_lse.flatten() for sample in samples])
    finite = true.isfinite()
    recorded, true = recorded[finite], true[finite]
    if bool((recorded == 0).all()):
        return "the lse is 0 everywhere: it was not written"
    for words, c in (("a log of base 2", 1 / math.log(2)), ("multiplied by ln 2", math.log(2))):
        if float((recorded - c * true).abs().max()) <= 2 * allowed:
            return f"the lse is {c:.4g} times the natural one: {words}"
    differences = recorded - true
    d = float(differences.mean())
    if len(differences) > 1 and float((differences - d).abs().max()) <= 2 * allowed:
        ln2 = ", which is ln 2" * (abs(abs(d) - math.log(2)) <= 2 * allowed)
        return f"the lse is wrong by the constant {d:.4g}{ln2}"
    return None


def _mask_faults(mask: Mask) -> Iterator[FaultHypothesis]:
    """Generate faults of the mask: a term that was not applied, or a window that is off by one."""
    terms = mask.terms()
    for i, term in enumerate(terms):
        others = [x for n, x in enumerate(terms) if n != i]
        if others:
            rest = others[0] if len(others) == 1 else And(tuple(others))
            yield FaultHypothesis(f"the mask {term} was not applied", _scores_under_mask(rest))
        for other in term.near_misses():
            both = reduce(lambda a, b: a & b, [*terms[:i], other, *terms[i + 1 :]])
            yield FaultHypothesis(f"{term} was taken as {other}", _scores_under_mask(both))


def _changed_scores(sample: AuditSample, **change: Tensor | None) -> Tensor:
    """Return the scores after a change of their terms."""
    return sample.score_inputs._replace(**change).scores(sample.step.scale, sample.step.softcap)  # type: ignore[arg-type]


def _scores_at_scale(scale: float) -> Callable[[AuditSample], Tensor]:
    """Return a function that computes scores with another scale."""
    return lambda sample: sample.score_inputs.scores(scale, sample.step.softcap)


def _with_sink(sample: AuditSample) -> Tensor:
    """Return the scores with the sink as an additional key; this applies to the lse only."""
    s, sink = sample.scores, sample.step.sink
    assert sink is not None, "this fault is tried only where there is a sink"
    return torch.cat([s, sink.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)


def _scores_under_mask(mask: Mask) -> Callable[[AuditSample], Tensor]:
    """Return a function that computes scores under another mask."""

    def scores(sample: AuditSample) -> Tensor:
        step = sample.step
        rows = step.call_rows(sample.own)
        visible = mask.block(step.q_positions, step.k_positions, rows)
        visible = visible[:, list(sample.place.heads)] if visible.shape[1] > 1 else visible
        return _changed_scores(sample, visible=visible.expand(sample.score_inputs.dot.shape))

    return scores


def _without_newest_keys(sample: AuditSample) -> Tensor:
    """Return the scores without the keys at or after the positions of the call's own queries."""
    asked = as_tensor(sample.step.q_positions)
    first = torch.where(asked >= 0, asked, 1 << 62).amin(1)
    old = as_tensor(sample.step.k_positions) < first[:, None]  # [b,s]
    return _changed_scores(sample, visible=sample.score_inputs.visible & old[:, None, None])


def _fitted_scale(samples: list[AuditSample]) -> float | None:
    """Bisect for the scale that gives the lse of the worst row; None if there is none."""
    sample = samples[-1]  # the step with the most keys
    errors = (sample.true_lse - sample.lse.double()).abs()
    worst = errors.masked_fill(~errors.isfinite(), -1).argmax()
    row = torch.unravel_index(worst, errors.shape)
    target = float(sample.lse[row])
    dot, bias, visible = sample.score_inputs
    bias = None if bias is None else bias.expand(dot.shape)[row]
    inputs = ScoreInputs(dot[row], bias, visible[row])
    low, high = 0.0, 64 * abs(sample.step.scale)

    def lse_error(c: float) -> float:
        return float(lse_of(inputs.scores(c, sample.step.softcap))) - target

    if not lse_error(low) * lse_error(high) < 0:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lse_error(low) * lse_error(middle) > 0 else (low, middle)
    is_right = math.isclose(low, abs(sample.step.scale), rel_tol=1e-3)
    return None if is_right else math.copysign(low, sample.step.scale)


def _is_close(suspected: Tensor, recorded: Tensor, allowed: float) -> bool:
    """Compare with a bound that grows with the scores, since larger ones round more."""
    recorded = recorded.double()
    finite = suspected.isfinite()
    if not torch.equal(finite, recorded.isfinite()):
        return False
    bound = 2 * allowed * max(1.0, _largest(suspected[finite].abs()))
    return _largest((suspected - recorded)[finite].abs()) <= bound


def _gives_output(sample: AuditSample, s: Tensor, sink: Tensor | None, allowed: float) -> bool:
    """Return whether scores give the recorded output."""
    if s.shape[-1] != sample.score_inputs.dot.shape[-1]:
        return False
    out = sample.output(s, sink)
    assert out is not None, "only samples with outputs are compared"
    assert sample.out is not None, "only samples with outputs are compared"
    return _largest((out - sample.out.double())[out.isfinite()].abs()) <= 2 * allowed


def _unexplained(samples: list[AuditSample], allowed: float) -> str:
    """Describe the first wrong row where no known fault explains all of them."""
    for sample in samples:
        wrong = (sample.true_lse - sample.lse.double()).abs() > allowed
        if bool(wrong.any()):
            return (
                "the recorded q, k, mask and bias are not those that the kernel used, first in row "
                f"{sample.row(wrong)}: the kernel used stale or other keys, or another mask or bias"
            )
    return "the lse does not belong to the scores"


MAX_CHECKED_SCORES = 2**18
"""Number of scores of a place that are checked; for longer runs, evenly spaced rows are sampled."""

MAX_ROW_RANGES = 64
"""The largest number of row ranges that are sampled."""


@dataclass(frozen=True)
class RowSums:
    """Result of the audit of one place.

    Args:
        rows: number of rows that were checked, in every recorded head and batch row.
        of: number of all rows of the place.
        residual: the largest |ln sum_j exp(s_ij - lse_i)|, which is about |row sum - 1| where it is
            small.
        allowed: the bound on `residual`.
        output: the largest |sum_j p_ij v_j - out_i|; None if v or out was not kept, or with
            dropout.
        output_allowed: the bound on `output`, or None.
        findings: what is wrong, in words; empty if nothing is.
    """

    place: str
    rows: int
    of: int
    residual: float
    allowed: float
    output: float | None
    output_allowed: float | None
    findings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Return whether the audit found nothing wrong."""
        return not self.findings

    def __repr__(self) -> str:
        verdict = short_repr("; ".join(self.findings), 80) if self.findings else "sound"
        return f"RowSums({self.place}, {self.rows} of {plural(self.of, 'row')}: {verdict})"

    def __str__(self) -> str:
        out = ""
        if self.output is not None:
            out = f", output error {self.output:.2g} (allowed {self.output_allowed:.2g})"
        verdict = "; ".join(self.findings) or "sound"
        rows = f"{self.rows} of {plural(self.of, 'row')}"
        return (
            f"{self.place}: row-sum error {self.residual:.2g} (allowed {self.allowed:.2g}){out}, "
            f"{rows} checked: {verdict}"
        )


class ErrorBound(NamedTuple):
    """The largest error that was found, and the largest error that is allowed."""

    error: float
    allowed: float

    @property
    def fits(self) -> bool:
        """Return whether the error is within the bound; a NaN error is not."""
        return self.error <= self.allowed


def row_sums(place: Place, *, cells: int = MAX_CHECKED_SCORES) -> RowSums:
    """Audit what was recorded at a place.

    Args:
        cells: approximate number of scores to check; for longer runs, evenly spaced rows are
            sampled, among them the first and the last.

    Returns:
        The largest errors, their bounds, and what is wrong.

    >>> import regard
    >>> from regard.inspect import Recorder
    >>> q = torch.randn(1, 2, 8, 4)
    >>> with Recorder() as recorder:
    ...     _ = regard.attend(q, q, q, mask=regard.masks.Causal())
    >>> audit = row_sums(recorder.recording()[0])
    >>> audit.rows, audit.of, audit.sound
    (8, 8, True)
    """
    samples = [audit_sample(place, number, own) for number, own in _sample(place, cells)]
    rows = sum(e.rows for e in samples)
    findings = [*_special_row_findings(samples)]
    extra_rounding = max((e.rounding for e in samples), default=0.0)
    lse = _error_bound([(e.lse, e.plain_lse, e.true_lse) for e in samples], extra_rounding)
    fault = None
    if not lse.fits:
        fault, description = explain_lse(samples, lse.allowed)
        findings.append(
            f"{description}: row sums are wrong by up to a factor e^{lse.error:.2g}; "
            f"e^{lse.allowed:.2g} is allowed"
        )
    out = _output_error(samples)
    if out is not None and not out.fits:
        is_same_fault, description = explain_output(samples, out.allowed, fault)
        if not is_same_fault:
            findings.append(
                f"{description}: outputs are wrong by up to {out.error:.2g}; {out.allowed:.2g} is "
                "allowed"
            )
    error, bound = (None, None) if out is None else out
    return RowSums(place.name, rows, place.T, lse.error, lse.allowed, error, bound, tuple(findings))


def _sample(place: Place, cells: int) -> Iterator[tuple[int, slice]]:
    """Return ranges of rows of steps: all of them, or evenly spaced ones."""
    each = max(1, place.B * len(place.heads) * place.N)
    wanted, length = max(1, cells // each), 1
    if wanted >= place.T and len(place.steps) <= MAX_ROW_RANGES:
        yield from ((n, slice(0, step.T)) for n, step in enumerate(place.steps) if step.T)
        return
    length = max(1, wanted // MAX_ROW_RANGES)
    counts = [-(-step.T // length) for step in place.steps]  # ranges of each step
    cumulative_counts = list(itertools.accumulate(counts))
    total = cumulative_counts[-1]
    n = max(1, min(MAX_ROW_RANGES, wanted // length, total))
    chosen = {round(i * (total - 1) / max(1, n - 1)) for i in range(n)} | {total - 1}
    for index in sorted(chosen):
        number = bisect.bisect_right(cumulative_counts, index)
        start = (index - cumulative_counts[number] + counts[number]) * length
        yield number, slice(start, min(start + length, place.steps[number].T))


def _error_bound(
    triples: list[tuple[Tensor, list[Tensor], Tensor]], extra_rounding: float
) -> ErrorBound:
    """Apply the error rule, plus `extra_rounding`, to all samples together."""
    error = plain = rounding = 0.0
    for x, plains, ref in triples:
        finite = ref.isfinite()
        if not bool(finite.any()):
            continue
        error = max(error, _max_abs((x.double() - ref)[finite]))
        plain = max([plain, *(_max_abs((y.double() - ref)[finite]) for y in plains)])
        rounding = max(rounding, two_roundings(ref, x.dtype))
    return ErrorBound(error, 2 * plain + rounding + extra_rounding)


def _max_abs(x: Tensor) -> float:
    """Return the largest |x|; NaN counts as infinite."""
    return float(torch.where(x.isnan(), torch.inf, x.abs()).max()) if x.numel() else 0.0


def _output_error(samples: list[AuditSample]) -> ErrorBound | None:
    """Return the error of the outputs, or None if no sample has any."""
    triples = [
        # rows that see no key are checked separately
        (e.out, e.plain_out, e.true_out.masked_fill(e.true_lse.isneginf()[..., None], torch.nan))
        for e in samples
        if e.out is not None and e.true_out is not None
    ]
    return _error_bound(triples, max(e.rounding_of_output for e in samples)) if triples else None


def _special_row_findings(samples: list[AuditSample]) -> Iterator[str]:
    """Return findings about rows that see no key, and about NaN that no visible number explains."""
    for e in samples:
        sees_no_key = e.true_lse.isneginf()
        wrong = sees_no_key & ~e.lse.isneginf()
        if bool(wrong.any()):
            value = float(e.lse[wrong][0])
            yield (
                f"a row that sees no key has the lse {value:g} (row {e.row(wrong)}); it must "
                "be -inf"
            )
            break
    for e in samples:
        sees_no_key = e.true_lse.isneginf()
        if e.out is not None and bool((e.out != 0).any(-1)[sees_no_key].any()):
            yield "a row that sees no key has an output other than 0"
            break
    for e in samples:
        wrong = e.lse.isnan() & e.true_lse.isfinite()
        if bool(wrong.any()):
            yield f"the lse is NaN although nothing visible is NaN (row {e.row(wrong)})"
            break
