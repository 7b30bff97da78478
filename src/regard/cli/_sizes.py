"""The options of `regard cost`, as types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A known name, a config.json or its folder, or org/name on the hub.",
        show_default="sizes as flags",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Of MODEL on the hub: a branch, a tag or a commit.", show_default="its main branch"
    ),
]
Context = Annotated[str | None, typer.Option(help="Tokens: 4096, 8k, 1M.", show_default="4096")]
Batch = Annotated[int, typer.Option(help="Texts at once.", min=1)]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of weights: fp32, bf16, fp16, fp8, int8, int4, int2.",
        show_default="the file's, or bf16",
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Of the cache: the same names.", show_default="the weights', but at least 16 bits"
    ),
]
Machine = Annotated[
    str | None, typer.Option(help="A name of --list; or here: measured now.", show_default="none")
]
Bandwidth = Annotated[
    float | None, typer.Option(help="Bytes per second, with --flops.", show_default=False)
]
Flops = Annotated[
    float | None, typer.Option(help="FLOPs per second, with --bandwidth.", show_default=False)
]
Versus = Annotated[
    str | None,
    typer.Option("--vs", help="A second known name, config.json or folder.", show_default=False),
]
Sweep = Annotated[
    str | None,
    typer.Option(help="A range of contexts, doubled: context=1k..1M.", show_default=False),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the sweep (else 1k..128k): .svg, .png or .pdf.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
List = Annotated[bool, typer.Option("--list", help="List models and machines, and stop.")]

Layers = Annotated[int | None, typer.Option(help="How many layers.", show_default=False)]
Dim = Annotated[int | None, typer.Option(help="Model width M.", show_default=False)]
Heads = Annotated[int | None, typer.Option(help="Query heads H.", show_default=False)]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads G.", show_default="H")]
HeadDim = Annotated[int | None, typer.Option(help="D.", show_default="M / H")]
Attention = Annotated[
    str | None,
    typer.Option(help="A mechanism of regard describe.", show_default="mha or gqa, by G"),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Another size of it, such as kv_rank=512; repeatable.", show_default=False
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Keys that a query sees at most.", show_default="all")
]
GlobalEvery = Annotated[
    int | None, typer.Option(help="With --window: every n-th layer has none.", show_default=False)
]
FF = Annotated[
    int | None, typer.Option("--ff", help="F of feed-forward layers.", show_default="4 M")
]
Gated = Annotated[
    bool | None,
    typer.Option("--gated/--plain", help="Whether they have a gate.", show_default="gated"),
]
Vocab = Annotated[int | None, typer.Option(help="V.", show_default="32000")]
Tied = Annotated[
    bool | None,
    typer.Option(
        "--tied/--untied", help="Whether the head is the embedding.", show_default="untied"
    ),
]
Experts = Annotated[int | None, typer.Option(help="How many experts.", show_default=False)]
Active = Annotated[int | None, typer.Option(help="How many a token uses.", show_default=False)]
ExpertFF = Annotated[
    int | None, typer.Option("--expert-ff", help="F of an expert.", show_default="that of --ff")
]
Shared = Annotated[
    int | None, typer.Option(help="Experts that all tokens use.", show_default=False)
]
DenseLayers = Annotated[
    int | None, typer.Option(help="First layers without experts.", show_default=False)
]
