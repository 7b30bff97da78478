"""The command `regard bench`, which times regard and other installed implementations in turns in
one process, after checking their outputs.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import units
from regard.cli.options import check_files, note, usage_error
from regard.did_you_mean import suggest
from regard.language import Phrase

if TYPE_CHECKING:
    import torch

    from regard.bench.interfaces import Case, ProblemSizes
    from regard.bench.result import CaseResult
    from regard.bench.runner import TimingBudget
    from regard.timing.machine import Ceilings, MachineFacts

EPILOG = "For example: regard bench decode causal-prefill --size small --json -"

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CASE",
        help="Cases to measure, as --list shows them; the group `models` is all models of public "
        "libraries under regard.accelerate, the group `parallel` is attention over several ranks, "
        "the group `gpu` needs --device cuda.",
        show_default="all cases outside of groups",
    ),
]
Size = Annotated[str, typer.Option(help="Problem size: small, default or paper.")]
Length = Annotated[
    int | None,
    typer.Option(
        help="Number of tokens, instead of the number that --size sets. Cases that time whole "
        "programs do not take it.",
        min=1,
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Number of batch rows, instead of the number that --size sets.",
        min=1,
        show_default=False,
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        help="Number format: float32, bfloat16 or float16. Repeatable.",
        show_default="those of the case",
    ),
]
Rounds = Annotated[
    int, typer.Option(help="Number of rounds; each times every implementation once.", min=1)
]
Seconds = Annotated[
    float,
    typer.Option(help="Time limit of the rounds of each case and dtype, in seconds.", min=0.01),
]
Threads = Annotated[
    int | None, typer.Option(help="Number of CPU threads.", min=1, show_default="torch's number")
]
Device = Annotated[str, typer.Option(help="Device: cpu or cuda.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="Other implementation to compare regard with. Repeatable.",
        show_default="all that are installed",
    ),
]
Memory = Annotated[
    bool,
    typer.Option(
        "--memory",
        help=("Also measure the peak memory of each implementation, in a separate process."),
    ),
]
List = Annotated[
    bool, typer.Option("--list", help="List the cases, sizes and implementations, and exit.")
]
Tune = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measure the block sizes of the Triton kernels on a GPU instead, and write the rows "
        "of the table to this file, for review.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-", help="Write the figures as JSON to this file; - is standard output."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the time ratios to this .svg, .png or .pdf file."),
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
    tune: Tune = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time attention against other installed implementations, after checking the output of each
    against fp64. Also time the package itself: its start, reading a checkpoint, writing a page,
    and its kernels.

    Prints the median and the quartiles of the times, the ratio to the time of regard, and the
    achieved share of the memory bandwidth and of the matrix-product rate, which are measured in the
    same run. The exit code is 1 if an output is wrong,
    an implementation fails, or a case does not fit in memory. An implementation that is not
    installed is listed with the reason.
    """
    from regard.bench.runner import TimingBudget
    from regard.timing.machine import torch_threads as use

    cases = _cases(names, peer)
    if list_:
        from regard.bench.render import list_cases

        typer.echo(list_cases(cases))
        return
    if tune is not None:
        _tune(tune)
        return
    where, dtypes = _device(device), _dtypes(dtype)
    for case in cases:
        if case.why_not(where):
            needed = case.devices[0]
            raise usage_error(
                "--device",
                "{name} is measured on {needed} only; choose it with --device",
                name=case.name,
                needed=needed,
            )
    jobs = _jobs(cases, size, length, batch, dtypes)
    if memory and where.type != "cpu":
        raise usage_error("--memory", "peak memory can only be measured on a CPU")
    check_files(
        {"--json": None if json is None or json == "-" else Path(json)}, pictures={"--plot": plot}
    )
    chosen = {"size": size, "length": length, "batch": batch} if memory else None
    with use(threads):
        code = _run(jobs, where, TimingBudget(rounds, seconds), json, plot, chosen)
    raise typer.Exit(code)


def _tune(path: Path) -> None:
    """Measure the block sizes of the Triton kernels, and write the rows of the table."""
    import torch

    if not torch.cuda.is_available():
        raise usage_error("--tune", "torch finds no CUDA device; block sizes are measured on one")
    check_files({"--tune": path})
    from regard.bench.block_tuning import (
        ATTENTION,
        as_python,
        measure_on,
        shared_memory_limit,
        tune,
    )
    from regard.bench.recurrence_tuning import RECURRENCES
    from regard.ops.triton_support import capability_of
    from regard.view.html_page import write

    device = torch.device("cuda", torch.cuda.current_device())
    limit, texts = shared_memory_limit(device), []
    for table in (ATTENTION, RECURRENCES):
        proposals = tune(measure_on(device, table=table), limit, table=table, say=_report)
        name = torch.cuda.get_device_name(device)
        texts.append(as_python(capability_of(device), name, proposals, table))
    write(path, "\n\n".join(texts) + "\n")


