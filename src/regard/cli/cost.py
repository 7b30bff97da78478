"""`regard cost`: parameters, FLOPs, cache bytes and the least time of a model, from its sizes
alone.
"""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.configs.known import KNOWN, model_of
from regard.cost.model import Model
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, machine_of
from regard.cost.sweep import doubling, figures, fitting, sweep, tokens, versus
from regard.errors import ArgumentError
from regard.view import cost as text

if TYPE_CHECKING:
    import torch

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
MachineOption = Annotated[
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


EPILOG = "For example: regard cost llama-3-8b --context 32k --machine h100-sxm --vs deepseek-v3"
CONTEXT, RANGE = 4096, "context=1k..128k"
"""What is told of unless asked otherwise; and what is drawn."""
Rows = dict[str, list[dict[str, Any]]]


def cost(
    source: Source = None,
    revision: Revision = None,
    context: Context = None,
    batch: Batch = 1,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    machine: MachineOption = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    vs: Versus = None,
    sweep: Sweep = None,
    plot: Plot = None,
    json: Json = False,
    list_: List = False,
    layers: Layers = None,
    dim: Dim = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    attention: Attention = None,
    option: Set = None,
    window: Window = None,
    global_every: GlobalEvery = None,
    ff: FF = None,
    gated: Gated = None,
    vocab: Vocab = None,
    tied: Tied = None,
    experts: Experts = None,
    active: Active = None,
    expert_ff: ExpertFF = None,
    shared: Shared = None,
    dense_layers: DenseLayers = None,
) -> None:
    """Parameters by part, FLOPs of a prompt and of a token, bytes of cache, and the least time on a
    machine.

    A multiplication and an addition are two FLOPs; the prompt is charged for the logits of its last
    token. Times are lower bounds: the bytes at full bandwidth, or the FLOPs at full rate, whichever
    takes longer. Memory is in GiB (2^30 bytes), bandwidth in GB/s (1e9 bytes a second).
    """
    if list_:
        typer.echo(text.listing(json=json))
        return
    sizes = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "attention": attention,
        "global_every": global_every,
        "ff": ff,
        "gated": gated,
        "vocab": vocab,
        "tied": tied,
        "experts": experts,
        "active": active,
        "expert_ff": expert_ff,
        "shared": shared,
        "dense_layers": dense_layers,
    }
    own = {"groups": kv_heads, "head_dim": head_dim, "window": window}
    try:
        models = [_model(source, revision, sizes, _joined(own, option or []))]
        models += [] if vs is None else [_named(vs, None)]
        base = Setting(1, batch, dtype or "bf16", kv_dtype)
        where = _machine(machine, bandwidth, flops)
        settings = [replace(base, dtype=dtype or model.dtype) for model in models]
        if sweep is not None or plot is not None:
            if context is not None:
                raise ArgumentError(
                    "--context is one length, and --sweep and --plot take a range: leave one out"
                )
            _range(models, settings, where, sweep or RANGE, plot, json=json)
            return
        at = _context(context, models)
        reports = [
            CostReport(m, replace(s, context=at)) for m, s in zip(models, settings, strict=True)
        ]
        _show(reports, where, json=json)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error


def _named(source: str, revision: str | None) -> Model:
    """The model of a known name, a path, or a repository of the hub, of which config.json alone is
    downloaded.
    """
    if "/" in source and source.lower() not in KNOWN:
        # the package of models imports torch, which no other source of sizes waits for
        from regard.models import hub

        repository = hub.repository_of(source)
        if repository is not None:
            folder = hub.download(repository, revision, weights=False)
            return replace(model_of(str(folder)), name=repository)
    if revision is not None:
        raise ArgumentError(f"--revision is for a repository of the hub, and {source!r} is none")
    return model_of(source)


