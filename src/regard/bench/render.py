"""Results of the benchmark as text and as a chart, and the list of what could be run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from regard import units
from regard.bench.interfaces import Case, Peer
from regard.bench.machine import Ceilings
from regard.bench.result import Measured, Row
from regard.errors import RegardError
from regard.table import table as table_of
from regard.view.charts import Bar, RatioBars

HEADS = (
    *("", "median", "quartiles", "x ours", "GB/s", "read", "GFLOP/s", "gemm"),
    *("error", "allowed", "memory", "kernel"),
)
"""The columns of a case. `x ours` is a peer's time divided by ours, round by round; `read` is the
share of the memory bandwidth that the same turns measured, `gemm` of the ceiling in the header;
`memory` is the most that a call takes, with --memory.
"""


def header(machine: dict[str, Any], ceilings: Ceilings) -> str:
    """The machine, and its ceilings.

    >>> about = {"processor": "CPU", "cores": 2, "threads": 2, "features": ["avx2"]}
    >>> about |= {"torch": "2", "regard": "1"}
    >>> print(header(about, Ceilings(4e10)))
    CPU, 2 cores, 2 threads, avx2, torch 2, regard 1
    ceilings: reading 40.0 GB/s
    """
    on = [machine["gpu"]] if "gpu" in machine else []
    parts = [
        *on,
        machine["processor"],
        f"{machine['cores']} cores",
        f"{machine['threads']} threads",
        " ".join(machine["features"]),
        f"torch {machine['torch']}",
        f"regard {machine['regard']}",
    ]
    tops = [f"reading {units.rate(ceilings.read)}"]
    for dtype, top in ceilings.gemm.items():
        tops.append(f"{str(dtype).removeprefix('torch.')} products {units.count(top, 'FLOP/s')}")
    return f"{', '.join(part for part in parts if part)}\nceilings: {', '.join(tops)}"


def table(found: Measured) -> str:
    """One case: its work, and a line for each peer.

    >>> import torch
    >>> print(table(Measured("demo", "A demo.", "B1", torch.float32, "cpu").refuse("needs 9 GiB")))
    demo: A demo. B1, float32
      refused: needs 9 GiB
    """
    work = ""
    if found.work is not None and any(found.work):
        work = (
            f" ({units.count(found.work.flops, 'FLOP')}, {units.size(found.work.bytes)} at least)"
        )
    lines = [f"{found.case}: {found.about} {found.sizes}, {found.dtype_name}{work}"]
    if found.refused:
        return "\n".join([*lines, f"  refused: {found.refused}"])
    timed = [_cells(row) for row in found.rows if row.seconds is not None]
    if timed:
        lines.append(table_of([HEADS, *timed], left=(0, len(HEADS) - 1), indent="  "))
    others = [(row.peer, f"{row.status}: {row.why}") for row in found.rows if row.seconds is None]
    lines += [table_of(others, left=(0, 1), indent="  ")] if others else []
    return "\n".join([*lines, *(["  interrupted: fewer rounds"] if found.interrupted else [])])


def _cells(row: Row) -> list[str]:
    """A peer that was timed."""
    assert row.seconds is not None
    assert row.quartiles is not None
    return [
        row.peer,
        units.seconds(row.seconds),
        units.span(*row.quartiles),
        _cell(row.ratio, ".2f"),
        _cell(row.bytes_per_second, ".1f", 1e9),
        _cell(row.of_read, ".0%"),
        _cell(row.flops_per_second, ".1f", 1e9),
        _cell(row.of_gemm, ".0%"),
        _cell(row.error, ".1e"),
        _cell(row.allowed, ".1e"),
        units.ABSENT if row.peak_bytes is None else units.size(row.peak_bytes),
        row.kernel,
    ]


def _cell(x: float | None, form: str, unit: float = 1) -> str:
    return units.ABSENT if x is None else format(x / unit, form)


def chart(found: Sequence[Measured], title: str) -> RatioBars:
    """A bar for each peer that was timed, from 1 to its time divided by ours.

    The first bar of a case names the case, too.

    Raises:
        RegardError: nothing was timed.
    """
    bars = []
    for one in found:
        timed = [(row, row.ratio, row.seconds) for row in one.rows]
        rows = [(row, x, t) for row, x, t in timed if x is not None and t is not None]
        for i, (row, ratio, seconds) in enumerate(rows):
            case = f"{one.case}, {one.dtype_name}: " if i == 0 else ""
            words = f"{ratio:.2f}x, {units.seconds(seconds)}"
            bars.append(Bar(f"{case}{row.peer}", ratio, words))
    if not bars:
        raise RegardError("--plot has nothing to draw: nothing was timed")
    return RatioBars(bars, title)


def listing(cases: Iterable[Case]) -> str:
    """Cases with their sizes, and peers: there, or missing and why."""
    cases = list(cases)
    lines = ["cases"]
    for case in cases:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in case.dtypes)
        lines.append(f"  {case.name:<18}{case.about} {dtypes}")
        lines += [f"    {size:<8} {sizes}" for size, sizes in case.sizes.items()]
    rows = []
    for peer, where in peers(cases).items():
        why = peer.missing()
        state = "there" if why is None else f"missing: {why}"
        rows.append([peer.name, state, f"{peer.about} {', '.join(where)}"])
    return "\n".join([*lines, "peers", table_of(rows, left=(0, 1, 2), indent="  ")])


def peers(cases: Iterable[Case]) -> dict[Peer[Any], list[str]]:
    """Every peer with the names of its cases."""
    found: dict[Peer[Any], list[str]] = {}
    for case in cases:
        for peer in case.peers:
            found.setdefault(peer, []).append(case.name)
    return found
