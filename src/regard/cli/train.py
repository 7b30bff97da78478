"""`regard train`: a language model from text, with its tokenizer, log and checkpoints."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import ArgumentError


def _count(text: str, default: str | None = None) -> Any:
    return typer.Option(help=text, min=1, show_default=default or True)


Source = Annotated[
    str, typer.Argument(help="A UTF-8 file, a folder of text files, or python-docs.")
]
Out = Annotated[Path, typer.Option(help="The folder to write; everything is written under it.")]
Steps = Annotated[int, _count("Optimiser steps.")]
Batch = Annotated[int, _count("Rows per step.")]
Context = Annotated[int, _count("Tokens that a row predicts.")]
Dim = Annotated[int, _count("Model width M.")]
Layers = Annotated[int, _count("Blocks.")]
Heads = Annotated[int, _count("Query heads H.")]
KvHeads = Annotated[int, _count("Key/value heads G; must divide the query heads.")]
Hidden = Annotated[int | None, _count("Feed-forward width.", "8/3 of dim")]
Vocab = Annotated[int, typer.Option(help="Tokens in the vocabulary.", min=257)]
Tie = Annotated[bool, typer.Option(help="One matrix for embedding and head.")]
Lr = Annotated[float, typer.Option(help="Peak learning rate.")]
Warmup = Annotated[int, typer.Option(help="Steps of linear warm-up.", min=0)]
Accumulate = Annotated[int, _count("Batches per optimiser step.")]
Repeat = Annotated[
    float,
    typer.Option(
        help="Share of rows that say a segment twice: makes induction heads form.", min=0, max=1
    ),
]
RepeatFirst = Annotated[
    int,
    typer.Option(
        help="Steps at the start on rows that repeat only: induction heads form early.", min=0
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the data order.")]
SaveEvery = Annotated[int, _count("Steps between checkpoints.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")]
Threads = Annotated[int | None, _count("CPU threads.", "all cores")]
Bf16 = Annotated[bool, typer.Option(help="Compute in bfloat16 where that is safe (autocast).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Dtype = Annotated[
    str, typer.Option(help="Type of the final weights: float32, float16 or bfloat16.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the final figures as JSON.")]


def train(
    out: Out,
    source: Source = "python-docs",
    steps: Steps = 4000,
    batch: Batch = 16,
    context: Context = 256,
    dim: Dim = 256,
    layers: Layers = 6,
    heads: Heads = 8,
    kv_heads: KvHeads = 2,
    hidden: Hidden = None,
    vocab: Vocab = 4096,
    tie: Tie = False,
    lr: Lr = 1e-3,
    warmup: Warmup = 200,
    accumulate: Accumulate = 1,
    repeat: Repeat = 0.0,
    repeat_first: RepeatFirst = 0,
    seed: Seed = 0,
    save_every: SaveEvery = 500,
    resume: Resume = False,
    threads: Threads = None,
    bf16: Bf16 = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Train a decoder on text and write a checkpoint folder that `regard` can load.

    Writes tokenizer.json, config.json, model.safetensors, train.csv, command.txt and checkpoints/
    under --out.

    Example: regard train --out my-model --steps 200 --dim 64 --layers 2 --heads 4 --context 64
    """
    options = dict(locals())
    _check(options)
    import torch

    from regard.train.run import Run

    if threads:
        torch.set_num_threads(threads)
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
    if options["dim"] % options["heads"] or options["dim"] // options["heads"] % 2:
        raise typer.BadParameter(
            f"dim {options['dim']} / heads {options['heads']} must be even: it is a head's width",
            param_hint="--dim",
        )
