"""`regard train`: a language model from text, with its tokenizer, log and checkpoints."""

from __future__ import annotations

import json as json_format
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import ArgumentError, FileError
from regard.files.regular import text
from regard.foreign import shown, told
from regard.suggest import suggest


def options_of_file(context: typer.Context, options: Iterable[str]) -> set[str]:
    """The options that stand in the command, and are not their defaults."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name for name, where in sources.items() if where and where.name == "COMMANDLINE"}


def merged(
    context: typer.Context, options: dict[str, Any], mine: set[str], path: Path
) -> dict[str, Any]:
    """The command's options, with the file's in place of defaults; `mine` stand in the command and
    win.

    --set and [model.options] are joined name by name.
    """
    try:
        found = read(path)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error
    if "attention" in mine and found.get("attention") != options["attention"]:
        found["option"] = []  # they are options of another mechanism
    settings, flags = found.pop("option", []), options["set"] or []
    named = {setting.partition("=")[0] for setting in flags}
    joined = [*(s for s in settings if s.partition("=")[0] not in named), *flags]
    parameters: dict[str | None, Any] = {
        parameter.name: parameter for parameter in context.command.params
    }
    values = {}
    for name, value in found.items():
        try:
            values[name] = parameters[name].process_value(context, value)
        except typer.BadParameter as error:
            raise typer.BadParameter(
                f"{path}: {name} is {value!r}: {error.message}", param_hint="--config"
            ) from error
    kept = {name: options[name] for name in mine if name != "set"}
    return {**options, **values, **kept, "set": joined or None}


TASKS = ("translate", "translate-back", "dates", "copy", "induction", "mqar", "passkey")
"""The names of `regard.train.tasks.TASKS`, for a help text that imports no torch. The tests compare
the two.
"""

SHARED = (
    "out",
    "steps",
    "batch",
    "dim",
    "layers",
    "heads",
    "hidden",
    "lr",
    "warmup",
    "accumulate",
    "seed",
    "save_every",
    "resume",
    "threads",
    "bf16",
    "device",
    "json",
    "clip",
    "weight_decay",
    "attention",
    "kv_heads",
    "position",
    "window",
    "set",
)
"""Options of texts and of tasks."""

ONLY = ("model", "dropout", "smoothing", "beams", "examples", "beside")
"""Options of tasks alone."""


def listing(value: str | None) -> str | None:
    """`--task list`: every task with its sentence and the models that can do it; then the command
    ends.
    """
    if value != "list":
        return value
    from regard.train.tasks import TASKS as KNOWN
    from regard.train.tasks.task_models import models_for

    for task in KNOWN.values():
        typer.echo(f"{task.name:<15} {task.description}")
        typer.echo(f"{'':<15} --model {', '.join(models_for(task))}")
    raise typer.Exit


def check(options: dict[str, Any], given: set[str]) -> None:
    """Refuse options that belong to the other kind of training; `given` are those that stand in the
    command.
    """
    if options["task"] is None:
        for name in ONLY:
            if name in given:
                raise typer.BadParameter(
                    "belongs to made tasks; give --task NAME too (--task list shows them), or "
                    "leave it out",
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
    """Train a model on a task, with the options that stand in the command and the recipe's for the
    others.
    """
    import torch

    from regard.train.tasks.task_training import TaskTrainingRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    taken = {name: options[name] for name in given if name not in ("json", "resume", "threads")}
    try:
        run = TaskTrainingRun(taken)
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


_MODEL, _STEPS, _DATA, _RUN = "Model", "Steps", "Data", "Output and machine"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def _count(panel: str, text: str, default: str | None = None) -> Any:
    return _option(panel, text, min=1, show_default=default or True)


Source = Annotated[
    str, typer.Argument(help="A UTF-8 file, a folder of text files, or python-docs.")
]
Out = Annotated[Path, _option(_RUN, "The folder to write; everything is written under it.")]
Config = Annotated[
    Path | None,
    _option(
        _RUN,
        "A TOML file of options, in sections model, train and data; the command wins.",
        exists=True,
        dir_okay=False,
    ),
]
Dim = Annotated[int, _count(_MODEL, "Model width M.")]
Layers = Annotated[int, _count(_MODEL, "Blocks.")]
Heads = Annotated[int, _count(_MODEL, "Query heads H.")]
KvHeads = Annotated[
    int | None, _count(_MODEL, "Key/value heads G; must divide the query heads.", "2, if needed")
]
Hidden = Annotated[int | None, _count(_MODEL, "Feed-forward width.", "8/3 of dim")]
Vocab = Annotated[int, _option(_MODEL, "Tokens in the vocabulary.", min=257)]
Tie = Annotated[bool, _option(_MODEL, "One matrix for embedding and head.")]
Attention = Annotated[
    str | None,
    _option(
        _MODEL, "A mechanism of the catalogue (regard describe).", show_default="a Llama: gqa, rope"
    ),
]
Position = Annotated[
    str | None,
    _option(
        _MODEL,
        "With --attention: rope, alibi, learned, sinusoidal, none or catalogue.",
        show_default="catalogue: its own",
    ),
]
Window = Annotated[
    int | None, _count(_MODEL, "With --attention: tokens that one sees, its own included.", "all")
]
Set = Annotated[
    list[str] | None,
    _option(_MODEL, "An option of the mechanism, such as --set base=50000; repeatable."),
]
Steps = Annotated[int, _count(_STEPS, "Optimiser steps.")]
Batch = Annotated[int, _count(_STEPS, "Rows per batch.")]
Lr = Annotated[float, _option(_STEPS, "Peak learning rate.")]
Warmup = Annotated[int, _option(_STEPS, "Steps of linear warm-up.", min=0)]
Accumulate = Annotated[int, _count(_STEPS, "Batches per optimiser step.")]
Clip = Annotated[float, _option(_STEPS, "The most that a gradient's 2-norm may be.")]
WeightDecay = Annotated[float, _option(_STEPS, "On matrices; norms and biases have none.")]
Bf16 = Annotated[bool, _option(_STEPS, "Compute in bfloat16 where that is safe (autocast).")]
Seed = Annotated[int, _option(_STEPS, "Seed of the weights and of the data order.")]
Context = Annotated[int, _count(_DATA, "Tokens that a row predicts.")]
Repeat = Annotated[
    float,
    _option(
        _DATA, "Share of rows that say a segment twice: makes induction heads form.", min=0, max=1
    ),
]
RepeatFirst = Annotated[
    int,
    _option(
        _DATA, "Steps at the start on rows that repeat only: induction heads form early.", min=0
    ),
]
SaveEvery = Annotated[int, _count(_RUN, "Steps between checkpoints.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on from the last checkpoint in --out.", rich_help_panel=_RUN),
]
Threads = Annotated[int | None, _count(_RUN, "CPU threads.", "all cores")]
Device = Annotated[str, _option(_RUN, "cpu, cuda, ...")]
Dtype = Annotated[str, _option(_RUN, "Type of the final weights: float32, float16 or bfloat16.")]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print the final figures as JSON.", rich_help_panel=_RUN),
]

_TASKS = "Tasks with made data, in place of text"
Task = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(TASKS)}; or list, which says what they are.",
        callback=listing,
        is_eager=True,
        rich_help_panel=_TASKS,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="lstm, lstm+bahdanau, lstm+luong (or gru, rnn) or transformer; decoder or lstm where "
        "a row is continued.",
        rich_help_panel=_TASKS,
    ),
]
Dropout = Annotated[float, _option(_TASKS, "Of the transformer.", min=0, max=0.99)]
Smoothing = Annotated[float, _option(_TASKS, "Label smoothing.", min=0, max=0.99)]
Beams = Annotated[int, _count(_TASKS, "Beams of the search; 1 is greedy.")]
Examples = Annotated[int, _count(_TASKS, "Questions per split at the end.")]
Beside = Annotated[
    list[Path] | None,
    typer.Option(
        help="The folder of another run, to be drawn in the same chart; may be repeated.",
        rich_help_panel=_TASKS,
    ),
]


def train(
    ctx: typer.Context,
    out: Out,
    source: Source = "python-docs",
    dim: Dim = 256,
    layers: Layers = 6,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    hidden: Hidden = None,
    vocab: Vocab = 4096,
    tie: Tie = False,
    attention: Attention = None,
    position: Position = None,
    window: Window = None,
    set: Set = None,
    steps: Steps = 4000,
    batch: Batch = 16,
    lr: Lr = 1e-3,
    warmup: Warmup = 200,
    accumulate: Accumulate = 1,
    clip: Clip = 1.0,
    weight_decay: WeightDecay = 0.1,
    context: Context = 256,
    repeat: Repeat = 0.0,
    repeat_first: RepeatFirst = 0,
    seed: Seed = 0,
    save_every: SaveEvery = 500,
    resume: Resume = False,
    threads: Threads = None,
    bf16: Bf16 = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    task: Task = None,
    model: ModelName = None,
    dropout: Dropout = 0.0,
    smoothing: Smoothing = 0.0,
    beams: Beams = 1,
    examples: Examples = 400,
    beside: Beside = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Train a decoder on text and write a checkpoint folder that `regard` can load.

    Writes tokenizer.json, config.json, model.safetensors, train.csv,
    command.txt and checkpoints/ under --out. The model is a Llama; with
    --attention, a decoder that has this mechanism in every layer. A run that
    was killed goes on with the same command and --resume: on a CPU, to the
    same bits.

    With --task the data is made on the spot, and sizes and steps that are
    not given are the task's own: accuracy by length (accuracy.csv,
    accuracy.svg), alignment.svg and report.html are written too.

    Example: regard train --out my-model --steps 200 --dim 64 --layers 2 --heads 4 --context 64

    Example: regard train --out mine --attention gqa --kv-heads 2 --position alibi --window 256

    Example: regard train --out numbers --task translate --model lstm+bahdanau
    """
    options = {name: value for name, value in locals().items() if name != "ctx"}
    given = options_of_file(ctx, options)
    check(options, given)
    if config is not None:
        options = merged(ctx, options, given, config)
    _check(options)
    if task is not None:
        train_task(options, given)
        return
    elsewhere = ("task", "config", *ONLY)
    options = {name: value for name, value in options.items() if name not in elsewhere}
    import torch

    from regard.train.pretraining import PretrainingRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    try:
        figures, stopped_by = PretrainingRun(options).run()
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        typer.echo(json_format.dumps(figures))
    else:
        typer.echo("  ".join(f"{name} {value}" for name, value in figures.items()))
    if stopped_by:
        typer.echo("interrupted and saved; go on with the same command and --resume", err=True)
        raise typer.Exit(128 + stopped_by)


