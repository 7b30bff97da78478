"""The command `regard train`, which trains a language model on text, with its tokenizer, log and
checkpoints.
"""

from __future__ import annotations

import json as json_format
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from regard.cli.options import (
    JSON,
    argument,
    grouped,
    note,
    option,
    options_on_command_line,
    usage_error,
)
from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.files.reading import read_text
from regard.language import translate
from regard.text_table import line_width, wrap
from regard.untrusted_text import error_text, short_repr


def merge_config(
    context: typer.Context, options: dict[str, Any], given_names: set[str], path: Path
) -> dict[str, object]:
    """Return the options with the values of a config file in place of defaults; those in
    `given_names` were given on the command line and take precedence.

    --set and [model.options] are joined name by name.
    """
    file_options = read_config(path)
    if "attention" in given_names and file_options.get("attention") != options["attention"]:
        file_options["option"] = []  # the options in the file belong to another mechanism
    settings, flags = file_options.pop("option", []), options["set"] or []
    named = {setting.partition("=")[0] for setting in flags}
    all_settings = [*(s for s in settings if s.partition("=")[0] not in named), *flags]
    parameters: dict[str | None, Any] = {
        parameter.name: parameter for parameter in context.command.params
    }
    values = {}
    for name, value in file_options.items():
        try:
            values[name] = parameters[name].process_value(context, value)
        except typer.BadParameter as error:
            raise usage_error(
                "--config",
                "{path}: {name} is {value!r}: {reason}",
                path=path,
                name=name,
                value=value,
                reason=error.message,
            ) from error
    command_options = {name: options[name] for name in given_names if name != "set"}
    return {**options, **values, **command_options, "set": all_settings or None}


TASKS = ("translate", "translate-back", "dates", "copy", "induction", "mqar", "passkey")
"""The names in `regard.train.tasks.TASKS`, repeated here for a help text that imports no torch; a
test compares the two.
"""


def listing(value: str | None) -> str | None:
    """Print every task with its sentence and its models for `--task list`, and end the command."""
    if value != "list":
        return value
    from regard.train.tasks import TASKS as KNOWN
    from regard.train.tasks.task_training import models_for

    for task in KNOWN.values():
        about, models = translate(task.description), ", ".join(models_for(task))
        for name, text in ((task.name, about), ("", f"--model {models}")):
            typer.echo(wrap(text, line_width(), indent=f"{name:<15} ", hang=" " * 16))
    raise typer.Exit


def check(options: dict[str, object], given_names: set[str]) -> None:
    """Raise an error for options that belong to the other kind of training; `given_names` has the
    options on the command line.
    """
    if options["start_from"] is not None:
        from regard.train.pretraining import MODEL_OPTIONS

        for name in MODEL_OPTIONS:
            if name in given_names:
                raise usage_error(
                    flag(name),
                    "describes a new model, but --start-from names one that has its sizes; leave "
                    "one of them out",
                )
    if options["task"] is None:
        for name in TASK_OPTIONS:
            if name in given_names:
                raise usage_error(
                    flag(name),
                    "applies only to tasks; give --task NAME too (--task list shows the names), "
                    "or leave it out",
                )
        return
    if "model" not in given_names:
        raise usage_error(
            "--model",
            "a task needs a model: lstm, lstm+bahdanau, transformer, ... (--task list shows them)",
        )
    for name in sorted(given_names & {*TEXT_OPTIONS, *_names_in(_DATA)}):
        raise usage_error(
            flag(name),
            "applies to training on text, but --task generates its own data; leave one of them out",
        )


def train_task(options: dict[str, Any], given_names: set[str]) -> None:
    """Train a model on a task with the options on the command line, and with the task's own values
    for the others.
    """
    import torch

    from regard.train.tasks.task_training import TaskTrainingRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    run_options = {
        name: options[name] for name in given_names if name not in ("json", "resume", "threads")
    }
    run = TaskTrainingRun(run_options)
    figures, stopped_by = run.run()
    if options["json"]:
        typer.echo(json_format.dumps(figures))
    else:
        _show(run, figures)
    _end(stopped_by)


def _end(stopped_by: int | None) -> None:
    """End the command as the signal demands that stopped it, if one did."""
    if stopped_by:
        note("interrupted and saved; continue with the same command and --resume")
        raise typer.Exit(128 + stopped_by)


