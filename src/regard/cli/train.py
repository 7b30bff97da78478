"""`regard train`: a language model from text, with its tokenizer, log and checkpoints."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import _file, _tasks
from regard.errors import ArgumentError

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
        help=f"{', '.join(_tasks.TASKS)}; or list, which says what they are.",
        callback=_tasks.listing,
        is_eager=True,
        rich_help_panel=_TASKS,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="lstm, lstm+bahdanau, lstm+luong (or gru, rnn) or transformer; decoder or lstm where a row is continued.",
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
    given = _file.given(ctx, options)
    _tasks.check(options, given)
    if config is not None:
        options = _file.merged(ctx, options, given, config)
    _check(options)
    if task is not None:
        _tasks.train_task(options, given)
        return
    elsewhere = ("task", "config", *_tasks.ONLY)
    options = {name: value for name, value in options.items() if name not in elsewhere}
    import torch

    from regard.train.run import Run

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    try:
        figures, stopped_by = Run(options).run()
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
