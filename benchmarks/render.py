"""Benchmark results as text and as a chart, and the list of the cases and peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from benchmarks.interfaces import Case, Peer, name_of
from benchmarks.public_models import ACCELERATED, PLAIN
from benchmarks.result import CaseResult, PeerResult
from regard import units
from regard.errors import RegardError
from regard.language import translate, translate_count
from regard.text_table import format_table, line_width, wrap
from regard.timing import Ceilings, MachineFacts
from regard.untrusted_text import escape_controls
from regard.view import palette, plotting
from regard.view.plotting import Drawing

COLUMNS = (
    *("", "median", "quartiles", "x ours", "GB/s", "read", "GFLOP/s", "gemm"),
    *("error", "allowed", "memory", "kernel"),
)
"""The columns of a case. `x ours` is a peer's time divided by regard's, round by round; `read` is
the share of the memory bandwidth that was measured in the same rounds; `gemm` is the share of the
FLOP rate in the header; `memory` is the peak memory of a call, with --memory.
"""


def header(machine: MachineFacts, ceilings: Ceilings) -> str:
    """Return two lines that describe the machine and its largest rates."""
    gpu = [machine["gpu"]] if "gpu" in machine else []
    parts = [
        *gpu,
        machine["processor"],
        translate_count(machine["cores"], "core"),
        translate_count(machine["threads"], "thread"),
        " ".join(machine["features"]),
        f"torch {machine['torch']}",
        f"regard {machine['regard']}",
    ]
    rates = [translate("reading {rate}", rate=units.rate(ceilings.read))]
    for dtype, rate in ceilings.gemm.items():
        rates.append(
            translate(
                "{dtype} products {rate}",
                dtype=name_of(dtype),
                rate=units.count(rate, "FLOP/s"),
            )
        )
    lines = [
        ", ".join(part for part in parts if part),
        translate("ceilings: {rates}", rates=", ".join(rates)),
    ]
    return "\n".join(wrap(line, line_width(), hang="  ") for line in lines)


def case_table(result: CaseResult) -> str:
    """Return a case as text: its minimum work, and a line for each peer."""
    work = ""
    if result.work is not None and any(result.work):
        work = translate(
            " ({flops}, {size} at least)",
            flops=units.count(result.work.flops, "FLOP"),
            size=units.size(result.work.bytes),
        )
    about = translate(result.description)
    width = line_width()
    head = f"{result.case}: {about} {result.sizes}, {result.dtype_name}{work}"
    lines = [wrap(head, width, hang="  ")]
    if result.refused:
        refused = translate("refused: {why}", why=translate(result.refused))
        return "\n".join([*lines, wrap(refused, width, indent="  ", hang="    ")])
    timed_rows = [_cells(row) for row in result.rows if row.seconds is not None]
    if timed_rows:
        rows = [[translate(column) for column in COLUMNS], *timed_rows]
        left = (0, len(COLUMNS) - 1)
        lines.append(format_table(rows, left=left, indent="  ", width=width))
    other_rows = [
        (row.peer, f"{row.status}: {row.why}") for row in result.rows if row.seconds is None
    ]
    lines += [format_table(other_rows, left=(0, 1), indent="  ")] if other_rows else []
    if result.interrupted:
        lines.append("  " + translate("interrupted: not all rounds were run"))
    return "\n".join(lines)


ACCELERATED_COLUMNS = (
    *("model", "dtype", "torch", "regard", "times faster", "quartiles"),
    *("torch's time", "attention calls"),
)
"""The columns of the group "models": the times of a step without and with `regard.accelerate`, the
median over rounds of their ratio, the share of attention in the step of torch, and where the
attention calls ran.
"""


def accelerated_table(results: Iterable[CaseResult]) -> str:
    """Return one line for each result with the peer "regard.accelerate"; "" if there is none."""
    rows = []
    for result in results:
        by_name = {row.peer: row for row in result.rows}
        if (ours := by_name.get(ACCELERATED)) is None:
            continue
        torch = by_name.get(PLAIN)
        cells = [""] * 5
        if torch is not None and torch.ratio is not None and ours.seconds is not None:
            assert torch.seconds is not None
            assert torch.ratio_quartiles is not None
            low, high = torch.ratio_quartiles
            times = (units.seconds(torch.seconds), units.seconds(ours.seconds))
            cells = [*times, f"{torch.ratio:.2f}", f"{low:.2f} .. {high:.2f}", torch.kernel]
        calls = ours.kernel if ours.status == "timed" else f"{ours.status}: {ours.why}"
        rows.append([result.case, result.dtype_name, *cells, calls])
    if not rows:
        return ""
    return format_table([ACCELERATED_COLUMNS, *rows], left=(0, 1, len(ACCELERATED_COLUMNS) - 1))


PARALLEL_COLUMNS = (
    *("case", "dtype", "peer", "time", "CPU time", "of one process", "sent", "of all keys"),
    *("memory a rank", "bound"),
)
"""The columns of the group "parallel": the time of a call, the processor time of all ranks, the
same divided by that of one process, the bytes that all ranks send, the same divided by what they
send if every rank receives every key, and the memory of the rank that needs most with its bound
1.3 (q + k + v + out) / W and two blocks.
"""


def parallel_table(results: Iterable[CaseResult]) -> str:
    """Return one line for each peer of each case over several ranks; "" if there is none."""
    rows = []
    for result in results:
        alone = next((x.figures for x in result.rows if x.peer == "one process"), None) or {}
        for row in result.rows:
            if row.figures is None or row.seconds is None or "cpu_seconds" not in row.figures:
                continue
            figures, one = row.figures, alone.get("cpu_seconds")
            cpu, sent = figures["cpu_seconds"], figures.get("sent_bytes")
            sizes = (figures.get(name) for name in ("rank_bytes", "rank_bytes_bound"))
            rows.append(
                [
                    *(result.case, result.dtype_name, row.peer),
                    *(units.seconds(row.seconds), units.seconds(cpu)),
                    _cell(cpu / one if one else None, ".2f"),
                    units.ABSENT if sent is None else units.size(int(sent)),
                    _cell(figures.get("sent_of_all"), ".1%"),
                    *(units.ABSENT if x is None else units.size(int(x)) for x in sizes),
                ]
            )
    return format_table([PARALLEL_COLUMNS, *rows], left=(0, 1, 2)) if rows else ""


def group_tables(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the table of each group that has results, such as the models under accelerate."""
    for table in (accelerated_table(results), parallel_table(results), memory_table(results)):
        if table:
            yield table