def _show(run: Any, figures: dict[str, object]) -> None:
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Console(width=100)
    for line in run.lines():
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)
    short = {name: value for name, value in figures.items() if name != "accuracy"}
    typer.echo("\n" + "  ".join(f"{name} {value}" for name, value in short.items()))


def flag(name: str) -> str:
    """Return an option as it is written on the command line."""
    return "SOURCE" if name == "source" else "--" + name.replace("_", "-")


_MODEL, _STEPS, _DATA = "Model", "Steps", "Data"
_TASKS = "Tasks with generated data, instead of text"
model_option, step_option, data_option, task_option, run_option = (
    partial(option, panel=panel) for panel in (_MODEL, _STEPS, _DATA, _TASKS, "Output and machine")
)


@dataclass(frozen=True)
class TrainOptions:
    """The options of `regard train`."""

    out: Path = run_option("Folder for all files that are written.", default=...)
    source: str = argument(
        "Text to train on: a UTF-8 file, a folder of text files, or python-docs.",
        default="python-docs",
    )
    dim: int = model_option("Model width M.", default=256, min=1)
    layers: int = model_option("Number of layers.", default=6, min=1)
    heads: int = model_option("Number of query heads H.", default=8, min=1)
    kv_heads: int | None = model_option(
        "Number of key/value heads G; must divide H.", shown="as regard cost --mechanisms", min=1
    )
    hidden: int | None = model_option(
        "Width of the feed-forward layers.", shown="8/3 of dim", min=1
    )
    vocab: int | None = model_option(
        "Number of tokens in the vocabulary. With --start-from, the tokens that are added are "
        "the most frequent Chinese characters of the text.",
        shown="4096, or that of --start-from",
        min=257,
    )
    start_from: str | None = model_option(
        "Model whose weights and tokenizer are trained further: tiny, a folder or a hub name.",
        shown="a new model",
    )
    tie: bool = model_option("Use one matrix for embedding and output head.", default=False)
    attention: str | None = model_option(
        "Mechanism of the catalogue (regard describe), with options behind colons or in --set.",
        shown="a Llama: gqa with rope",
    )
    position: str | None = model_option(
        "With --attention: rope, alibi, learned, sinusoidal, none or catalogue.",
        shown="catalogue, the mechanism's own",
    )
    window: int | None = model_option(
        "With --attention: number of keys that a query attends to, its own included.",
        shown="no limit",
        min=1,
    )
    set: list[str] | None = model_option("Option of the mechanism, such as base=50000. Repeatable.")
    steps: int = step_option("Number of optimizer steps.", default=4000, min=1)
    batch: int = step_option("Rows per batch.", default=16, min=1)
    lr: float = step_option("Peak learning rate.", default=1e-3)
    warmup: int = step_option("Number of steps of linear warm-up.", default=200, min=0)
    accumulate: int = step_option("Batches per optimizer step.", default=1, min=1)
    clip: float = step_option("Maximum 2-norm of the gradient.", default=1.0)
    weight_decay: float = step_option(
        "Weight decay of matrices; norms and biases have none.", default=0.1
    )
    context: int = data_option("Number of tokens that a row predicts.", default=256, min=1)
    repeat: float = data_option(
        "Share of rows that contain a segment twice, which makes induction heads form.",
        default=0.0,
        min=0,
        max=1,
    )
    repeat_first: int = data_option(
        "Number of first steps whose rows all contain a segment twice, which makes induction "
        "heads form early.",
        default=0,
        min=0,
    )
    seed: int = step_option("Random seed for the weights and the order of the data.", default=0)
    save_every: int = run_option("Steps between checkpoints.", default=500, min=1)
    resume: bool = run_option(
        "Continue from the last checkpoint in --out.", "--resume", default=False
    )
    threads: int | None = run_option("Number of CPU threads.", shown="all cores", min=1)
    bf16: bool = step_option("Compute in bfloat16 where that is safe (autocast).", default=False)
    compile: bool = step_option(
        "Compile the model and its loss with torch.compile, which takes a minute or more at "
        "the first step.",
        default=False,
    )
    device: str = run_option("Device: cpu, cuda, ...", default="cpu")
    dtype: str = run_option(
        "Number format of the final weights: float32, float16 or bfloat16.", default="float32"
    )
    parallel: Literal["context"] | None = run_option(
        "Divide the tokens of each row among the processes that torchrun starts: torchrun "
        "--standalone --nproc-per-node 4 -m regard train ... --parallel context.",
        shown="one process",
    )
    task: str | None = task_option(
        f"Task: {', '.join(TASKS)}; or list, which describes them.", callback=listing, is_eager=True
    )
    model: str | None = task_option(
        "Model of the task: transformer, or lstm, gru or rnn, alone or with +bahdanau or "
        "+luong; for induction, mqar and passkey: decoder, lstm, gru or rnn.",
        "--model",
    )
    dropout: float = task_option("Dropout of the transformer.", default=0.0, min=0, max=0.99)
    smoothing: float = task_option("Label smoothing.", default=0.0, min=0, max=0.99)
    beams: int = task_option("Number of beams in generation; 1 is greedy.", default=1, min=1)
    examples: int = task_option("Number of test examples per split at the end.", default=400, min=1)
    beside: list[Path] | None = task_option(
        "Folder of another run whose accuracy is drawn in the same chart. Repeatable."
    )
    config: Path | None = run_option(
        "TOML file of options, in the sections model, train and data; options on the command "
        "line take precedence.",
        exists=True,
        dir_okay=False,
    )
    json: bool = JSON


