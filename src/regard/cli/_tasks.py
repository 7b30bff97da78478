"""`regard train --task`: what it takes, and the hand-over to `regard.train.tasks`."""

from __future__ import annotations

import json as json_format
import sys
from typing import Any

import typer

from regard.errors import ArgumentError

TASKS = ("translate", "translate-back", "dates", "copy", "induction", "mqar", "passkey")
"""As `regard.train.tasks.TASKS`, for a help text that imports no torch; the tests compare the two."""

SHARED = (
    "out", "steps", "batch", "dim", "layers", "heads", "hidden", "lr", "warmup", "accumulate", "seed", "save_every",
    "resume", "threads", "bf16", "device", "json", "clip", "weight_decay", "attention", "kv_heads", "position", "window",
    "set",
)  # fmt: skip
"""Options of texts and of tasks."""

ONLY = ("model", "dropout", "smoothing", "beams", "examples", "beside")
"""Options of tasks alone."""


def listing(value: str | None) -> str | None:
    """`--task list`: every task with its sentence and the models that can do it; then the command ends."""
    if value != "list":
        return value
    from regard.train.tasks import TASKS as KNOWN
    from regard.train.tasks.models import names

    for task in KNOWN.values():
        typer.echo(f"{task.name:<15} {task.sentence}")
        typer.echo(f"{'':<15} --model {', '.join(names(task))}")
    raise typer.Exit


def check(options: dict[str, Any], given: set[str]) -> None:
    """Refuse options that belong to the other kind of training; `given` are those that stand in the command."""
    if options["task"] is None:
        for name in ONLY:
            if name in given:
                raise typer.BadParameter(
                    "belongs to made tasks; give --task NAME too (--task list shows them), or leave it out",
                    param_hint=flag(name),
                )
        return
    if "model" not in given:
        raise typer.BadParameter(
            "a task needs a model: lstm, lstm+bahdanau, transformer, ... (--task list shows them)",
            param_hint="--model",
        )
    for name in sorted(given - {*SHARED, *ONLY, "task"}):
        raise typer.BadParameter(
            "belongs to training on text, and --task makes its own data; leave one of the two out",
            param_hint=flag(name),
        )


def train_task(options: dict[str, Any], given: set[str]) -> None:
    """Train a model on a task, with the options that stand in the command and the recipe's for the others."""
    import torch

    from regard.train.tasks.run import TaskRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    taken = {name: options[name] for name in given if name not in ("json", "resume", "threads")}
    try:
        run = TaskRun(taken)
        figures, stopped_by = run.run()
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if options["json"]:
        typer.echo(json_format.dumps(figures))
    else:
        _show(run, figures)
    if stopped_by:
        typer.echo("interrupted and saved; go on with the same command and --resume", err=True)
        raise typer.Exit(128 + stopped_by)


def _show(run: Any, figures: dict[str, Any]) -> None:
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Console(width=100)
    for line in run.lines():
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)
    short = {name: value for name, value in figures.items() if name != "accuracy"}
    typer.echo("\n" + "  ".join(f"{name} {value}" for name, value in short.items()))


def flag(name: str) -> str:
    """An option as it is written in the command."""
    return "SOURCE" if name == "source" else "--" + name.replace("_", "-")
