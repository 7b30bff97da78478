"""The results of a trained task as an HTML page, and as lines of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from rich.text import Text

from regard.untrusted_text import escape_controls
from regard.view import terminal
from regard.view.charts import Accuracy, accuracy_chart
from regard.view.heatmaps import AlignmentMap
from regard.view.html_page import CaptionedChart, Section, page
from regard.view.terminal import WIDTH, style


@dataclass(frozen=True)
class AlignedExample:
    """One example, its answer and the correct one, and attention weights `[T, S]`."""

    source: tuple[str, ...]
    predicted: tuple[str, ...]
    expected: tuple[str, ...]
    weights: Float[np.ndarray, "T S"]
    place: str

    @property
    def right(self) -> bool:
        """Return whether the answer is correct."""
        return self.predicted == self.expected


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong answer, with its source and the correct answer, as text."""

    source: str
    predicted: str
    expected: str


@dataclass(frozen=True)
class TaskPage:
    """The content of the page of a task."""

    title: str
    sentence: str
    facts: Mapping[str, str]
    series: Sequence[Accuracy]
    max_trained_tokens: int
    aligned: Sequence[AlignedExample] = field(default=())
    wrong: Sequence[WrongAnswer] = field(default=())

    def html(self) -> str:
        """Return the page as HTML without scripts; all text is escaped."""
        sections = [*self._accuracy(), *self._alignments(), *self._mistakes()]
        return page(self.title, self.sentence, self.facts, "", sections)

    def _accuracy(self) -> Iterator[Section]:
        if self.series:
            yield Section(
                "Accuracy by source length",
                caption="An answer counts as correct if every word is correct. Bars through the "
                "marks are 95 % intervals. None of the sources was used in training; the shaded "
                "lengths are longer than any source in training.",
                pictures=[
                    accuracy_chart(self.series, self.max_trained_tokens, "share of correct answers")
                ],
            )

    def _alignments(self) -> Iterator[Section]:
        if self.aligned:
            yield Section(
                "Alignments",
                caption="Rows are the words of the answer, columns the words of the source; the "
                "colour of a cell is its weight. The training data contain no alignments.",
                figures=[
                    CaptionedChart(
                        AlignmentMap(one.weights, one.predicted, one.source),
                        one.place + ("" if one.right else f"; correct: {''.join(one.expected)}"),
                        one.right,
                    )
                    for one in self.aligned
                ],
            )

    def _mistakes(self) -> Iterator[Section]:
        if self.wrong:
            yield Section(
                "Wrong answers",
                heads=("source", "answer", "correct"),
                rows=[
                    (one.source, one.predicted or "(nothing)", one.expected) for one in self.wrong
                ],
                tones={1: "bad", 2: "good"},
            )


def accuracy_lines(series: Accuracy, trained: int, width: int = 36) -> Iterator[Text]:
    """Generate a bar per length bin, with its interval and its number of examples."""
    yield Text(f"     tokens  {'correct':<{width}}                examples", "dim")
    beyond = False
    for point in series.bins:
        if point.low > trained and not beyond:
            beyond = True
            yield Text(f"  {'longer than in training':─^{width + 37}}", "dim")
        low, high = (f"{100 * share:3.0f}" for share in point.interval)
        yield Text.assemble(
            f"  {point.low:>4} - {point.high:<4}",
            (terminal.bar(point.share, width), style("k" if beyond else "q")),
            (f" {100 * point.share:5.1f}%", "bold"),
            (f" ({low} to {high}){point.examples:>9}", "dim"),
        )


def alignment_lines(
    weights: Float[np.ndarray, "T S"],
    predicted: Sequence[str],
    source: Sequence[str],
    most: int = 33,
) -> Iterator[Text]:
    """Generate terminal lines of an alignment: two characters per cell, source words by number."""
    low = " ".join(
        f"{shade} {step:g}+"
        for shade, step in zip(terminal.SHADES[1:], terminal.SHADE_STEPS, strict=True)
    )
    yield Text(
        "  rows are the answer, columns are the source; blank below "
        f"{terminal.SHADE_STEPS[0]:g}, {low}",
        "dim",
    )
    numbered = " ".join(f"{j}\u00a0{escape_controls(word)} " for j, word in enumerate(source))
    for part in textwrap.wrap(numbered, WIDTH - 4):
        yield Text("  " + part.replace("\u00a0", " "), style("k"))
    shown = weights[:, :most]
    ruler = "".join(
        f"{j:<2}" if j % 5 == 0 or len(source) < 10 else "  " for j in range(shown.shape[1])
    )
    yield Text(f"{' ' * 17}{ruler}".rstrip(), style("k"))
    for word, row in zip(predicted, shown, strict=True):
        name = terminal.cell(escape_controls(word), 12).rstrip()
        pad = 15 - Text(name).cell_len
        cells = "".join(terminal.shade(float(p)) * 2 for p in row)
        cut = "…" if weights.shape[1] > most else "│"
        yield Text.assemble(
            " " * pad, (name, style("q")), (" │", "dim"), (cells, style("s")), (cut, "dim")
        )
