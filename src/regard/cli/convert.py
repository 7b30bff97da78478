"""`regard convert`: one checkpoint folder into another, and what that costs."""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from regard.cli.options import Ignore, Revision, tell_ignored
from regard.errors import ArgumentError, FileError
from regard.files.regular import text
from regard.table import table

if TYPE_CHECKING:
    from regard.models.convert.layer import Step
    from regard.models.convert.report import Healing, Measured, Report
    from regard.models.convert.run import Heal


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
    before, after = report.before, report.after
    yield table(
        [
            ["", "before", "after"],
            ["family", before.model_type, after.model_type],
            ["dtype", before.dtype, after.dtype],
            ["parameters", f"{before.parameters:,}", f"{after.parameters:,}"],
            ["values cached per token", f"{before.kept:,}", f"{after.kept:,}"],
        ]
    )
    for step in report.steps:
        yield from _errors(step)
    if report.healing is not None:
        yield from _healing_converted(report.healing)


def _measured(m: Measured) -> Iterator[str]:
    """KL and agreement first: they compare the two models, whatever the text is; a loss depends on
    it.
    """
    what = m.text or "ids drawn at random (seed 0): there is no tokenizer, and a loss means nothing"
    yield ""
    yield f"on {m.tokens:,} predicted tokens in {m.rows} windows of {m.length}, {what}:"
    spread = (
        "; ± is the standard error over windows" if m.rows > 1 else "; one window has no spread"
    )
    yield (
        f"  KL(before | after)      {m.divergence:.4g}{_pm(m.divergence_error)} nats per "
        f"token{spread}"
    )
    yield f"  likeliest token same    {m.agreement:.1%}{_pm(100 * m.agreement_error, ' %')}"
    if not math.isnan(m.loss_before):
        yield (
            f"  loss, nats per token    {m.loss_before:.4f} -> {m.loss_after:.4f}: "
            f"{m.loss_change:+.4f}{_pm(m.loss_change_error)}"
        )
        yield f"  perplexity              {m.perplexity_before:.3f} -> {m.perplexity_after:.3f}"
    yield f"  logits differ by        {m.largest:.3g} at most, by {m.relative:.3g} of their norm"
    if m.short:
        yield (
            "  that is a short text, on which such figures can mislead: give a longer one "
            "(--text, --tokens)"
        )


def _pm(error: float, unit: str = "") -> str:
    """A standard error, or nothing."""
    return "" if math.isnan(error) else f" ± {error:.2g}{unit}"


def _errors(step: Step) -> Iterator[str]:
    """Weight errors by layer, and against the rank."""
    if step.layers and any(max(error) > 0 for error in step.layers):
        yield ""
        yield (
            f"{step.what.partition(':')[0]}: relative weight error (Frobenius, of scores and of "
            "values to outputs)"
        )
        for i, error in enumerate(step.layers):
            yield f"  layer {i:<4} scores {error.keys:<10.3g} values {error.values:.3g}"
    if step.curve:
        yield ""
        yield "error of what a latent carries, by its rank (root mean square over layers):"
        for rank, lost in step.curve.items():
            yield f"  {rank:>6}  {lost:<9.2e} {'#' * round(40 * lost)}".rstrip()


def _healing_converted(h: Healing) -> Iterator[str]:
    yield ""
    yield (
        f"healing: {h.steps} steps of {h.batch} x {h.length} tokens, AdamW on all weights, peak "
        f"learning rate {h.lr:g}, "
        f"seed {h.seed}"
    )
    yield f"  trained text, {h.tokens:,} tokens: loss {h.loss_before:.4f} -> {h.loss_after:.4f}"
    if h.held_tokens:
        yield (
            f"  held back, {h.held_tokens:,} tokens: loss {h.held_before:.4f} -> {h.held_after:.4f}"
        )
    else:
        yield (
            "  nothing was held back (fewer than 10 windows): the loss is that of the text that "
            "was learnt"
        )


EPILOG = "For example: regard convert tiny tiny-mla --to mla --rank 96"

LONGEST = 1 << 30
"""Bytes of a text to measure on, at most."""
HEADS, POSITIONS, MEASURING, HEALING = "Attention", "Positions", "Measuring", "Healing"