def _check(options: dict[str, Any]) -> None:
    """What can be refused before any work."""
    out, dtype = options["out"], options["dtype"]
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; give a folder", param_hint="--out")
    if out.is_dir() and any(out.iterdir()) and not options["resume"]:
        raise typer.BadParameter(
            f"{out} is not empty; choose another folder, or go on with the run in it: --resume",
            param_hint="--out",
        )
    if dtype not in ("float32", "float16", "bfloat16"):
        raise typer.BadParameter(
            f"{dtype!r} is not float32, float16 or bfloat16", param_hint="--dtype"
        )
    if options["task"] is not None or options["attention"] is not None:
        return  # their sizes are their own matter
    if options["dim"] % options["heads"] or options["dim"] // options["heads"] % 2:
        raise typer.BadParameter(
            f"dim {options['dim']} / heads {options['heads']} must be even: it is a head's width",
            param_hint="--dim",
        )


LONGEST = 1 << 20
"""Bytes of such a file, at most."""
SECTIONS = {
    "model": (
        "dim",
        "layers",
        "heads",
        "kv_heads",
        "hidden",
        "vocab",
        "tie",
        "attention",
        "position",
        "window",
    ),
    "train": (
        "steps",
        "batch",
        "lr",
        "warmup",
        "accumulate",
        "clip",
        "weight_decay",
        "seed",
        "save_every",
        "bf16",
        "threads",
        "device",
        "dtype",
    ),
    "data": ("source", "context", "repeat", "repeat_first"),
}
"""Section -> the options of the command that stand there; [model.options] has those of the
mechanism, as --set.
"""