def _names_in(*panels: str) -> tuple[str, ...]:
    """Return the names of the options in these groups of the help page."""
    options = ((x.name, x.default) for x in fields(TrainOptions))
    return tuple(name for name, own in options if getattr(own, "rich_help_panel", "") in panels)


TASK_OPTIONS = tuple(name for name in _names_in(_TASKS) if name != "task")
"""The options that apply to training on tasks only."""
TEXT_OPTIONS = ("source", "config", "vocab", "start_from", "tie", "compile", "dtype", "parallel")
"""The options, besides those of the data, that apply to training on text only."""
SECTIONS = {
    "model": tuple(name for name in _names_in(_MODEL) if name != "set"),
    "train": (*_names_in(_STEPS), "save_every", "threads", "device", "dtype"),
    "data": ("source", *_names_in(_DATA)),
}
"""Section of the config file -> the options of the command that it may contain. [model.options] has
the options of the mechanism, like --set.
"""


@grouped
def train(ctx: typer.Context, train_options: TrainOptions) -> None:
    """Train a decoder on text and write a checkpoint folder that `regard` can load.

    Writes tokenizer.json, config.json, model.safetensors, train.csv, command.txt and checkpoints/
    under --out. The model is a Llama, or with --attention a decoder with this mechanism in every
    layer. An interrupted run continues with the same command and --resume; on a CPU the result is
    bit-identical.

    With --task the data is generated, and sizes and steps that are not given are the task's own.
    This also writes the accuracy by length (accuracy.csv, accuracy.svg), alignment.svg and
    report.html.

    Example: regard train --out my-model --steps 200 --dim 64 --layers 2 --heads 4 --context 64

    Example: regard train --out mine --attention gqa --kv-heads 2 --position alibi --window 256

    Example: regard train --out numbers --task translate --model lstm+bahdanau
    """
    options = dict(vars(train_options))
    given_names = options_on_command_line(ctx, options)
    check(options, given_names)
    if train_options.config is not None:
        options = merge_config(ctx, options, given_names, train_options.config)
    _check(options)
    if train_options.task is not None:
        train_task(options, given_names)
        return
    other_options = ("task", "config", *TASK_OPTIONS)
    options = {name: value for name, value in options.items() if name not in other_options}
    import torch

    from regard.ops.tokenwise import is_slow_in_torch
    from regard.train.pretraining import PretrainingRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    if options["bf16"] and options["device"] == "cpu" and is_slow_in_torch(torch.bfloat16):
        note("this processor has no instructions for bfloat16: training is faster without --bf16")
    run = PretrainingRun(options)
    figures, stopped_by = run.run()
    if not run.writes:
        pass  # the first rank prints the figures
    elif train_options.json:
        typer.echo(json_format.dumps(figures))
    else:
        typer.echo("  ".join(f"{name} {value}" for name, value in figures.items()))
    _end(stopped_by)