Source = Annotated[
    str,
    typer.Argument(help='A Hugging Face folder, "tiny", or org/name on the hub.', metavar="FOLDER"),
]
Out = Annotated[
    Path, typer.Argument(help="The folder to write; it must be new, or empty.", metavar="OUT")
]
To = Annotated[
    str | None,
    typer.Option(
        help="mha, gqa (with --kv-heads), mqa, or mla (with --rank).",
        rich_help_panel=HEADS,
        show_default="as it is",
    ),
]
KvHeads = Annotated[
    int | None,
    typer.Option(
        help="Key/value heads: fewer are pooled, more are repeated.", min=1, rich_help_panel=HEADS
    ),
]
Groups = Annotated[
    str,
    typer.Option(
        help="How heads are pooled: mean, or svd (queries and outputs take the differences).",
        rich_help_panel=HEADS,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        help="Size of the latent, kv_lora_rank.",
        min=2,
        rich_help_panel=HEADS,
        show_default="full: nothing is cut",
    ),
]
RotaryLayout = Annotated[
    str | None,
    typer.Option(
        help="half or interleaved: which dims make a rotary pair.", rich_help_panel=POSITIONS
    ),
]
StoredLayout = Annotated[
    str | None,
    typer.Option(
        help="The layout that the weights have, where config.json says the other.",
        rich_help_panel=POSITIONS,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens to reach by scaled rotary positions.", min=1, rich_help_panel=POSITIONS
    ),
]
Scaling = Annotated[
    str, typer.Option(help="linear, ntk, dynamic, yarn or llama3.", rich_help_panel=POSITIONS)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of the weights: float32, float16, bfloat16 or float64.", show_default="as it is"
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file to measure on.",
        show_default="the topics of pydoc",
        rich_help_panel=MEASURING,
    ),
]
Tokens = Annotated[
    int, typer.Option(help="Measure on at most so many tokens.", min=2, rich_help_panel=MEASURING)
]
Length = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a window.",
        min=2,
        show_default="the trained length, at most 512",
        rich_help_panel=MEASURING,
    ),
]
HealSteps = Annotated[
    int | None,
    typer.Option(
        "--heal",
        help="Train so many steps on the text, all weights.",
        min=1,
        rich_help_panel=HEALING,
    ),
]
Lr = Annotated[float, typer.Option(help="Peak learning rate of --heal.", rich_help_panel=HEALING)]
Batch = Annotated[
    int, typer.Option(help="Windows of a step of --heal.", min=1, rich_help_panel=HEALING)
]
Seed = Annotated[int, typer.Option(help="Of the order of --heal.", rich_help_panel=HEALING)]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def convert(
    folder: Source,
    out: Out,
    to: To = None,
    kv_heads: KvHeads = None,
    groups: Groups = "mean",
    rank: Rank = None,
    rotary_layout: RotaryLayout = None,
    stored_layout: StoredLayout = None,
    context: Context = None,
    scaling: Scaling = "yarn",
    dtype: Dtype = None,
    revision: Revision = None,
    ignore: Ignore = None,
    text: Text = None,
    tokens: Tokens = 4096,
    length: Length = None,
    heal: HealSteps = None,
    lr: Lr = 3e-4,
    batch: Batch = 4,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write a checkpoint with other heads, latents, positions or dtype, and say what it lost.

    The input is never changed, and nothing is written over: OUT is whole, or not there.
    """
    from regard.models.convert import Wanted
    from regard.models.convert import convert as run

    given: dict[str, Any] = {
        "pooling": groups,
        "rotary_layout": rotary_layout,
        "stored_layout": stored_layout,
        "scaling": scaling,
    }
    try:
        wanted = Wanted(to, kv_heads, rank=rank, context=context, dtype=dtype, **given)
        report = run(
            folder,
            out,
            wanted,
            text=_read(text),
            tokens=tokens,
            length=length,
            revision=revision,
            ignore=ignore or (),
            heal=_healing(heal, lr=lr, batch=batch, seed=seed),
            tell=_tell,
        )
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    tell_ignored(report.ignored)
    if json:
        typer.echo(json_format.dumps(report.figures()))
    else:
        show(report)


def _healing(steps: int | None, **how: Any) -> Heal | None:
    """What trains the converted model, or None."""
    if steps is None:
        return None
    from regard.train.finetune import finetune
    from regard.train.progress import make_progress

    return cast("Heal", partial(finetune, steps=steps, progress=make_progress(steps), **how))


def _tell(line: str) -> None:
    """Where the work stands, for somebody who waits."""
    if sys.stderr.isatty():
        typer.echo(f"{line} ...", err=True)


def _read(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return text(file, LONGEST)
    except FileError as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
