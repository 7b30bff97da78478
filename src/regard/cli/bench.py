"""`regard bench`: regard against what else is installed, checked for equal outputs and timed in
turns, in one process.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import units
from regard.cli.options import check_files
from regard.suggest import suggest

if TYPE_CHECKING:
    import torch

    from regard.bench.interfaces import Case, ProblemSizes
    from regard.bench.machine import Ceilings
    from regard.bench.result import CaseResult
    from regard.bench.runner import TimingBudget

EPILOG = "For example: regard bench decode causal-prefill --size small --json -"

Names = Annotated[
    list[str] | None, typer.Argument(metavar="CASE", help="Cases.", show_default="all of them")
]
Size = Annotated[str, typer.Option(help="small, default or paper.")]
Length = Annotated[
    int | None,
    typer.Option(
        help="Tokens, in place of the size's; whole programs have none.", min=1, show_default=False
    ),
]
Batch = Annotated[
    int | None, typer.Option(help="Batch rows, in place of the size's.", min=1, show_default=False)
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(help="float32, bfloat16 or float16; repeatable.", show_default="the case's"),
]
Rounds = Annotated[int, typer.Option(help="Rounds; each times every peer once.", min=1)]
Seconds = Annotated[
    float, typer.Option(help="Seconds of rounds for each case and dtype.", min=0.01)
]
Threads = Annotated[int | None, typer.Option(help="Threads.", min=1, show_default="torch's")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", help="A peer beside ours; repeatable.", show_default="all that are there"
    ),
]
Memory = Annotated[
    bool,
    typer.Option(
        "--memory", help="Measure the most memory of each peer too, in a process of its own."
    ),
]
List = Annotated[bool, typer.Option("--list", help="List cases, sizes and peers, and stop.")]
Json = Annotated[
    str | None, typer.Option(metavar="FILE|-", help="Write the figures as JSON; - is stdout.")
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the ratios: .svg, .png or .pdf.")
]


def bench(
    names: Names = None,
    size: Size = "default",
    length: Length = None,
    batch: Batch = None,
    dtype: Dtype = None,
    rounds: Rounds = 15,
    seconds: Seconds = 30.0,
    threads: Threads = None,
    device: Device = "cpu",
    peer: Only = None,
    memory: Memory = False,
    list_: List = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time attention against the implementations that are installed, each checked against fp64
    before; and this package itself: its start, reading a checkpoint, a page, its kernels.

    Medians, quartiles and ratios round by round; shares of the memory bandwidth and of the matrix
    products that the same run measures. A wrong answer, a failure or a case that does not fit makes
    the exit code 1; a peer that is not installed is listed with the reason.
    """
    from regard.bench.runner import TimingBudget
    from regard.bench.runner import torch_threads as use

    cases = _cases(names, peer)
    if list_:
        from regard.bench.render import list_cases

        typer.echo(list_cases(cases))
        return
    where, dtypes = _device(device), _dtypes(dtype)
    jobs = _jobs(cases, size, length, batch, dtypes)
    if memory and where.type != "cpu":
        raise typer.BadParameter("memory is measured on a CPU only", param_hint="--memory")
    check_files(
        {"--json": None if json is None or json == "-" else Path(json)}, pictures={"--plot": plot}
    )
    chosen = {"size": size, "length": length, "batch": batch} if memory else None
    with use(threads):
        code = _run(jobs, where, TimingBudget(rounds, seconds), json, plot, chosen)
    raise typer.Exit(code)


