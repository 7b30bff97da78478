"""The command `regard convert`, which writes a converted copy of a checkpoint folder, and reports
the error of the conversion.
"""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.options import (
    IGNORE,
    JSON,
    REVISION,
    argument,
    note,
    option,
    report_ignored,
    usage_error,
)
from regard.errors import FileError
from regard.files.reading import read_text
from regard.language import translate, translate_count
from regard.text_table import format_table, line_width, wrap

if TYPE_CHECKING:
    from regard.models.convert.attention_maps import ConversionStep
    from regard.models.convert.folder import Finetune
    from regard.models.convert.report import ConversionReport, FinetuneResult, ModelComparison


def print_report(report: ConversionReport) -> None:
    """Print the report of a conversion."""
    width = line_width()
    for line in report_lines(report):
        is_table = "\n" in line
        typer.echo(line if is_table else wrap(line, width, hang="    "))


def report_lines(report: ConversionReport) -> Iterator[str]:
    """Yield the lines of the report: the steps, the loss on a text and in each layer, and the
    effect of finetuning.
    """
    yield f"{report.source} -> {report.out}"
    for step in report.steps:
        yield f"  {translate(step.what)}"
        yield from ("  " + translate("note: {note}", note=translate(x)) for x in step.notes)
    yield from _measurement_lines(report.measured)
    yield ""
    before, after = report.before, report.after
    yield format_table(
        [
            ["", translate("before"), translate("after")],
            [translate("family"), before.model_type, after.model_type],
            ["dtype", before.dtype, after.dtype],
            [translate("parameters"), f"{before.parameters:,}", f"{after.parameters:,}"],
            [
                translate("values cached per token"),
                f"{before.cached_values:,}",
                f"{after.cached_values:,}",
            ],
        ],
        width=line_width(),
    )
    for step in report.steps:
        yield from _weight_error_lines(step)
    if report.hidden_errors:
        yield ""
        yield translate("relative change of the hidden states after each layer (norms):")
        for i, error in enumerate(report.hidden_errors):
            yield translate("  layer {i:<4} {error:.3g}", i=i, error=error)
    if report.finetuning is not None:
        yield from _finetuning_lines(report.finetuning)


def _measurement_lines(measured: ModelComparison) -> Iterator[str]:
    """Yield the lines about the measurements on a text.

    KL divergence and agreement come first, because they compare the two models whatever the text
    is; a loss depends on the text.
    """
    text = (
        measured.text
        or "ids drawn at random (seed 0): there is no tokenizer, and a loss means nothing"
    )
    yield ""
    yield translate(
        "on {tokens:,} predicted tokens in {rows} windows of {length}, {text}:",
        tokens=measured.tokens,
        rows=measured.rows,
        length=measured.length,
        text=translate(text),
    )
    error_note = (
        "; ± is the standard error over windows"
        if measured.rows > 1
        else "; one window gives no standard error"
    )
    yield translate(
        "  KL(before | after)      {divergence:.4g}{divergence_error} nats per token{error_note}",
        divergence=measured.divergence,
        divergence_error=_plus_minus(measured.divergence_error),
        error_note=translate(error_note),
    )
    yield translate(
        "  same likeliest token    {agreement:.1%}{error}",
        agreement=measured.agreement,
        error=_plus_minus(100 * measured.agreement_error, " %"),
    )
    if not math.isnan(measured.loss_before):
        yield translate(
            "  loss, nats per token    {loss_before:.4f} -> {loss_after:.4f}: "
            "{loss_change:+.4f}{loss_change_error}",
            loss_before=measured.loss_before,
            loss_after=measured.loss_after,
            loss_change=measured.loss_change,
            loss_change_error=_plus_minus(measured.loss_change_error),
        )
        yield translate(
            "  perplexity              {before} -> {after}",
            before=f"{measured.perplexity_before:.3f}",
            after=f"{measured.perplexity_after:.3f}",
        )
    yield translate(
        "  logits differ by        {largest:.3g} at most, by {relative:.3g} of their norm",
        largest=measured.largest,
        relative=measured.relative,
    )
    if measured.short:
        yield translate(
            "  that is a short text, on which such figures can mislead: give a longer one "
            "(--text, --tokens)"
        )


def _plus_minus(error: float, unit: str = "") -> str:
    """Return a standard error as text, or nothing if there is none."""
    return "" if math.isnan(error) else f" ± {error:.2g}{unit}"


def _weight_error_lines(step: ConversionStep) -> Iterator[str]:
    """Yield the weight errors by layer, and the error by rank."""
    if step.layers and any(max(error) > 0 for error in step.layers):
        yield ""
        yield translate(
            "{step}: relative weight error (Frobenius, of scores and of values to outputs)",
            step=translate(step.what).partition(translate(": "))[0],
        )
        for i, error in enumerate(step.layers):
            yield translate(
                "  layer {i:<4} scores {keys:<10.3g} values {values:.3g}",
                i=i,
                keys=error.keys,
                values=error.values,
            )
    if step.curve:
        yield ""
        yield translate("error of the latent by rank (root mean square over layers):")
        for rank, lost in step.curve.items():
            yield f"  {rank:>6}  {lost:<9.2e} {'#' * round(40 * lost)}".rstrip()


