"""The command `regard train`, which trains a language model on text, with its tokenizer, log and
checkpoints.
"""

from __future__ import annotations

import json as json_format
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from regard.cli.options import note, usage_error
from regard.did_you_mean import suggest
from regard.errors import FileError
from regard.files.regular_files import read_text
from regard.language import translate
from regard.text_table import line_width, wrap
from regard.untrusted_text import error_text, short_repr


def options_on_command_line(context: typer.Context, options: Iterable[str]) -> set[str]:
    """Return the names of the options that were given on the command line, not by default."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name for name, where in sources.items() if where and where.name == "COMMANDLINE"}


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

SHARED_OPTIONS = (
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
"""Options that apply to training on text and to training on tasks."""

TASK_OPTIONS = ("model", "dropout", "smoothing", "beams", "examples", "beside")
"""Options that apply to training on tasks only."""


def listing(value: str | None) -> str | None:
    """Print every task with its sentence and its models for `--task list`, and end the command."""
    if value != "list":
        return value
    from regard.train.tasks import TASKS as KNOWN
    from regard.train.tasks.task_models import models_for

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
    for name in sorted(given_names - {*SHARED_OPTIONS, *TASK_OPTIONS, "task"}):
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


_MODEL, _STEPS, _DATA, _RUN = "Model", "Steps", "Data", "Output and machine"


def _option(panel: str, text: str, **more: Any) -> object:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def _count(panel: str, text: str, default: str | None = None) -> object:
    return _option(panel, text, min=1, show_default=default or True)


Source = Annotated[
    str,
    typer.Argument(help="Text to train on: a UTF-8 file, a folder of text files, or python-docs."),
]
Out = Annotated[Path, _option(_RUN, "Folder for all files that are written.")]
Config = Annotated[
    Path | None,
    _option(
        _RUN,
        (
            "TOML file of options, in the sections model, train and data; options on "
            "the command line take precedence."
        ),
        exists=True,
        dir_okay=False,
    ),
]
Dim = Annotated[int, _count(_MODEL, "Model width M.")]
Layers = Annotated[int, _count(_MODEL, "Number of layers.")]
Heads = Annotated[int, _count(_MODEL, "Number of query heads H.")]
KvHeads = Annotated[
    int | None, _count(_MODEL, "Number of key/value heads G; must divide H.", "2, if needed")
]
Hidden = Annotated[int | None, _count(_MODEL, "Width of the feed-forward layers.", "8/3 of dim")]
Vocab = Annotated[
    int | None,
    _option(
        _MODEL,
        (
            "Number of tokens in the vocabulary. With --start-from, the tokens that are added are "
            "the most frequent Chinese characters of the text."
        ),
        min=257,
        show_default="4096, or that of --start-from",
    ),
]
StartFrom = Annotated[
    str | None,
    _option(
        _MODEL,
        "Model whose weights and tokenizer are trained further: tiny, a folder or a hub name.",
        show_default="a new model",
    ),
]
Tie = Annotated[bool, _option(_MODEL, "Use one matrix for embedding and output head.")]
Attention = Annotated[
    str | None,
    _option(
        _MODEL,
        "Mechanism of the catalogue (regard describe).",
        show_default="a Llama: gqa with rope",
    ),
]
Position = Annotated[
    str | None,
    _option(
        _MODEL,
        "With --attention: rope, alibi, learned, sinusoidal, none or catalogue.",
        show_default="catalogue, the mechanism's own",
    ),
]
Window = Annotated[
    int | None,
    _count(
        _MODEL,
        ("With --attention: number of keys that a query attends to, its own included."),
        "no limit",
    ),
]
Set = Annotated[
    list[str] | None,
    _option(_MODEL, "Option of the mechanism, such as base=50000. Repeatable."),
]
Steps = Annotated[int, _count(_STEPS, "Number of optimiser steps.")]
Batch = Annotated[int, _count(_STEPS, "Rows per batch.")]
Lr = Annotated[float, _option(_STEPS, "Peak learning rate.")]
Warmup = Annotated[int, _option(_STEPS, "Number of steps of linear warm-up.", min=0)]
Accumulate = Annotated[int, _count(_STEPS, "Batches per optimiser step.")]
Clip = Annotated[float, _option(_STEPS, "Maximum 2-norm of the gradient.")]
WeightDecay = Annotated[
    float, _option(_STEPS, "Weight decay of matrices; norms and biases have none.")
]
Bf16 = Annotated[bool, _option(_STEPS, "Compute in bfloat16 where that is safe (autocast).")]
Compile = Annotated[
    bool,
    _option(
        _STEPS,
        (
            "Compile the model and its loss with torch.compile, which takes a minute or more at "
            "the first step."
        ),
    ),
]
Seed = Annotated[int, _option(_STEPS, "Random seed for the weights and the order of the data.")]
Context = Annotated[int, _count(_DATA, "Number of tokens that a row predicts.")]
Repeat = Annotated[
    float,
    _option(
        _DATA,
        ("Share of rows that contain a segment twice, which makes induction heads form."),
        min=0,
        max=1,
    ),
]
RepeatFirst = Annotated[
    int,
    _option(
        _DATA,
        (
            "Number of first steps whose rows all contain a segment twice, which makes induction "
            "heads form early."
        ),
        min=0,
    ),
]
SaveEvery = Annotated[int, _count(_RUN, "Steps between checkpoints.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue from the last checkpoint in --out.", rich_help_panel=_RUN
    ),
]
Threads = Annotated[int | None, _count(_RUN, "Number of CPU threads.", "all cores")]
Device = Annotated[str, _option(_RUN, "Device: cpu, cuda, ...")]
Parallel = Annotated[
    Literal["context"] | None,
    _option(
        _RUN,
        (
            "Divide the tokens of each row among the processes that torchrun starts: torchrun "
            "--standalone --nproc-per-node 4 -m regard train ... --parallel context."
        ),
        show_default="one process",
    ),
]
Dtype = Annotated[
    str, _option(_RUN, "Number format of the final weights: float32, float16 or bfloat16.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print the final figures as JSON.", rich_help_panel=_RUN),
]

_TASKS = "Tasks with generated data, instead of text"
Task = Annotated[
    str | None,
    typer.Option(
        help=f"Task: {', '.join(TASKS)}; or list, which describes them.",
        callback=listing,
        is_eager=True,
        rich_help_panel=_TASKS,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=(
            "Model of the task: transformer, or lstm, gru or rnn, alone or with +bahdanau or "
            "+luong; for induction, mqar and passkey: decoder, lstm, gru or rnn."
        ),
        rich_help_panel=_TASKS,
    ),
]
Dropout = Annotated[float, _option(_TASKS, "Dropout of the transformer.", min=0, max=0.99)]
Smoothing = Annotated[float, _option(_TASKS, "Label smoothing.", min=0, max=0.99)]
Beams = Annotated[int, _count(_TASKS, "Number of beams in generation; 1 is greedy.")]
Examples = Annotated[int, _count(_TASKS, "Number of test examples per split at the end.")]
Beside = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of another run whose accuracy is drawn in the same chart. Repeatable.",
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
    vocab: Vocab = None,
    start_from: StartFrom = None,
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
    compile: Compile = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    parallel: Parallel = None,
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
    options = {name: value for name, value in locals().items() if name != "ctx"}
    given_names = options_on_command_line(ctx, options)
    check(options, given_names)
    if config is not None:
        options = merge_config(ctx, options, given_names, config)
    _check(options)
    if task is not None:
        train_task(options, given_names)
        return
    other_options = ("task", "config", *TASK_OPTIONS)
    options = {name: value for name, value in options.items() if name not in other_options}
    import torch

    from regard.train.pretraining import PretrainingRun

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    run = PretrainingRun(options)
    figures, stopped_by = run.run()
    if not run.writes:
        pass  # the first rank prints the figures
    elif json:
        typer.echo(json_format.dumps(figures))
    else:
        typer.echo("  ".join(f"{name} {value}" for name, value in figures.items()))
    if stopped_by:
        note("interrupted and saved; continue with the same command and --resume")
        raise typer.Exit(128 + stopped_by)


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
        "start_from",
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
        "compile",
        "threads",
        "device",
        "dtype",
    ),
    "data": ("source", "context", "repeat", "repeat_first"),
}
"""Section of the config file -> the options of the command that it may contain. [model.options] has
the options of the mechanism, like --set.
"""


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a config file as name -> text, written as on the command line; "option"
    has the name=value settings of [model.options].

    Raises:
        FileError: the file cannot be read, or is not TOML.
        ArgumentError: a section or a key is unknown or in the wrong place, or a value is not a
            plain one.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "small.toml"
    >>> model = "[model]\\nattention = 'gqa'\\nkv-heads = 2\\noptions.base = 5e4\\n"
    >>> _ = file.write_text(model + "[train]\\nbf16 = true")
    >>> read_config(file)
    {'attention': 'gqa', 'kv_heads': '2', 'option': ['base=50000.0'], 'bf16': 'True'}
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