def _run(
    jobs: list[tuple[Case, ProblemSizes, torch.dtype]],
    device: torch.device,
    budget: TimingBudget,
    json: str | None,
    plot: Path | None,
    memory: dict[str, Any] | None,
) -> int:
    """Measure, print, write; the exit code.

    memory: the options that the sizes were made from, where memory is measured.
    """
    from regard.bench import Ceilings, measure
    from regard.bench.machine import describe_machine
    from regard.bench.render import case_table, header
    from regard.bench.result import as_json

    def echo(text: str) -> None:  # stdout is the JSON's alone where it goes there
        typer.echo(text, err=json == "-")

    about, interrupted, found = describe_machine(device), False, []
    ceilings = None
    try:
        _say("what the machine does at most")
        ceilings = Ceilings.measure(dict.fromkeys(dtype for *_, dtype in jobs), device)
        echo(header(about, ceilings))
        for case, sizes, dtype in jobs:
            peak = None if memory is None else _peak(case, dtype, memory)
            found.append(
                measure(
                    case,
                    sizes,
                    dtype,
                    device,
                    budget=budget,
                    ceilings=ceilings,
                    say=_say,
                    peak=peak,
                )
            )
            echo("\n" + case_table(found[-1]))
            if found[-1].interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
        if ceilings is None:
            return 130
    _write(as_json(about, ceilings, found, interrupted=interrupted), json)
    if plot is not None and found:
        _draw(found, plot, about, ceilings)
    if interrupted:
        return 130
    return int(any(one.failed for one in found))


def _peak(case: Case, dtype: torch.dtype, chosen: dict[str, Any]) -> Callable[[str], int | None]:
    """What measures the memory of a peer of a case, by its name."""
    import torch

    from regard.bench.peak_memory import call_in_subprocess

    settings = {**chosen, "case": case.name, "dtype": str(dtype).removeprefix("torch.")}
    settings["threads"] = torch.get_num_threads()
    return lambda name: call_in_subprocess(
        "regard.bench.peak_memory:peer_peak_bytes",
        {**settings, "peer": name},
        advice="leave --memory out to go without it",
    )


def _write(figures: dict[str, Any], json: str | None) -> None:
    text = json_format.dumps(figures, indent=1, allow_nan=False)
    if json == "-":
        typer.echo(text)
    elif json is not None:
        from regard.view.html import write

        write(Path(json), text + "\n")


def _draw(found: list[CaseResult], path: Path, about: dict[str, Any], ceilings: Ceilings) -> None:
    from regard.bench.render import ratio_chart
    from regard.view import charts

    where = f"{about['processor']}, {about['threads']} threads, torch {about['torch']}"
    charts.write(ratio_chart(found, f"{where}, reading {units.rate(ceilings.read)}"), path)


def _say(line: str) -> None:
    typer.echo(f"... {line}", err=True)


def _cases(names: list[str] | None, peers: list[str] | None) -> list[Case]:
    """The cases, with the peers that were asked for, or all."""
    from dataclasses import replace

    from regard.bench import CASES

    for name in names or []:
        _check(name, CASES, "cases", "CASE")
    cases = [CASES[name] for name in dict.fromkeys(names or CASES)]
    if not peers:
        return cases
    known = {one.name for case in cases for one in case.peers}
    for name in peers:
        _check(name, known, "peers of these cases", "--peer")
    kept = []
    for case in cases:
        ours, *others = case.peers
        kept.append(replace(case, peers=(ours, *(one for one in others if one.name in peers))))
    return kept


def _jobs(
    cases: list[Case],
    size: str,
    length: int | None,
    batch: int | None,
    dtypes: tuple[torch.dtype, ...] | None,
) -> list[tuple[Case, ProblemSizes, torch.dtype]]:
    from regard.bench.cases import SIZES

    _check(size, SIZES, "sizes", "--size")
    return [
        (case, case.sizes[size].resized(length=length, batch=batch), dtype)
        for case in cases
        for dtype in dtypes or case.dtypes
    ]


def _dtypes(names: list[str] | None) -> tuple[torch.dtype, ...] | None:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    for name in names or []:
        _check(name, known, "dtypes", "--dtype")
    return tuple(known[name] for name in dict.fromkeys(names)) if names else None


def _device(name: str) -> torch.device:
    import torch

    _check(name, ("cpu", "cuda"), "devices", "--device")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device; use cpu", param_hint="--device")
    return torch.device(name)


def _check(name: str, known: Any, what: str, hint: str) -> None:
    """Refuse a name that is not known."""
    if name in known:
        return
    raise typer.BadParameter(
        f"{name!r} is none of the {what} {', '.join(known)}{suggest(name, known)}", param_hint=hint
    )
