"""`regard compare`: attention mechanisms side by side on this machine, and with --quality how well
each learns.
"""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import _claims
from regard.cli.options import check_files
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.compare.comparison import Comparison, Plan

_SIZES, _TIME, _QUALITY, _OUT = "Sizes", "What is measured", "Quality", "Output"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MECHANISM",
        help="Names of --list, or of the catalogue with options: gqa:groups=1, retention.",
        show_default="the default set",
    ),
]
Dim = Annotated[int, _option(_SIZES, "Model width M.", min=2)]
Layers = Annotated[int, _option(_SIZES, "Blocks.", min=1)]
Heads = Annotated[int, _option(_SIZES, "Query heads H.", min=1)]
Hidden = Annotated[
    int | None, _option(_SIZES, "Feed-forward width.", min=1, show_default="8/3 of dim")
]
Window = Annotated[int, _option(_SIZES, "Tokens of a window, of a segment, of a stream.", min=1)]
Same = Annotated[
    str, _option(_SIZES, "sizes; or parameters: the feed-forward width makes up for the rest.")
]
Context = Annotated[
    list[int] | None,
    _option(
        _TIME,
        "Tokens of prompts and in front of decoding; repeatable.",
        min=1,
        show_default="512, 2048, 8192",
    ),
]
Length = Annotated[int, _option(_TIME, "Tokens of a row in training.", min=2)]
Batch = Annotated[int, _option(_TIME, "Rows of a training step.", min=1)]
Rounds = Annotated[int, _option(_TIME, "Rounds; each times every mechanism once.", min=1)]
Seconds = Annotated[float, _option(_TIME, "Of rounds, for each measurement.", min=0.01)]
Memory = Annotated[
    bool,
    _option(_TIME, "Peak memory, in a process for each mechanism.", "--memory/--no-memory"),
]
Threads = Annotated[int | None, _option(_TIME, "Threads.", min=1, show_default="torch's")]
Quality = Annotated[
    bool, _option(_QUALITY, "Train each too: the same tokens, text and recall.", "--quality")
]
Lessons = Annotated[
    list[str] | None,
    _option(
        _QUALITY,
        "text, mqar or passkey; repeatable.",
        "--lesson",
        show_default="all three",
    ),
]
Text = Annotated[str, _option(_QUALITY, "A UTF-8 file, a folder, or python-docs: read as bytes.")]
Minutes = Annotated[
    float, _option(_QUALITY, "For everything: training is shortened to fit.", min=0.1)
]
Steps = Annotated[
    int | None,
    _option(_QUALITY, "Optimiser steps, whatever time they take.", min=1, show_default="as fit"),
]
Rates = Annotated[
    list[float] | None,
    _option(
        _QUALITY,
        "Learning rate for all; repeatable: the best counts.",
        "--lr",
        show_default="0.003; with a state 0.001, 0.003, 0.01",
    ),
]
Seeds = Annotated[int, _option(_QUALITY, "Seeds 0, 1, ...; each trains anew.", min=1)]
Out = Annotated[
    Path | None,
    _option(_OUT, "A folder that keeps each measurement; a run goes on with what is there."),
]
Json = Annotated[bool, _option(_OUT, "Print everything as JSON.", "--json")]
Csv = Annotated[Path | None, _option(_OUT, "Write a line for each mechanism.", metavar="FILE")]
Html = Annotated[Path | None, _option(_OUT, "Write a page with the plots.", metavar="FILE")]
List = Annotated[
    bool, _option(_OUT, "List the default set and what is measured, and stop.", "--list")
]


EPILOG = (
    "For example: regard compare mha mqa window linear --quality --out compared --html "
    "compared.html"
)


def compare(
    names: Names = None,
    dim: Dim = 128,
    layers: Layers = 2,
    heads: Heads = 4,
    hidden: Hidden = None,
    window: Window = 16,
    same: Same = "sizes",
    context: Context = None,
    length: Length = 256,
    batch: Batch = 8,
    rounds: Rounds = 7,
    seconds: Seconds = 20.0,
    memory: Memory = True,
    threads: Threads = None,
    quality: Quality = False,
    lesson: Lessons = None,
    text: Text = "python-docs",
    minutes: Minutes = 30.0,
    steps: Steps = None,
    lr: Rates = None,
    seeds: Seeds = 1,
    claim: _claims.Names = None,
    budget: _claims.Budget = 1.0,
    seed: _claims.Seed = 0,
    out: Out = None,
    json: Json = False,
    csv: Csv = None,
    html: Html = None,
    list_: List = False,
) -> None:
    """Measure attention mechanisms as decoders of one shape: cache, prompt,
    token, training step, peak memory.

    Each is built at the same sizes, or with the same number of parameters,
    and timed in turns with the kernels that it really runs. With --quality
    each is trained on the same tokens. Ctrl-C prints what is done; with --out
    the same command goes on from there. With --claim, what is said of
    attention is measured instead, each with a verdict.
    """
    options = dict(locals())
    if list_:
        typer.echo(f"{_listing()}\n{_claims.listing()}")
        return
    try:
        _claims.check(options)
        check_files({"--csv": csv, "--html": html})
        if claim:
            _claims.run(options, _command(sys.argv[1:]))
        plan = _plan(options)
        comparison, command = _comparison(plan, options), _command(sys.argv[1:])
        interrupted = _run(comparison)
        _show(comparison, command, options, interrupted=interrupted)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if interrupted:
        if out is not None:
            typer.echo("interrupted; the same command goes on with what is kept", err=True)
        raise typer.Exit(130)


