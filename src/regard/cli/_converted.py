"""What `regard convert` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from regard.models.convert.checkpoint import Step
    from regard.models.convert.measure import Measured
    from regard.models.convert.report import Healing, Report


def show(report: Report) -> None:
    """The report as lines."""
    typer.echo("\n".join(lines(report)))


def lines(report: Report) -> Iterator[str]:
    """What was done, what it lost on a text and in each layer, and what healing brought."""
    yield f"{report.source} -> {report.out}"
    for step in report.steps:
        yield f"  {step.what}"
        yield from (f"  note: {note}" for note in step.notes)
    yield from _measured(report.measured)
    yield ""
    yield f"{'':24}{'before':>14}{'after':>14}"
    before, after = report.before, report.after
    yield f"{'family':24}{before.model_type:>14}{after.model_type:>14}"
    yield f"{'dtype':24}{before.dtype:>14}{after.dtype:>14}"
    yield f"{'parameters':24}{before.parameters:>14,}{after.parameters:>14,}"
    yield f"{'values cached per token':24}{before.kept:>14,}{after.kept:>14,}"
    for step in report.steps:
        yield from _errors(step)
    if report.healing is not None:
        yield from _healing(report.healing)


def _measured(m: Measured) -> Iterator[str]:
    """KL and agreement first: they compare the two models, whatever the text is; a loss depends on it."""
    what = m.text or "ids drawn at random (seed 0): there is no tokenizer, and a loss means nothing"
    yield ""
    yield f"on {m.tokens:,} predicted tokens in {m.rows} windows of {m.length}, {what}:"
    spread = (
        "; ± is the standard error over windows" if m.rows > 1 else "; one window has no spread"
    )
    yield f"  KL(before | after)      {m.divergence:.4g}{_pm(m.divergence_error)} nats per token{spread}"
    yield f"  likeliest token same    {m.agreement:.1%}{_pm(100 * m.agreement_error, ' %')}"
    if not math.isnan(m.loss_before):
        yield (
            f"  loss, nats per token    {m.loss_before:.4f} -> {m.loss_after:.4f}: "
            f"{m.loss_change:+.4f}{_pm(m.loss_change_error)}"
        )
        yield f"  perplexity              {m.perplexity_before:.3f} -> {m.perplexity_after:.3f}"
    yield f"  logits differ by        {m.largest:.3g} at most, by {m.relative:.3g} of their norm"
    if m.short:
        yield "  that is a short text, on which such figures can mislead: give a longer one (--text, --tokens)"


def _pm(error: float, unit: str = "") -> str:
    """A standard error, or nothing."""
    return "" if math.isnan(error) else f" ± {error:.2g}{unit}"


def _errors(step: Step) -> Iterator[str]:
    """Weight errors by layer, and against the rank."""
    if step.layers and any(max(error) > 0 for error in step.layers):
        yield ""
        yield f"{step.what.partition(':')[0]}: relative weight error (Frobenius, of scores and of values to outputs)"
        for i, error in enumerate(step.layers):
            yield f"  layer {i:<4} scores {error.keys:<10.3g} values {error.values:.3g}"
    if step.curve:
        yield ""
        yield "error of what a latent carries, by its rank (root mean square over layers):"
        for rank, lost in step.curve.items():
            yield f"  {rank:>6}  {lost:<9.2e} {'#' * round(40 * lost)}".rstrip()


def _healing(h: Healing) -> Iterator[str]:
    yield ""
    yield (
        f"healing: {h.steps} steps of {h.batch} x {h.length} tokens, AdamW on all weights, peak learning rate {h.lr:g}, "
        f"seed {h.seed}"
    )
    yield f"  trained text, {h.tokens:,} tokens: loss {h.loss_before:.4f} -> {h.loss_after:.4f}"
    if h.held_tokens:
        yield f"  held back, {h.held_tokens:,} tokens: loss {h.held_before:.4f} -> {h.held_after:.4f}"
    else:
        yield "  nothing was held back (fewer than 10 windows): the loss is that of the text that was learnt"