MEMORY_COLUMNS = ("case", "dtype", "peer", "file", "peak memory", "of regard's")
"""The columns of the group "memory": the size of the file, the peak memory of the process, and the
same divided by that of the process of regard.
"""


def memory_table(results: Iterable[CaseResult]) -> str:
    """Return one line for each peer of each case of peak memory; "" if there is none.

    >>> import torch
    >>> figures = {"peak_bytes": 3.0 * 2**20, "file_bytes": 2.0**20}
    >>> row = PeerResult("regard", "timed", figures=figures, seconds=0.25)
    >>> result = CaseResult("peak-memory", "", "", torch.float16, "cpu", rows=(row,))
    >>> memory_table([result]).splitlines()[1].split()[3:]
    ['1.00', 'MiB', '3.00', 'MiB', '1.00']
    """
    rows = []
    for result in results:
        peaks = {x.peer: x.figures for x in result.rows if x.figures and "peak_bytes" in x.figures}
        ours = peaks.get("regard")
        for peer, figures in peaks.items():
            peak = figures["peak_bytes"]
            sizes = (units.size(int(figures["file_bytes"])), units.size(int(peak)))
            share = _cell(None if ours is None else peak / ours["peak_bytes"], ".2f")
            rows.append([result.case, result.dtype_name, peer, *sizes, share])
    return format_table([MEMORY_COLUMNS, *rows], left=(0, 1, 2)) if rows else ""


def _cells(row: PeerResult) -> list[str]:
    """Return the cells of a peer that was timed."""
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
    """Return a number in a unit and a format, or a dash for None."""
    return units.ABSENT if x is None else format(x / unit, form)


@dataclass(frozen=True)
class RatioBar:
    """The time of another implementation divided by that of regard; above 1 is slower."""

    label: str
    ratio: float
    words: str


