"""Time regard and other installed implementations in turns, after checking their outputs:
`python -m benchmarks [CASE]...`, in a checkout.
"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks import CASES, Case, Ceilings, ProblemSizes, TimingBudget, measure, render
from benchmarks.block_tuning import (
    ATTENTION,
    RECURRENCES,
    as_python,
    measure_on,
    shared_memory_limit,
    tune_table,
)
from benchmarks.cases import GROUPS
from benchmarks.interfaces import SIZES, name_of
from benchmarks.result import CaseResult, as_json
from regard import units
from regard.cli.app import command_of, run
from regard.cli.options import check_files, note, usage_error
from regard.did_you_mean import suggest
from regard.language import Phrase
from regard.ops.triton_support import capability_of
from regard.standard_output import run_program
from regard.timing import MachineFacts, call_in_subprocess, describe_machine, torch_threads
from regard.view import charts, html_page

PROGRAM = "python -m benchmarks"
EPILOG = "For example: python -m benchmarks decode causal-prefill --size small --json -"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
        help="Also measure the peak memory of each implementation, in a separate process.",
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
Job = tuple[Case, ProblemSizes, torch.dtype]


def benchmarks(
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
    cases = chosen_cases(names, peer)
    if list_:
        typer.echo(render.list_cases(cases))
        return
    if tune is not None:
        write_tuned_tables(tune)
        return
    check_choice(device, ("cpu", "cuda"), "devices", "--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise usage_error("--device", "torch finds no CUDA device; use cpu")
    check_choice(size, SIZES, "sizes", "--size")
    for name in dtype or []:
        check_choice(name, DTYPES, "dtypes", "--dtype")
    for case in cases:
        if case.why_not(torch.device(device)):
            raise usage_error(
                "--device",
                "{name} is measured on {needed} only; choose it with --device",
                name=case.name,
                needed=case.devices[0],
            )
    if memory and device != "cpu":
        raise usage_error("--memory", "peak memory can only be measured on a CPU")
    check_files(
        {"--json": None if json is None or json == "-" else Path(json)}, pictures={"--plot": plot}
    )
    jobs = [
        (case, case.sizes[size].resized(length=length, batch=batch), x)
        for case in cases
        for x in (map(DTYPES.__getitem__, dict.fromkeys(dtype)) if dtype else case.dtypes)
    ]
    chosen = {"size": size, "length": length, "batch": batch} if memory else None
    budget = TimingBudget(rounds, seconds)
    with torch_threads(threads):
        measured = measure_jobs(jobs, torch.device(device), budget, chosen, json == "-")
        if measured.ceilings is not None:
            measured.write(json, plot)
    raise typer.Exit(measured.exit_code)


class Run(NamedTuple):
    """What a run has measured; no ceilings if it was interrupted before the first case."""

    machine_facts: MachineFacts
    ceilings: Ceilings | None
    results: list[CaseResult]
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """130 after an interrupt, 1 if a case was refused or an implementation wrong, or 0."""
        return 130 if self.interrupted else int(any(result.failed for result in self.results))

    def write(self, json: str | None, plot: Path | None) -> None:
        """Print or write the JSON, and draw the chart."""
        facts, ceilings = self.machine_facts, self.ceilings
        assert ceilings is not None
        figures = as_json(facts, ceilings, self.results, interrupted=self.interrupted)
        text = json_format.dumps(figures, indent=1, allow_nan=False)
        if json == "-":
            typer.echo(text)
        elif json is not None:
            html_page.write(Path(json), text + "\n")
        if plot is not None and self.results:
            threads = units.plural(facts["threads"], "thread")
            where = f"{facts['processor']}, {threads}, torch {facts['torch']}"
            title = f"{where}, reading {units.rate(ceilings.read)}"
            charts.write(render.ratio_chart(self.results, title), plot)


def measure_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    budget: TimingBudget,
    memory: dict[str, Any] | None,
    json_is_printed: bool,
) -> Run:
    """Measure the cases and print their tables, on standard error if JSON is printed."""
    echo = partial(typer.echo, err=json_is_printed)
    machine_facts, ceilings, results = describe_machine(device), None, list[CaseResult]()
    interrupted = False
    try:
        report(Phrase("measuring the machine's peak bandwidth and rates"))
        ceilings = Ceilings.measure(dict.fromkeys(dtype for *_, dtype in jobs), device)
        echo(render.header(machine_facts, ceilings))
        for case, sizes, dtype in jobs:
            peak = None if memory is None else peak_of_peer(case, dtype, memory)
            options: dict[str, Any] = {"budget": budget, "ceilings": ceilings}
            results.append(measure(case, sizes, dtype, device, say=report, peak=peak, **options))
            echo("\n" + render.case_table(results[-1]))
            if results[-1].interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    for table in render.group_tables(results):
        echo("\n" + table)
    return Run(machine_facts, ceilings, results, interrupted)


def peak_of_peer(
    case: Case, dtype: torch.dtype, size_options: dict[str, object]
) -> Callable[[str], int | None]:
    """Return a function from the name of an implementation to its peak memory."""
    settings = {**size_options, "case": case.name, "dtype": name_of(dtype)}
    settings["threads"] = torch.get_num_threads()
    return lambda name: call_in_subprocess(
        "benchmarks.cases:peer_peak_bytes",
        {**settings, "peer": name},
        advice="leave --memory out to skip this measurement",
    )


def write_tuned_tables(path: Path) -> None:
    """Measure the block sizes of the Triton kernels, and write the rows of the tables."""
    if not torch.cuda.is_available():
        raise usage_error("--tune", "torch finds no CUDA device; block sizes are measured on one")
    check_files({"--tune": path})
    device = torch.device("cuda", torch.cuda.current_device())
    limit, name = shared_memory_limit(device), torch.cuda.get_device_name(device)
    texts = []
    for table in (ATTENTION, RECURRENCES):
        proposals = tune_table(measure_on(device, table=table), limit, table=table, say=report)
        texts.append(as_python(capability_of(device), name, proposals, table))
    html_page.write(path, "\n\n".join(texts) + "\n")


def report(line: str) -> None:
    """Print on standard error what is being done."""
    note(line, "... ")


def chosen_cases(names: list[str] | None, peers: list[str] | None) -> list[Case]:
    """Return the cases with the requested implementations, or with all."""
    for name in names or []:
        check_choice(name, {**GROUPS, **CASES}, "cases", "CASE")
    grouped = {name for group in GROUPS.values() for name in group}
    chosen = names or [name for name in CASES if name not in grouped]
    single = dict.fromkeys(case for name in chosen for case in GROUPS.get(name, (name,)))
    cases = [CASES[name] for name in single]
    if not peers:
        return cases
    known = {peer.name for case in cases for peer in case.peers}
    for name in peers:
        check_choice(name, known, "peers of these cases", "--peer")
    return [
        replace(case, peers=(case.peers[0], *(x for x in case.peers[1:] if x.name in peers)))
        for case in cases
    ]


def check_choice(name: str, known: Collection[str], kind: str, option: str) -> None:
    """Raise a usage error for a name that is not known, with a suggestion."""
    if name not in known:
        raise usage_error(
            option,
            "{name!r} is not one of the {kind} {known}{hint}",
            name=name,
            kind=Phrase(kind),
            known=", ".join(known),
            hint=suggest(name, known),
        )


def main(arguments: Sequence[str]) -> int:
    """Run the program with these arguments, and return its exit code."""
    return run(arguments, partial(command_of, benchmarks, EPILOG), PROGRAM)


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