def _run(
    jobs: list[tuple[Case, ProblemSizes, torch.dtype]],
    device: torch.device,
    budget: TimingBudget,
    json: str | None,
    plot: Path | None,
    memory: dict[str, Any] | None,
) -> int:
    """Measure the cases, print and write the results, and return the exit code."""
    from regard.bench import Ceilings, measure
    from regard.bench.render import (
        accelerated_table,
        case_table,
        header,
        memory_table,
        parallel_table,
    )
    from regard.bench.result import as_json
    from regard.timing.machine import describe_machine

    def echo(text: str) -> None:  # with --json -, standard output has the JSON only
        typer.echo(text, err=json == "-")

    machine_facts, interrupted, results = describe_machine(device), False, []
    ceilings = None
    try:
        _report("measuring the machine's peak bandwidth and rates")
        ceilings = Ceilings.measure(dict.fromkeys(dtype for *_, dtype in jobs), device)
        echo(header(machine_facts, ceilings))
        for case, sizes, dtype in jobs:
            peak = None if memory is None else _peak(case, dtype, memory)
            results.append(
                measure(
                    case,
                    sizes,
                    dtype,
                    device,
                    budget=budget,
                    ceilings=ceilings,
                    say=_report,
                    peak=peak,
                )
            )
            echo("\n" + case_table(results[-1]))
            if results[-1].interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
        if ceilings is None:
            return 130
    for draw in (accelerated_table, parallel_table, memory_table):
        table = draw(results)
        if table:
            echo("\n" + table)
    _write(as_json(machine_facts, ceilings, results, interrupted=interrupted), json)
    if plot is not None and results:
        _draw(results, plot, machine_facts, ceilings)
    if interrupted:
        return 130
    return int(any(result.failed for result in results))


def _peak(
    case: Case, dtype: torch.dtype, size_options: dict[str, object]
) -> Callable[[str], int | None]:
    """Return a function that measures the peak memory of an implementation of a case, given its
    name.
    """
    import torch

    from regard.timing.measurement import call_in_subprocess

    settings = {**size_options, "case": case.name, "dtype": str(dtype).removeprefix("torch.")}
    settings["threads"] = torch.get_num_threads()
    return lambda name: call_in_subprocess(
        "regard.bench.cases:peer_peak_bytes",
        {**settings, "peer": name},
        advice="leave --memory out to skip this measurement",
    )


def _write(figures: dict[str, object], json: str | None) -> None:
    text = json_format.dumps(figures, indent=1, allow_nan=False)
    if json == "-":
        typer.echo(text)
    elif json is not None:
        from regard.view.html_page import write

        write(Path(json), text + "\n")


def _draw(
    results: list[CaseResult], path: Path, machine_facts: MachineFacts, ceilings: Ceilings
) -> None:
    from regard.bench.render import ratio_chart
    from regard.view import charts

    where = (
        f"{machine_facts['processor']}, {units.plural(machine_facts['threads'], 'thread')}, torch "
        f"{machine_facts['torch']}"
    )
    charts.write(ratio_chart(results, f"{where}, reading {units.rate(ceilings.read)}"), path)


def _report(line: str) -> None:
    note(line, "... ")


def _cases(names: list[str] | None, peers: list[str] | None) -> list[Case]:
    """Return the cases with the requested implementations, or with all."""
    from dataclasses import replace

    from regard.bench import CASES
    from regard.bench.cases import GROUPS

    for name in names or []:
        _check(name, {**GROUPS, **CASES}, "cases", "CASE")
    grouped = {name for group in GROUPS.values() for name in group}
    chosen = names or [name for name in CASES if name not in grouped]
    cases = [
        CASES[name]
        for name in dict.fromkeys(case for name in chosen for case in GROUPS.get(name, (name,)))
    ]
    if not peers:
        return cases
    known = {peer.name for case in cases for peer in case.peers}
    for name in peers:
        _check(name, known, "peers of these cases", "--peer")
    cases_with_peers = []
    for case in cases:
        ours, *others = case.peers
        cases_with_peers.append(
            replace(case, peers=(ours, *(peer for peer in others if peer.name in peers)))
        )
    return cases_with_peers


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
        raise usage_error("--device", "torch finds no CUDA device; use cpu")
    return torch.device(name)


def _check(name: str, known: Any, kind: str, hint: str) -> None:
    """Raise an error for a name that is not known, with a suggestion."""
    if name in known:
        return
    raise usage_error(
        hint,
        "{name!r} is not one of the {kind} {known}{hint}",
        name=name,
        kind=Phrase(kind),
        known=", ".join(known),
        hint=suggest(name, known),
    )