@dataclass(frozen=True)
class RatioBars:
    """Bars of times divided by that of regard, which start at 1 on a logarithmic axis."""

    bars: Sequence[RatioBar]
    title: str

    def draw(self) -> Drawing:
        """Return the figure, with a row for each bar."""
        ratios = [bar.ratio for bar in self.bars]
        labels = [escape_controls(bar.label) for bar in self.bars]
        left = 24 + plotting.LETTER_WIDTH * max(map(cell_len, labels))
        figure = plotting.new_figure(left + 560, 110 + 22 * len(ratios))
        axes = plotting.new_axes(figure, left, 130, 44, 60)
        axes.grid(axis="x", color=palette.LIGHT["line"], linewidth=1)
        axes.grid(visible=False, axis="y")
        plotting.write_at(figure, 16, 26, self.title, role="ink", size=14)
        places = range(len(ratios))
        # bars start at 1, the time of regard, because a logarithmic axis has no 0
        axes.barh(places, [x - 1 for x in ratios], left=1, color=palette.LIGHT["soft"], height=0.66)
        for place, bar in enumerate(self.bars):
            axes.annotate(
                escape_controls(bar.words),
                (max(bar.ratio, 1), place),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=12,
                color=palette.LIGHT["ink"],
                annotation_clip=False,
            )
        axes.axvline(1, color=palette.LIGHT["q"], linewidth=2)
        axes.set_yticks(places, labels, color=palette.LIGHT["ink"], fontsize=12)
        axes.set_ylim(len(ratios) - 0.4, -0.6)
        plotting.set_scale(axes, "x", [0.8, 1.25, *ratios], "ratio", log=True)
        axes.set_xlabel(
            "time divided by the time of regard; larger is slower",
            fontsize=13,
            color=palette.LIGHT["soft"],
            labelpad=8,
        )
        return Drawing(figure)


def ratio_chart(results: Sequence[CaseResult], title: str) -> RatioBars:
    """Return a chart with a bar for each timed peer, from 1 to its time divided by regard's."""
    bars = []
    for result in results:
        timed = [(row, row.ratio, row.seconds) for row in result.rows]
        rows = [(row, x, t) for row, x, t in timed if x is not None and t is not None]
        for i, (row, ratio, seconds) in enumerate(rows):
            case = f"{result.case}, {result.dtype_name}: " if i == 0 else ""
            label = f"{ratio:.2f}x, {units.seconds(seconds)}"
            bars.append(RatioBar(f"{case}{row.peer}", ratio, label))
    if not bars:
        raise RegardError("--plot has nothing to draw: no peer was timed")
    return RatioBars(bars, title)


def list_cases(cases: Iterable[Case]) -> str:
    """Return the cases with their sizes, and the peers with the modules that are missing."""
    cases = list(cases)
    lines = [translate("cases")]
    for case in cases:
        dtypes = ", ".join(name_of(dtype) for dtype in case.dtypes)
        about = f"{translate(case.description)} {dtypes}"
        lines.append(wrap(about, line_width(), indent=f"  {case.name:<18} ", hang=" " * 21))
        lines += [
            wrap(str(sizes), line_width(), indent=f"    {size:<8} ", hang=" " * 13)
            for size, sizes in case.sizes.items()
        ]
    rows = []
    for peer, names in cases_of_peers(cases).items():
        missing = peer.missing()
        state = translate("installed")
        if missing is not None:
            modules = missing.removeprefix("no module ")
            what = translate("no module {names}", names=modules) if modules != missing else missing
            state = translate("missing: {what}", what=what)
        about = translate(peer.description)
        rows.append([peer.name, state, f"{about} {', '.join(names)}"])
    table = [
        wrap(f"{state}  {text}", line_width(), indent=f"  {name:<22}", hang=" " * 24)
        for name, state, text in rows
    ]
    return "\n".join([*lines, translate("peers"), *table])


def cases_of_peers(cases: Iterable[Case]) -> dict[Peer[Any], list[str]]:
    """Return every peer with the names of its cases."""
    peers: dict[Peer[Any], list[str]] = {}
    for case in cases:
        for peer in case.peers:
            peers.setdefault(peer, []).append(case.name)
    return peers