def _plan(o: dict[str, Any]) -> Plan:
    """What is compared, from the command's options by name."""
    import torch

    from regard.compare.comparison import Plan
    from regard.compare.mechanisms import Shape, configs, contestants
    from regard.compare.quality import RECALL, Training, lessons
    from regard.compare.speed import Timing

    _check_quality(o)
    if o["threads"]:
        torch.set_num_threads(o["threads"])
    shape = Shape(o["dim"], o["layers"], o["heads"], o["hidden"], window=o["window"])
    contexts = tuple(sorted(set(o["context"]))) if o["context"] else Timing().contexts
    timing = Timing(contexts, o["length"], o["batch"], o["rounds"], o["seconds"])
    training = Training(tuple(range(o["seeds"])), tuple(o["lr"]) if o["lr"] else None)
    found = contestants(o["names"], shape)
    taught = []
    if o["quality"]:
        wanted = o["lesson"] or ["text", *RECALL]
        taught = lessons(wanted, source=o["text"], length=o["length"], batch=o["batch"])
    return Plan(found, configs(found, shape, o["same"]), shape, o["same"], timing, taught, training)


def _check_quality(o: dict[str, Any]) -> None:
    """What is for training is refused without it."""
    given = {
        "--lesson": o["lesson"],
        "--steps": o["steps"],
        "--lr": o["lr"],
        "--seeds": o["seeds"] > 1,
        "--text": o["text"] != "python-docs",
    }
    for name, value in given.items():
        if value and not o["quality"]:
            raise ArgumentError(f"{name} is for training: give --quality too, or leave it out")


def _comparison(plan: Plan, o: dict[str, Any]) -> Comparison:
    import torch

    from regard.bench.machine import describe_machine
    from regard.compare.comparison import Comparison
    from regard.compare.experiment import Session, Store

    about = describe_machine(torch.device("cpu"))
    session = Session(Store(o["out"], {"machine": about}), _say)
    return Comparison(
        plan, session, about, minutes=o["minutes"], steps=o["steps"], with_memory=o["memory"]
    )


def _run(comparison: Comparison) -> bool:
    """Whether it was interrupted."""
    from regard.compare.experiment import clock

    interrupted, session = False, comparison.session
    try:
        comparison.run()
    except KeyboardInterrupt:
        interrupted = True
    _say(
        f"{clock(session.elapsed)}: {session.measured} measured, {session.reused} as they were kept"
    )
    return interrupted


def _show(comparison: Comparison, command: str, o: dict[str, Any], *, interrupted: bool) -> None:
    """Print and write what there is."""
    from regard.compare.comparison import as_csv, as_json
    from regard.compare.output import page, table
    from regard.view.html import write

    plan, done = comparison.plan, comparison.session.done
    told = as_json(
        plan, done, comparison.machine, command, interrupted=interrupted, notes=comparison.notes
    )
    typer.echo(json_format.dumps(told, indent=1, allow_nan=False) if o["json"] else table(told))
    if o["csv"] is not None:
        write(o["csv"], as_csv(plan, done))
    if o["html"] is not None:
        write(o["html"], page(told))


def _listing() -> str:
    from regard.compare.mechanisms import Shape, contestants
    from regard.compare.quality import RECALL
    from regard.nn.variants import VARIANTS
    from regard.train.tasks import TASKS

    lines = ["mechanisms"]
    for one in contestants(None, Shape()):
        options = ", ".join(f"{k}={v}" for k, v in one.options.items())
        lines.append(f"  {one.name:<12} {VARIANTS[one.attention].sentence}")
        lines.append(f"  {'':<12} {one.attention}({options})")
    lines.append("lessons")
    lines.append(f"  {'text':<12} The next byte of a text.")
    lines += [f"  {name:<12} {TASKS[name].description}" for name in RECALL]
    return "\n".join(lines)


def _command(arguments: list[str]) -> str:
    import shlex

    return shlex.join(["regard", *arguments])


def _say(line: str) -> None:
    """On a terminal, where a training run stands replaces itself; elsewhere it is left out."""
    within = line.startswith(" ")
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K... {line.strip()}", err=True, nl=not within)
    elif not within:
        typer.echo(f"... {line}", err=True)
