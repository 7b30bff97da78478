"""The command `regard compare`, which compares the cost of attention mechanisms on this machine,
and with --quality also how well each learns.
"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regard.cli.options import (
    HTML_PAGE,
    JSON,
    THREADS,
    argument,
    check_device_option,
    check_files,
    command_line,
    grouped,
    note,
    option,
    options_on_command_line,
    refuse_given,
    usage_error,
)
from regard.language import Phrase, translate
from regard.text_table import line_width, wrap

if TYPE_CHECKING:
    from regard.compare.comparison import Comparison, ComparisonPlan
    from regard.compare.speed_and_memory import Timing

size_option = partial(option, panel="Sizes")
time_option = partial(option, panel="Measurements")
quality_option = partial(option, panel="Quality (training)")
output_option = partial(option, panel="Output")
EPILOG = (
    "For example: regard compare mha mqa window linear --quality --out compared --html "
    "compared.html"
)


@dataclass
class ComparedSizes:
    """The sizes that all models have."""

    like: str | None = size_option(
        "Model whose sizes are used, such as qwen2-0.5b (regard cost --list names them), or a "
        "config.json; it replaces --dim, --layers, --heads and --hidden.",
        shown="the sizes below",
        metavar="MODEL",
    )
    dim: int = size_option("Model width M.", default=128, min=2)
    layers: int = size_option("Number of layers.", default=2, min=1)
    heads: int = size_option("Number of query heads H.", default=4, min=1)
    hidden: int | None = size_option("Width of the feed-forward layers.", shown="8/3 of dim", min=1)
    window: int | None = size_option(
        "Number of tokens in a sliding window, in a segment of Infini-attention, and in the "
        "cache of the mechanism sinks.",
        shown="as regard cost --mechanisms",
        min=1,
    )
    same: str = size_option(
        "What all models have in common: sizes, or parameters, where the feed-forward width "
        "is chosen to match.",
        default="sizes",
    )


@dataclass
class Measurements:
    """What is measured, and how often."""

    context: list[int] | None = time_option(
        "Context length: tokens of the timed prompt, and of the sequence whose last token is "
        "decoded. Repeatable.",
        shown="512, 2048, 8192",
        min=1,
    )
    length: int = time_option("Number of tokens of a row in training.", default=256, min=2)
    batch: int = time_option("Number of rows of a training step.", default=8, min=1)
    training: bool = time_option(
        "Whether to time a training step, which needs 16 bytes for each parameter.",
        "--training/--no-training",
        default=True,
    )
    rounds: int = time_option(
        "Number of rounds; each times every mechanism once.", default=7, min=1
    )
    seconds: float = time_option(
        "Time limit of the rounds of each measurement, in seconds.", default=20.0, min=0.01
    )
    memory: bool = time_option(
        "Whether to measure peak memory, in a separate process for each mechanism.",
        "--memory/--no-memory",
        default=True,
    )
    threads: int | None = THREADS
    device: str | None = time_option(
        "Device on which models run and are trained: cpu or cuda.", shown="the CPU"
    )

    @property
    def timing(self) -> Timing:
        """How a prompt, a token and a training step are timed."""
        from regard.compare.speed_and_memory import Timing

        return Timing(
            tuple(sorted(set(self.context))) if self.context else Timing().contexts,
            self.length,
            self.batch,
            self.rounds,
            self.seconds,
            training=self.training,
            device=self.device or "cpu",
        )


@dataclass
class Quality:
    """What each model is trained on, and how long."""

    quality: bool = quality_option(
        "Also train each mechanism, on the same text and recall tasks.", "--quality", default=False
    )
    task: list[str] | None = quality_option(
        "Task to train on and test with: text, mqar or passkey. Repeatable.",
        "--task",
        shown="all three",
    )
    text: str = quality_option(
        "Text to train on, read as bytes: a UTF-8 file, a folder, or python-docs.",
        default="python-docs",
    )
    minutes: float = quality_option(
        "Time limit for the whole run in minutes; training is shortened to fit.",
        default=30.0,
        min=0.1,
    )
    steps: int | None = quality_option(
        "Number of optimizer steps, whatever time they take.", shown="as many as fit", min=1
    )
    lr: list[float] | None = quality_option(
        "Learning rate for all mechanisms. Repeatable: the rate with the lowest validation "
        "loss is used.",
        "--lr",
        shown="0.003; for recurrent mechanisms 0.001, 0.003 and 0.01",
    )
    seeds: int = quality_option(
        "Number of random seeds 0, 1, ...; a model is trained with each.", default=1, min=1
    )

    def check(self) -> None:
        """Raise an error for options of training if --quality is not given."""
        if self.quality:
            return
        flags = {"--task": self.task, "--steps": self.steps, "--lr": self.lr}
        flags |= {"--seeds": self.seeds > 1, "--text": self.text != "python-docs"}
        refuse_given(flags, "applies only to training; give --quality too, or leave it out")


@dataclass
class ComparisonOutput:
    """The files to which the results are written."""

    out: Path | None = output_option(
        "Folder in which measurements are saved; a later run with the same folder continues."
    )
    json: bool = JSON
    csv: Path | None = output_option(
        "Write a line of CSV for each mechanism to this file.", metavar="FILE"
    )
    html: Path | None = HTML_PAGE


@grouped
def compare(
    ctx: typer.Context,
    names: list[str] | None = argument(
        "Mechanisms: names that --list shows, or names of the catalogue (regard describe) "
        "with options: gqa:groups=1, retention.",
        shown="those of --list",
        metavar="MECHANISM",
    ),
    *,
    sizes: ComparedSizes,
    measurements: Measurements,
    quality: Quality,
    output: ComparisonOutput,
    list_: bool = output_option(
        "List the default mechanisms and the tasks, and exit.", "--list", default=False
    ),
) -> None:
    """Measure attention mechanisms as decoders of one shape: cache size, time of a prompt, a token
    and a training step, and peak memory.

    All models have the same sizes, or the same number of parameters. They are timed in turns, and
    the kernels that ran are listed. With --quality, each model is also trained on the same tokens.
    Ctrl-C prints the results so far; with --out, the same command continues later.
    """
    _check_like(ctx, sizes)
    if list_:
        typer.echo(_listing())
        return
    check_files({"--csv": output.csv, "--html": output.html})
    check_device_option(measurements.device)
    quality.check()
    plan = _plan(names, sizes, measurements, quality)
    from regard.nn.variants.registry import written

    for one in plan.candidates:
        note(f"{one.name}: {written(one.attention, one.options)}", "... ")
    comparison = _comparison(plan, measurements, quality, output.out)
    interrupted = _run(comparison)
    _show(comparison, command_line(), output, interrupted=interrupted)
    if interrupted:
        if output.out is not None:
            note("interrupted; the same command continues from the saved measurements")
        raise typer.Exit(130)


def _plan(
    names: list[str] | None, sizes: ComparedSizes, measurements: Measurements, quality: Quality
) -> ComparisonPlan:
    """Return what is compared, and under which budget."""
    import torch

    from regard.compare.comparison import ComparisonPlan
    from regard.compare.mechanisms import RECALL_TASKS, Shape, candidates, configs
    from regard.compare.quality import TrainingSettings, eval_tasks
    from regard.compare.speed_and_memory import check_fits, shape_like

    if measurements.threads:
        torch.set_num_threads(measurements.threads)
    timing = measurements.timing
    shape = (
        shape_like(sizes.like, sizes.window)
        if sizes.like
        else Shape(sizes.dim, sizes.layers, sizes.heads, sizes.hidden, window=sizes.window)
    )
    training = TrainingSettings(
        tuple(range(quality.seeds)),
        tuple(quality.lr) if quality.lr else None,
        device=timing.device,
    )
    chosen = candidates(names, shape)
    built = configs(chosen, shape, sizes.same)
    if sizes.like:
        check_fits(built, timing, sizes.like)
    tasks = []
    if quality.quality:
        wanted = quality.task or ["text", *RECALL_TASKS]
        tasks = eval_tasks(wanted, source=quality.text, length=timing.length, batch=timing.batch)
    return ComparisonPlan(chosen, built, shape, sizes.same, timing, tasks, training)


def _check_like(context: typer.Context, sizes: ComparedSizes) -> None:
    """Leave `window` to the model of --like, and raise an error for sizes that it replaces."""
    names = ("dim", "layers", "heads", "hidden", "window")
    given_names = options_on_command_line(context, names)
    if not sizes.like:
        return
    for name in sorted(given_names - {"window"}):
        raise usage_error(
            f"--{name}",
            "is one of the sizes of {model}, which --like gives; leave one of them out",
            model=sizes.like,
        )
    if "window" not in given_names:
        sizes.window = None


def _comparison(
    plan: ComparisonPlan, measurements: Measurements, quality: Quality, out: Path | None
) -> Comparison:
    import torch

    from regard.compare.comparison import Comparison
    from regard.compare.experiment import ExperimentStore, Session
    from regard.timing import describe_machine

    machine_facts = describe_machine(torch.device(plan.timing.device))
    session = Session(ExperimentStore(out, {"machine": machine_facts}), _report)
    return Comparison(
        plan,
        session,
        machine_facts,
        minutes=quality.minutes,
        steps=quality.steps,
        with_memory=measurements.memory,
    )


def _run(comparison: Comparison) -> bool:
    """Run the comparison and return whether it was interrupted."""
    from regard.compare.experiment import format_duration

    interrupted, session = False, comparison.session
    try:
        comparison.run()
    except KeyboardInterrupt:
        interrupted = True
    _report(
        Phrase(
            "{elapsed}: {measured} measured, {reused} reused from earlier runs",
            elapsed=format_duration(session.elapsed),
            measured=session.measured,
            reused=session.reused,
        )
    )
    return interrupted


def _show(
    comparison: Comparison, command: str, output: ComparisonOutput, *, interrupted: bool
) -> None:
    """Print and write the results so far."""
    from regard.compare.comparison import as_csv, as_json
    from regard.compare.render import render_page, render_table
    from regard.view.html_page import write

    plan, measurements = comparison.plan, comparison.session.results
    results = as_json(
        plan,
        measurements,
        comparison.machine,
        command,
        interrupted=interrupted,
        notes=comparison.notes,
    )
    if output.json:
        typer.echo(json_format.dumps(results, indent=1, allow_nan=False))
    else:
        typer.echo(render_table(results))
    if output.csv is not None:
        write(output.csv, as_csv(plan, measurements))
    if output.html is not None:
        write(output.html, render_page(results))


def _listing() -> str:
    from regard.compare.mechanisms import DEFAULT_MECHANISMS, RECALL_TASKS
    from regard.configs.catalogue import summary
    from regard.train.tasks import TASKS

    lines = [translate("mechanisms")]
    for name, mechanism in DEFAULT_MECHANISMS.items():
        is_mha = name == "mha"  # with rotary positions, as the others here have
        lines.append(_listed(name, translate(summary(name if is_mha else mechanism))))
        if name != mechanism:
            lines.append(_listed("", "gqa:groups=H" if is_mha else mechanism))
    lines.append(translate("tasks"))
    lines.append(_listed("text", translate("The next byte of a text.")))
    lines += [_listed(name, translate(TASKS[name].description)) for name in RECALL_TASKS]
    return "\n".join(lines)


def _listed(name: str, text: str) -> str:
    """Return a name and its sentence within the width of the terminal."""
    return wrap(text, line_width(), indent=f"  {name:<12} ", hang=" " * 15)


def _report(line: str) -> None:
    """Print a line of progress on standard error.

    On a terminal, a line about a training run replaces the one before it. If standard error is not
    a terminal, such lines are left out.
    """
    is_inside_run = line.startswith(" ")
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K... {line.strip()}", err=True, nl=not is_inside_run)
    elif not is_inside_run:
        note(line, "... ")