def _check(options: dict[str, Any]) -> None:
    """Raise an error for options that can be refused before any work."""
    out, dtype = options["out"], options["dtype"]
    if out.exists() and not out.is_dir():
        raise usage_error("--out", "{out} is a file; give a folder", out=out)
    if out.is_dir() and any(out.iterdir()) and not options["resume"]:
        raise usage_error(
            "--out",
            "{out} is not empty; choose another folder, or continue the run in it with --resume",
            out=out,
        )
    if dtype not in ("float32", "float16", "bfloat16"):
        raise usage_error(
            "--dtype", "{dtype!r} is not one of float32, float16 and bfloat16", dtype=dtype
        )
    if options["compile"] and options["parallel"] is not None:
        raise usage_error(
            "--compile",
            "is not possible with --parallel, whose ranks exchange keys and values between the "
            "layers; leave one of them out",
        )
    if options["start_from"] is not None:
        return  # the model has its sizes
    if options["task"] is not None or options["attention"] is not None:
        return  # tasks and mechanisms check the sizes themselves
    if options["dim"] % options["heads"] or options["dim"] // options["heads"] % 2:
        raise usage_error(
            "--dim",
            "dim {dim} / heads {heads} is the width of a head and must be an even number",
            dim=options["dim"],
            heads=options["heads"],
        )


MAX_CONFIG_BYTES = 1 << 20
"""The maximum size in bytes of a config file."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a config file as name -> text, written as on the command line; "option"
    has the name=value settings of [model.options].
    """
    try:
        content = tomllib.loads(read_text(path, MAX_CONFIG_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{path}: is not TOML: {error_text(error)}") from error
    options: dict[str, object] = {}
    for section, keys in content.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            raise _stray_name(path, section)
        for key, value in keys.items():
            name = key.replace("-", "_")
            if (section, name) == ("model", "options") and isinstance(value, dict):
                options["option"] = _settings(path, value)
            elif name not in SECTIONS[section]:
                raise _unknown_key(path, section, key, name)
            elif name in options:
                raise usage_error(
                    "--config",
                    "{path}: [{section}] has {name} twice; give it once",
                    path=path,
                    section=section,
                    name=name,
                )
            else:
                options[name] = _text(f"{path}: [{section}] {error_text(key)}", value)
    return options


def _settings(path: Path, options: Mapping[str, object]) -> list[str]:
    """Return name=value for each option of a mechanism; lists are allowed."""
    for name, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _text(f"{path}: [model.options] {error_text(name)}", part)
    return [f"{name}={value!r}" for name, value in options.items()]


def _text(where: str, value: object) -> str:
    if not isinstance(value, (str, int, float)):
        raise usage_error(
            "--config",
            "{where} is {value}; it must be a string, a number, true or false",
            where=where,
            value=short_repr(value),
        )
    return str(value)


def _stray_name(path: Path, section: str) -> typer.BadParameter:
    """Return the error about a top-level name that is not a section."""
    right_section = next(
        (s for s, keys in SECTIONS.items() if section.replace("-", "_") in keys), None
    )
    values = {"path": path, "section": error_text(section)}
    if right_section:
        text = "{path}: {section} is outside a section; put it under [{right}]"
        return usage_error("--config", text, **values, right=right_section)
    text = "{path}: there is no section [{section}]{hint} The sections are [{sections}]"
    hint = suggest(section, SECTIONS, otherwise=".")
    return usage_error("--config", text, **values, hint=hint, sections="], [".join(SECTIONS))


def _unknown_key(path: Path, section: str, key: str, name: str) -> typer.BadParameter:
    """Return the error about a key that its section does not have."""
    right_section = next((s for s, keys in SECTIONS.items() if name in keys), None)
    values = {"path": path, "section": section, "key": error_text(key)}
    if right_section:
        text = "{path}: {key} is in [{section}]; put it in [{right}]"
        return usage_error("--config", text, **values, right=right_section)
    keys = (*SECTIONS[section], *(("options",) if section == "model" else ()))
    hint = suggest(name, keys, otherwise=".")
    text = "{path}: [{section}] has no {key}{hint} It has {keys}"
    return usage_error("--config", text, **values, hint=hint, keys=", ".join(keys))
