"""The report on a trained task: accuracy.csv, accuracy.svg, alignment.svg and report.html."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from torch import nn

from regard.errors import FileError
from regard.files.reading import read_text
from regard.language import translate
from regard.train.tasks.evaluate import (
    AccuracyBin,
    Alignment,
    TaskAnswer,
    accuracy_by_length,
    alignment,
    answer_examples,
)
from regard.train.tasks.task import Task
from regard.untrusted_text import error_text, escape_controls
from regard.view import charts, heatmaps
from regard.view.html_page import write
from regard.view.task_page import (
    AlignedExample,
    TaskPage,
    WrongAnswer,
    accuracy_lines,
    alignment_lines,
)

COLUMNS = ("split", "shortest", "longest", "examples", "right", "share", "low", "high")
MAX_MISTAKES = 12
"""The largest number of wrong answers in report.html."""
MAX_BYTES = 1 << 20
"""The largest accuracy.csv in bytes."""
NUM_ALIGNMENTS = 3
"""The largest number of alignments in report.html."""
ALIGNMENT_LENGTHS = (8, 18)
"""The shortest and the longest source whose alignment is shown, in tokens."""


@dataclass(frozen=True)
class TaskReport:
    """The evaluation of a trained model on a task."""

    task: Task
    model: str
    bins: tuple[AccuracyBin, ...]
    answers: tuple[TaskAnswer, ...]
    alignments: tuple[Alignment, ...]

    def share(self, split: str) -> float:
        """Return the share of correct answers in a split, over all lengths."""
        inside = [b for b in self.bins if b.split == split]
        return sum(b.correct for b in inside) / sum(b.examples for b in inside)

    def series(self) -> charts.Accuracy:
        """Return the accuracy by length, for a chart."""
        points = (
            charts.LengthBin(b.low, b.high, b.share, b.interval, b.examples) for b in self.bins
        )
        return charts.Accuracy(self.model, tuple(points))


def evaluate_task(
    model: nn.Module, task: Task, name: str, *, examples: int = 400, seed: int = 0, beams: int = 1
) -> TaskReport:
    """Evaluate a model on examples of "validation" and of "longer"."""
    bins: list[AccuracyBin] = []
    answers: list[TaskAnswer] = []
    for split in ("validation", "longer"):
        split_answers = answer_examples(
            model, task, task.examples(split, examples, seed), beams=beams
        )
        bins += accuracy_by_length(task, split, split_answers)
        answers += split_answers
    alignments: list[Alignment] = []
    for outcome in _answers_to_align(answers):
        aligned = alignment(model, task, outcome, head=alignments[0].head if alignments else None)
        alignments += [] if aligned is None else [aligned]
    return TaskReport(task, name, tuple(bins), tuple(answers), tuple(alignments))


def write_report(
    report: TaskReport, folder: Path, facts: dict[str, str], beside: Sequence[charts.Accuracy] = ()
) -> None:
    """Write accuracy.csv, accuracy.svg and report.html, and alignment.svg if there is one."""
    task, series = report.task, [report.series(), *beside]
    write(folder / "accuracy.csv", _accuracy_csv(report.bins))
    title = translate("{task}: share of sources with every word right", task=task.name)
    charts.write(charts.accuracy_chart(series, task.lengths[1], title), folder / "accuracy.svg")
    if report.alignments:
        first = report.alignments[0]
        alignment_map = heatmaps.AlignmentMap(first.weights.numpy(), first.predicted, first.source)
        charts.write(alignment_map, folder / "alignment.svg")
    page = TaskPage(
        f"{task.name}: {report.model}",
        task.description,
        facts,
        series,
        task.lengths[1],
        [_alignment_view(a) for a in report.alignments],
        [_mistake_row(task, o) for o in _mistakes(report.answers)],
    )
    write(folder / "report.html", page.html())


def read_accuracy(folder: Path, name: str | None = None) -> charts.Accuracy:
    """Read the accuracy of another run from its accuracy.csv."""
    path = folder / "accuracy.csv"
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, MAX_BYTES))))
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
            f"{path}: not a table with columns {', '.join(COLUMNS)}: {error_text(error)}; write "
            "it again with `regard train --task`"
        ) from error
    return charts.Accuracy(name or escape_controls(folder.name), tuple(points))


def terminal_lines(report: TaskReport) -> Iterator[Text]:
    """Yield the report for a terminal: the accuracy by length as bars, and the first alignment."""
    yield from accuracy_lines(report.series(), report.task.lengths[1])
    for one in report.alignments[:1]:
        verdict = "right" if one.outcome.correct else "wrong"
        yield Text()
        yield Text.assemble(("  alignment", "bold"), f" ({one.label}; the answer is {verdict})")
        yield from alignment_lines(one.weights.numpy(), one.predicted, one.source)


def _accuracy_csv(bins: Sequence[AccuracyBin]) -> str:
    """Return the content of accuracy.csv."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for b in bins:
        low, high = b.interval
        shares = (f"{x:.4f}" for x in (b.share, low, high))
        table.writerow([b.split, b.low, b.high, b.examples, b.correct, *shares])
    return text.getvalue()


def _answers_to_align(answers: Sequence[TaskAnswer]) -> list[TaskAnswer]:
    """Return a few answers whose alignment is shown: correct ones first, then by length."""
    low, high = ALIGNMENT_LENGTHS
    candidates = [o for o in answers if o.predicted and low <= o.example.length <= high]
    candidates = (
        candidates
        or sorted((o for o in answers if o.predicted), key=lambda o: o.example.length)[
            :NUM_ALIGNMENTS
        ]
    )
    return sorted(candidates, key=lambda o: (not o.correct, -o.example.length))[:NUM_ALIGNMENTS]


def _mistakes(answers: Sequence[TaskAnswer]) -> list[TaskAnswer]:
    """Return some wrong answers, those with the shortest sources first."""
    return sorted((o for o in answers if not o.correct), key=lambda o: o.example.length)[
        :MAX_MISTAKES
    ]


def _alignment_view(a: Alignment) -> AlignedExample:
    """Return an alignment for the HTML page."""
    end = a.predicted[len(a.outcome.predicted) :]
    return AlignedExample(
        a.source, a.predicted, (*a.outcome.expected, *end), a.weights.numpy(), a.label
    )


def _mistake_row(task: Task, outcome: TaskAnswer) -> WrongAnswer:
    """Return a wrong answer for the HTML page."""
    return WrongAnswer(
        task.source_separator.join(outcome.example.source),
        task.target_separator.join(outcome.predicted),
        task.target_separator.join(outcome.expected),
    )