def _model(
    source: str | None, revision: str | None, sizes: dict[str, Any], own: dict[str, Any]
) -> Model:
    """The model that is named, or that the sizes make."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if source is not None:
        if extra := [*given, *own]:
            names = ", ".join(_spelled(name) for name in extra)
            raise ArgumentError(
                f"{source} says all sizes, and {names} too; leave them out, or leave out the name "
                "and give all sizes"
            )
        return _named(source, revision)
    if revision is not None:
        raise ArgumentError("--revision is for a repository of the hub, and no model is named")
    if missing := [name for name in ("layers", "dim", "heads") if name not in given]:
        names = ", ".join(map(_spelled, missing))
        raise ArgumentError(
            f"give a model, or its sizes: {names} missing. regard cost --list names what is known"
        )
    from regard.cost.sizes import Sizes

    return Sizes(**given, options=own).model()


def _spelled(name: str) -> str:
    known = {"groups": "--kv-heads", "head_dim": "--head-dim", "window": "--window"}
    return known.get(name, f"--{name.replace('_', '-')}")


def _joined(own: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Sizes of the mechanism: flags of their own, and those of --set."""
    found = {name: value for name, value in own.items() if value is not None}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign or not (value.isdecimal() or name == "form"):
            raise ArgumentError(
                f"--set {setting!r}: give name=value, a whole number, such as kv_rank=512"
            )
        if name in found:
            raise ArgumentError(f"{name} is given twice; keep one")
        found[name] = value if name == "form" else int(value)
    return found


def _context(text: str | None, models: list[Model]) -> int:
    """What is asked for; else 4096, or less where learned positions end before."""
    if text is not None:
        return tokens(text)
    return min([CONTEXT, *(m.longest for m in models if m.longest is not None)])


def _machine(name: str | None, bandwidth: float | None, flops: float | None) -> Machine | None:
    """The machine that is named, described, or measured."""
    if (bandwidth is None) != (flops is None):
        raise ArgumentError("--bandwidth and --flops belong together: give both, or a --machine")
    if bandwidth is not None and flops is not None:
        if name is not None:
            raise ArgumentError(
                "--machine says bandwidth and FLOPs: leave out --bandwidth and --flops, or "
                "--machine"
            )
        if not (0 < bandwidth < float("inf") and 0 < flops < float("inf")):
            raise ArgumentError(
                "--bandwidth and --flops must be above 0, per second, such as 5e10 and 1e12"
            )
        return Machine(
            "the given machine", bandwidth, {"fp32": flops}, 0, "--bandwidth and --flops"
        )
    if name is None:
        return None
    return _here() if name == "here" else machine_of(name)


def _here() -> Machine:
    """This machine: reading, and products of matrices, measured as `regard bench` does it."""
    import torch

    from regard.bench.machine import Ceilings, free_memory
    from regard.bench.machine import describe_machine as about

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names: dict[torch.dtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    typer.echo("... what this machine does at most", err=True)
    top, found = Ceilings.measure(names, device), about(device)
    threads = f"{found['threads']} threads" if device.type == "cpu" else "GPU"
    said = (
        f"measured now, the best of several: {found.get('gpu', found['processor'])}, "
        f"{threads}, torch {found['torch']}"
    )
    rates = {names[d]: rate for d, rate in top.gemm.items()}
    return Machine("here", top.read, rates, free_memory(device), said, "what is free now")


def _show(reports: list[CostReport], machine: Machine | None, *, json: bool) -> None:
    if json:
        found = (
            figures(reports[0], machine)
            if len(reports) == 1
            else versus(reports[0], reports[1], machine)
        )
        typer.echo(json_format.dumps(found, indent=1, allow_nan=False))
    elif len(reports) == 1:
        typer.echo(text.page(reports[0], machine))
    else:
        typer.echo(text.side_by_side(reports[0], reports[1], machine))


def _range(
    models: list[Model],
    settings: list[Setting],
    machine: Machine | None,
    span: str,
    plot: Path | None,
    *,
    json: bool,
) -> None:
    """A row for each context, and a chart of them."""
    asked = doubling(span)
    contexts = fitting(asked, *models)
    if len(contexts) < len(asked):
        typer.echo(f"learned positions end: contexts above {contexts[-1]:,} are left out", err=True)
    if plot is not None:
        from regard.cli.options import check_files

        check_files({}, pictures={"--plot": plot})
    rows: Rows = {}
    for i, (model, setting) in enumerate(zip(models, settings, strict=True)):
        name = model.name if model.name not in rows else f"{model.name} ({i + 1})"
        rows[name] = sweep(model, setting, contexts, machine)
    if plot is not None:
        from regard.view import charts

        title = f"batch {settings[0].batch}" + (f", {machine.name}" if machine else "")
        charts.write(charts.context_charts(rows, title), plot)
    if json:
        typer.echo(json_format.dumps({"sweep": rows}, indent=1, allow_nan=False))
    else:
        typer.echo("\n\n".join(text.swept(name, found) for name, found in rows.items()))