def read(path: Path) -> dict[str, Any]:
    """Option -> its text, as it would stand behind the flag; "option" -> the name=value of
    [model.options].

    Raises:
        FileError: the file cannot be read, or is no TOML.
        ArgumentError: a section or a key is unknown or stands in the wrong place, or a value is not
            a plain one.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "small.toml"
    >>> model = "[model]\\nattention = 'gqa'\\nkv-heads = 2\\noptions.base = 5e4\\n"
    >>> _ = file.write_text(model + "[train]\\nbf16 = true")
    >>> read(file)
    {'attention': 'gqa', 'kv_heads': '2', 'option': ['base=50000.0'], 'bf16': 'True'}
    """
    try:
        content = tomllib.loads(text(path, LONGEST))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{path}: is not TOML: {told(error)}") from error
    found: dict[str, Any] = {}
    for section, keys in content.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            raise ArgumentError(f"{path}: {told(_stray(section))}")
        for key, value in keys.items():
            name = key.replace("-", "_")
            if (section, name) == ("model", "options") and isinstance(value, dict):
                found["option"] = _settings(path, value)
            elif name not in SECTIONS[section]:
                raise ArgumentError(f"{path}: {told(_unknown(section, key, name))}")
            elif name in found:
                raise ArgumentError(f"{path}: [{section}] has {name} twice; keep one")
            else:
                found[name] = _text(f"{path}: [{section}] {told(key)}", value)
    return found


def _settings(path: Path, options: Mapping[str, Any]) -> list[str]:
    """name=value for each option of a mechanism; lists are allowed."""
    for name, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _text(f"{path}: [model.options] {told(name)}", part)
    return [f"{name}={value!r}" for name, value in options.items()]


def _text(where: str, value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise ArgumentError(
            f"{where} is {shown(value)}; it must be a string, a number, true or false"
        )
    return str(value)


def _stray(section: str) -> str:
    """What is said of a name at the top that is no section."""
    home = next((s for s, keys in SECTIONS.items() if section.replace("-", "_") in keys), None)
    if home:
        return f"{section} stands in no section; put it under [{home}]"
    return (
        f"unknown section [{section}]{suggest(section, SECTIONS, otherwise='.')} There are "
        f"[{'], ['.join(SECTIONS)}]"
    )


def _unknown(section: str, key: str, name: str) -> str:
    home = next((s for s, keys in SECTIONS.items() if name in keys), None)
    if home:
        return f"{key} stands in [{section}]; its place is [{home}]"
    keys = (*SECTIONS[section], *(("options",) if section == "model" else ()))
    return f"[{section}] has no {key}{suggest(name, keys, otherwise='.')} It has {', '.join(keys)}"
