"""What is written when a task has been trained: accuracy.csv, accuracy.svg, alignment.svg,
report.html.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from torch import nn

from regard.errors import FileError
from regard.files.regular import text
from regard.foreign import inert, told
from regard.train.tasks.evaluate import Alignment, Bin, Outcome, alignment, by_length, outcomes
from regard.train.tasks.task import Task
from regard.view import charts
from regard.view.html import write
from regard.view.task import Aligned, TaskPage, Told, accuracy_lines, alignment_lines

COLUMNS = ("split", "shortest", "longest", "examples", "right", "share", "low", "high")
MOST_WRONG = 12
LONGEST = 1 << 20
"""Bytes of accuracy.csv, at most."""
ALIGNED = 3
BEST_SOURCE = (8, 18)
"""Tokens of a source whose alignment is shown: long enough to be of interest, short enough to be
seen.
"""


@dataclass(frozen=True)
class Report:
    """What a trained model can do.

    bins: shares right of validation, then of longer.
    found: every outcome, validation first.
    alignments: of a few examples; empty for a model without attention.
    """

    task: Task
    model: str
    bins: tuple[Bin, ...]
    found: tuple[Outcome, ...]
    alignments: tuple[Alignment, ...]

    def share(self, split: str) -> float:
        """The share right in a split, all lengths together."""
        inside = [b for b in self.bins if b.split == split]
        return sum(b.right for b in inside) / sum(b.examples for b in inside)

    def series(self) -> charts.Accuracy:
        """The shares right by length, for a chart."""
        points = (
            charts.LengthBin(b.low, b.high, b.share, b.interval, b.examples) for b in self.bins
        )
        return charts.Accuracy(self.model, tuple(points))


def examine(
    model: nn.Module, task: Task, name: str, *, examples: int = 400, seed: int = 0, beams: int = 1
) -> Report:
    """Ask a model `examples` questions of validation and as many of `longer`, and look where it
    looks.

    Raises:
        ArgumentError: examples or beams is less than 1.
    """
    bins: list[Bin] = []
    found: list[Outcome] = []
    for split in ("validation", "longer"):
        part = outcomes(model, task, task.examples(split, examples, seed), beams=beams)
        bins += by_length(task, split, part)
        found += part
    alignments: list[Alignment] = []
    for outcome in _shown(found):
        one = alignment(model, task, outcome, head=alignments[0].head if alignments else None)
        alignments += [] if one is None else [one]
    return Report(task, name, tuple(bins), tuple(found), tuple(alignments))


def write_report(
    report: Report, folder: Path, facts: dict[str, str], beside: Sequence[charts.Accuracy] = ()
) -> None:
    """Write accuracy.csv, accuracy.svg, report.html, and alignment.svg for a model with attention.

    Args:
        report: of `examine`.
        folder: that exists.
        facts: shown beside the title of the page.
        beside: other models' points, drawn in the same chart.

    Raises:
        FileError: a file cannot be written.
    """
    task, series = report.task, [report.series(), *beside]
    write(folder / "accuracy.csv", _table(report.bins))
    title = f"{task.name}: sources answered right, every word of them"
    charts.write(charts.accuracy_chart(series, task.lengths[1], title), folder / "accuracy.svg")
    if report.alignments:
        first = report.alignments[0]
        drawn = charts.AlignmentMap(first.weights.numpy(), first.said, first.source)
        charts.write(drawn, folder / "alignment.svg")
    page = TaskPage(
        f"{task.name}: {report.model}",
        task.sentence,
        facts,
        series,
        task.lengths[1],
        [_aligned(a) for a in report.alignments],
        [_told(task, o) for o in _wrong(report.found)],
    )
    write(folder / "report.html", page.html())


def read_series(folder: Path, name: str | None = None) -> charts.Accuracy:
    """The points of another run, from its accuracy.csv.

    Raises:
        FileError: the file is missing, or is not such a table.
    """
    path = folder / "accuracy.csv"
    try:
        rows = list(csv.DictReader(io.StringIO(text(path, LONGEST))))
        points = [
            charts.LengthBin(
                int(row["shortest"]),
                int(row["longest"]),
                float(row["share"]),
                (float(row["low"]), float(row["high"])),
                int(row["examples"]),
            )
            for row in rows
        ]
    except FileError as error:
        raise FileError(f"{error}; give a folder that `regard train --task` wrote") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise FileError(
            f"{path}: not a table of {', '.join(COLUMNS)}: {told(error)}; write it anew with "
            "`regard train --task`"
        ) from error
    return charts.Accuracy(name or inert(folder.name), tuple(points))


def lines(report: Report) -> Iterator[Text]:
    """The report for a terminal: bars by length, and the first alignment."""
    yield from accuracy_lines(report.series(), report.task.lengths[1])
    for one in report.alignments[:1]:
        verdict = "right" if one.outcome.right else "wrong"
        yield Text()
        yield Text.assemble(
            ("  where it looks", "bold"), f" ({one.place}; the answer is {verdict})"
        )
        yield from alignment_lines(one.weights.numpy(), one.said, one.source)


def _table(bins: Sequence[Bin]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for b in bins:
        low, high = b.interval
        shares = (f"{x:.4f}" for x in (b.share, low, high))
        table.writerow([b.split, b.low, b.high, b.examples, b.right, *shares])
    return text.getvalue()


def _shown(found: Sequence[Outcome]) -> list[Outcome]:
    """A few outcomes to look into: of middling length, right ones first, the longest of them
    first.
    """
    low, high = BEST_SOURCE
    fits = [o for o in found if o.said and low <= o.example.length <= high]
    fits = fits or sorted((o for o in found if o.said), key=lambda o: o.example.length)[:ALIGNED]
    return sorted(fits, key=lambda o: (not o.right, -o.example.length))[:ALIGNED]


def _wrong(found: Sequence[Outcome]) -> list[Outcome]:
    """Mistakes, those on the shortest sources first: they are the ones to wonder about."""
    return sorted((o for o in found if not o.right), key=lambda o: o.example.length)[:MOST_WRONG]


def _aligned(a: Alignment) -> Aligned:
    end = a.said[len(a.outcome.said) :]
    return Aligned(a.source, a.said, (*a.outcome.wanted, *end), a.weights.numpy(), a.place)


def _told(task: Task, outcome: Outcome) -> Told:
    return Told(
        task.reads.join(outcome.example.source),
        task.writes.join(outcome.said),
        task.writes.join(outcome.wanted),
    )