def _finetuning_lines(result: FinetuneResult) -> Iterator[str]:
    """Yield the lines about the finetuning: its settings, and the loss before and after it."""
    yield ""
    yield translate(
        "finetuning: {steps} of {batch} x {length} tokens, AdamW on all weights, peak "
        "learning rate {lr:g}, seed {seed}",
        steps=translate_count(result.steps, "step"),
        batch=result.batch,
        length=result.length,
        lr=result.lr,
        seed=result.seed,
    )
    yield translate(
        "  trained text, {tokens}: loss {loss_before:.4f} -> {loss_after:.4f}",
        tokens=translate_count(result.tokens, "token"),
        loss_before=result.loss_before,
        loss_after=result.loss_after,
    )
    if result.held_tokens:
        yield translate(
            "  held-out text, {tokens}: loss {held_before:.4f} -> {held_after:.4f}",
            tokens=translate_count(result.held_tokens, "token"),
            held_before=result.held_before,
            held_after=result.held_after,
        )
    else:
        yield translate(
            "  no text was held out (fewer than 10 windows): the loss is that of the text that "
            "was trained on"
        )


EPILOG = "For example: regard convert tiny tiny-mla --to mla --rank 96"

MAX_TEXT_BYTES = 1 << 30
"""The maximum size in bytes of a text to measure on."""
head_option = partial(option, panel="Attention")
position_option = partial(option, panel="Positions")
measuring_option = partial(option, panel="Measurement")
healing_option = partial(option, panel="Finetuning")


def convert(
    folder: str = argument(
        'The checkpoint to convert: a Hugging Face folder, a GGUF file, "smollm2", or org/name on '
        "the hub.",
        default=...,
        metavar="FOLDER",
    ),
    out: Path = argument(
        "The folder to write; it must be new or empty.", default=..., metavar="OUT"
    ),
    to: str | None = head_option(
        "Attention of the new checkpoint: mha, gqa (with --kv-heads), mqa, or mla (with --rank).",
        shown="unchanged",
    ),
    kv_heads: int | None = head_option(
        "Number of key/value heads. For fewer heads, heads are pooled; for more, heads are "
        "repeated.",
        min=1,
    ),
    groups: str | None = head_option(
        "How heads are pooled: mean, or svd, which moves the differences into the query and "
        "output matrices.",
        shown="svd, or mean where a norm follows the heads",
    ),
    rank: int | None = head_option(
        "Size of the MLA latent, kv_lora_rank.", shown="full rank, which is exact", min=2
    ),
    rotary_layout: str | None = position_option(
        "Which dims form a rotary pair in the new checkpoint: half or interleaved."
    ),
    stored_layout: str | None = position_option(
        "The rotary layout of the stored weights, if config.json has the wrong one."
    ),
    context: int | None = position_option(
        "Context length to reach by scaling rotary positions, in tokens.", min=1
    ),
    scaling: str = position_option(
        "Method of --context: linear, ntk, dynamic, yarn or llama3.", default="yarn"
    ),
    dtype: str | None = option(
        "Number format of the weights: float32, float16, bfloat16 or float64.", shown="unchanged"
    ),
    weights: str | None = option(
        "Store the weights of linear maps, head and embedding as int8 or int4.", shown="unchanged"
    ),
    revision: str | None = REVISION,
    ignore: list[str] | None = IGNORE,
    text: Path | None = measuring_option(
        "Text file on which both models are measured.", shown="the topics of pydoc"
    ),
    tokens: int = measuring_option("Maximum number of tokens to measure on.", default=4096, min=2),
    length: int | None = measuring_option(
        "Number of tokens in a window of the text.", shown="the trained length, at most 512", min=2
    ),
    heal: int | None = healing_option(
        "Finetune all weights on the text for this many steps after the conversion.",
        "--heal",
        min=1,
    ),
    lr: float = healing_option("Peak learning rate of --heal.", default=1e-4),
    batch: int = healing_option("Number of windows in a step of --heal.", default=4, min=1),
    seed: int = healing_option("Random seed for the order of the data in --heal.", default=0),
    json: bool = JSON,
) -> None:
    """Write a checkpoint with other heads, latents, positions, dtype or weights of fewer bits,
    and report what the conversion loses.

    The input is never changed, and no file is overwritten. OUT is written completely or not at
    all.
    """
    from regard.models.convert import ConversionOptions
    from regard.models.convert import convert as run

    options: dict[str, Any] = {
        "pooling": groups,
        "rotary_layout": rotary_layout,
        "stored_layout": stored_layout,
        "scaling": scaling,
        "weights": weights,
    }
    if not any((to, kv_heads, rotary_layout, context, dtype, weights)):
        raise usage_error(
            None,
            "there is nothing to change; give --to, --kv-heads, --rotary-layout, --context, "
            "--dtype or --weights",
        )
    wanted = ConversionOptions(to, kv_heads, rank=rank, context=context, dtype=dtype, **options)
    report = run(
        folder,
        out,
        wanted,
        text=_read_text_option(text),
        tokens=tokens,
        length=length,
        revision=revision,
        ignore=ignore or (),
        finetune=_finetuning(heal, lr=lr, batch=batch, seed=seed),
        report_progress=_report,
    )
    report_ignored(report.ignored)
    if json:
        typer.echo(json_format.dumps(report.figures()))
    else:
        print_report(report)


def _finetuning(steps: int | None, **settings: Any) -> Finetune | None:
    """Return the function that finetunes the converted model, or None."""
    if steps is None:
        return None
    from regard.train.finetune import finetune
    from regard.train.progress import make_progress

    return partial(finetune, steps=steps, progress=make_progress(steps), **settings)


def _report(line: str) -> None:
    """Print the current work on standard error, on a terminal only."""
    if sys.stderr.isatty():
        note(line, "... ")


def _read_text_option(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return read_text(file, MAX_TEXT_BYTES)
    except FileError as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
