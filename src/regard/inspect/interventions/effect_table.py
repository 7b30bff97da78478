"""What an intervention changes, the probability of an answer or a logit difference; and its result
at many places: a table of numbers, and a map of them.
"""

from __future__ import annotations

import csv
import html
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.atomic_write import write_user_file
from regard.inspect.model_run import ModelRun
from regard.language import Phrase, translate
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.text_table import display_width, format_table, line_width, wrap
from regard.units import plural
from regard.untrusted_text import escape_controls

Answer: TypeAlias = str | int
"""A token: its text, or its id."""

Metric: TypeAlias = Callable[[Tensor], Tensor | float] | Answer | tuple[Answer, Answer] | None
"""What is measured; see `metric_of`."""


class NamedMetric(NamedTuple):
    """A function from the output of a run to a tensor without dimensions, its name, and whether it
    reads the last position only.
    """

    name: str
    measure: Callable[[Tensor], Tensor]
    last_only: bool = False


def token_id(run: ModelRun, answer: Answer) -> int:
    """Return the id of an answer, which must be one token.

    >>> import regard
    >>> from regard.inspect.model_run import prepare_run
    >>> token_id(prepare_run(regard.load("tiny"), "to"), 5)
    5
    """
    if isinstance(answer, int):
        return answer
    if not isinstance(run.model, TextModel):
        raise ArgumentError(
            f"the answer {answer!r} is a text, but a {type(run.model).__name__} has no tokenizer "
            "of this package; give the id of the token",
            argument="answer",
            value=answer,
        )
    before = () if run.tokens is None else run.tokens.ids
    ids = run.model.tokenizer.encode(answer, after=before)
    if len(ids) != 1:
        pieces = run.model.tokenizer.pieces(ids)
        raise ArgumentError(
            f"the answer {answer!r} is {plural(len(ids), 'token')} "
            f"({', '.join(map(repr, pieces))}); it must be one: give the first of "
            "them, mind a leading space, or write a metric function; attribute_answer, which is "
            "`regard inspect attribute --whole`, takes a whole answer",
            argument="answer",
            value=answer,
        )
    return ids[0]


def answer_ids(run: ModelRun, answer: Any) -> tuple[int, ...]:
    """Return the ids of one answer, or of an answer and the one it is compared with."""
    both = answer if isinstance(answer, tuple) else (answer,)
    if len(both) > 2 or not all(isinstance(each, (str, int)) for each in both):
        raise ArgumentTypeError(
            f"the answer is {answer!r}; it must be a token (its text or id), or a pair of tokens",
            argument="answer",
            value=answer,
        )
    return tuple(token_id(run, each) for each in both)


def answer_names(run: ModelRun, ids: tuple[int, ...]) -> str:
    """Return the tokens in words, such as "' be' - ' not'"."""
    if isinstance(run.model, TextModel) and run.model.has_tokenizer:
        return " - ".join(repr(piece) for piece in run.model.tokenizer.pieces(list(ids)))
    return " - ".join(map(str, ids))


def last_logits(output: Tensor) -> Tensor:
    """Return the logits `[B, V]` of the last position."""
    return output[:, -1] if output.ndim == 3 else output


def metric_of(run: ModelRun, metric: Metric) -> NamedMetric:
    """Return a metric as a function of a model's output, with its name.

    >>> import regard
    >>> from regard.inspect.model_run import prepare_run
    >>> run = prepare_run(regard.load("tiny"), "to be or not to")
    >>> metric_of(run, (5, 6)).name.startswith("logit of")
    True
    """
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        function: Callable[[Tensor], Tensor | float] = metric
        return NamedMetric(name, lambda output: torch.as_tensor(function(output)))
    if isinstance(run.model, TextEncoder):
        return _similarity(run, run.model, metric)
    if metric is None:
        metric = int(last_logits(run.run().output)[0].argmax())
    ids = answer_ids(run, metric)
    names = answer_names(run, ids)
    if len(ids) == 2:
        return NamedMetric(
            Phrase("logit of {names}", names=names),
            lambda output: (last_logits(output)[:, ids[0]] - last_logits(output)[:, ids[1]]).mean(),
            last_only=True,
        )
    return NamedMetric(
        Phrase("log probability of {names}", names=names),
        lambda output: last_logits(output).float().log_softmax(-1)[:, ids[0]].mean(),
        last_only=True,
    )


def _similarity(run: ModelRun, model: TextEncoder, metric: Any) -> NamedMetric:
    """Return the cosine of the sentence vector with that of a text, or of the unchanged run."""
    if metric is not None and not isinstance(metric, str):
        raise ArgumentTypeError(
            f"metric is {metric!r}; for a TextEncoder it must be a text, a function or None",
            argument="metric",
        )
    with torch.no_grad():
        other = model.pool(run.run().output) if metric is None else model.embed(metric)
    name = "cosine with the unchanged vector"
    if metric is not None:
        name = Phrase("cosine with {metric!r}", metric=metric)
    return NamedMetric(
        name,
        lambda output: torch.cosine_similarity(model.pool(output), other.to(output)).mean(),
    )


AXES = {"head": "attention head"}
"""Names of axes as the catalogue has them: "head" alone is the output head of a model there."""
QUANTITY_WIDTH = 16
"""The width of a quantity that heads its column in a terminal."""
ENDINGS = (".csv", ".json", ".npy", ".png", ".svg", ".pdf")
"""The endings of files that `EffectTable.to` writes."""


def _axis(name: str) -> str:
    """Return the name of an axis in the language of the user."""
    return name if translate(name) == name else translate(AXES.get(name, name))


@dataclass(frozen=True, eq=False)
class EffectTable:
    """Numbers by row and column, such as the effect of each head of each layer.

    Args:
        title: what was done, and on what.
        values: the numbers `[R, C]`, in fp64; NaN where there is nothing, such as a layer with
            fewer heads.
        row_axis, column_axis: what rows and columns are, such as "layer" and "head".
        baseline: the metric of the run that was changed, or None.
        target: the metric of the other run, whose activations were used, or None.
        notes: remarks that belong beside every use of the numbers.
        cells: the text of each cell where it has one beside its number, or ().

    >>> table = EffectTable("ablation", "effect", np.array([[0.5, -2.0]]), "layer", "head", ("0",),
    ...                     ("0", "1"), baseline=-1.0)
    >>> print(table)
    ablation
    effect; unchanged: -1
    layer  attention head  effect
    0      1                   -2
    0      0                  0.5
    """

    title: str
    quantity: str
    values: Float[np.ndarray, "R C"]
    row_axis: str
    column_axis: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    baseline: float | None = None
    target: float | None = None
    notes: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = field(default=())

    def __repr__(self) -> str:
        axes = f"{self.row_axis} x {self.column_axis}"
        sizes = " x ".join(map(str, self.values.shape))
        return f"EffectTable({escape_controls(self.title)}: {axes}, {sizes})"

    @property
    def share(self) -> Float[np.ndarray, "R C"]:
        """The effects as shares of the distance between both runs: 1 restores the other run's
        metric completely, 0 changes nothing.

        Raises:
            ArgumentError: there was one run only, or both have the same metric.
        """
        if self.baseline is None or self.target is None or self.baseline == self.target:
            raise ArgumentError(
                f"{self.title} has no two runs with different metrics (baseline {self.baseline}, "
                f"target {self.target}), so that no share can be computed; use values"
            )
        return self.values / (self.target - self.baseline)

    def records(self) -> list[dict[str, Any]]:
        """Return one mapping per cell that has a number: its row, its column and the number.

        Returns:
            The cells, row by row.

        >>> table = EffectTable("a", "effect", np.array([[0.5]]), "layer", "head", ("0",), ("3",))
        >>> table.records()
        [{'layer': '0', 'head': '3', 'effect': 0.5}]
        """
        cells = np.argwhere(~np.isnan(self.values)).tolist()
        return [self.record(*cell) for cell in cells]

    def record(self, row: int, column: int) -> dict[str, Any]:
        """Return one cell as a mapping: its row, its column and the number.

        Args:
            row, column: indices of the cell.

        Returns:
            The mapping.
        """
        record = {self.row_axis: self.rows[row], self.column_axis: self.columns[column]}
        if self.cells:
            record["text"] = self.cells[row][column]
        return {**record, self.quantity: float(self.values[row, column])}

    def top(self, n: int = 10) -> list[dict[str, Any]]:
        """Return the cells with the largest numbers, by their absolute value.

        Args:
            n: how many.

        Returns:
            At most n cells, as in `records`.
        """
        return sorted(self.records(), key=lambda cell: -abs(cell[self.quantity]))[:n]

    def frame(self, library: Literal["pandas", "polars"] = "pandas") -> Any:
        """Return the table as a data frame, with one line per row and one column per column.

        Args:
            library: "pandas", whose index has the names of the rows, or "polars", whose first
                column has them.

        Returns:
            The data frame.

        Raises:
            ArgumentError: the library is another one, or is not installed.
        """
        if library not in ("pandas", "polars"):
            raise ArgumentError(argument="library", value=library, allowed="pandas or polars")
        try:
            module: Any = importlib.import_module(library)
        except ImportError:
            raise ArgumentError(
                f"a data frame needs {library}, which is not installed: python -m pip install "
                f"{library}; without it use records(), values, or to('table.csv')"
            ) from None
        if library == "polars":
            columns = dict(zip(self.columns, self.values.T, strict=True))
            return module.DataFrame({self.row_axis: self.rows, **columns})
        pandas = module
        index = pandas.Index(self.rows, name=self.row_axis)
        return pandas.DataFrame(
            self.values, index=index, columns=pandas.Index(self.columns, name=self.column_axis)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the table as data that JSON can represent; NaN is None.

        Returns:
            Title, axes, names, numbers, baseline, target and notes.
        """
        return {
            "title": self.title,
            "quantity": self.quantity,
            "row_axis": self.row_axis,
            "column_axis": self.column_axis,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": [[None if math.isnan(x) else float(x) for x in row] for row in self.values],
            "baseline": self.baseline,
            "target": self.target,
            "notes": list(self.notes),
            **({"cells": [list(row) for row in self.cells]} if self.cells else {}),
        }

    def chart(self) -> Any:
        """Return the map of the numbers, a chart of `regard.view`.

        Returns:
            The chart, with `draw()`.
        """
        from regard.view.heatmaps import EffectMap

        down, across = _axis(self.row_axis), _axis(self.column_axis)
        return EffectMap(
            self.values,
            [f"{down} {name}" if name.isdigit() else name for name in self.rows],
            list(self.columns),
            translate(self.title),
            across,
            translate(self.quantity),
            self.cells,
        )

    def to(self, path: str | Path) -> Path:
        """Write the table (.csv, .json, .npy) or its map (.png, .svg, .pdf) to a file.

        Args:
            path: the file; its ending decides what is written.

        Returns:
            The path.

        Raises:
            FileError: the ending is another one, or the file cannot be written.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in ENDINGS:
            raise FileError(f"{path}: the name must end in {', '.join(ENDINGS)}")
        if kind in (".png", ".svg", ".pdf"):
            from regard.view.charts import write

            write(self.chart(), path)
            return path
        with write_user_file(path) as place:
            if kind == ".npy":
                with place.open("wb") as stream:
                    np.save(stream, self.values, allow_pickle=False)
            else:
                text = self._csv() if kind == ".csv" else json.dumps(self.as_dict())
                place.write_text(text, "utf-8")
        return path

    def _csv(self) -> str:
        records = self.records()
        text = io.StringIO()
        names = list(records[0]) if records else [self.row_axis, self.column_axis, self.quantity]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def __str__(self) -> str:
        """Return the title and the ten cells with the largest numbers, as text."""
        return self.text()

    def text(self, n: int = 10) -> str:
        """Return the title and the cells with the largest numbers, as text for a terminal.

        Args:
            n: how many cells.

        Returns:
            The lines, without a line break at the end.
        """
        head, width = translate(self.quantity), line_width()
        if self.baseline is not None:
            head += translate("; unchanged: {value}", value=f"{self.baseline:.4g}")
        if self.target is not None:
            head += translate("; the other run: {value}", value=f"{self.target:.4g}")
        best = self.top(n)
        names = list(best[0]) if best else []
        title = [translate(AXES.get(name, name)) for name in names[:-1]]
        if names:  # a long quantity stands above the table
            short = translate(self.quantity)
            title.append(short if display_width(short) <= QUANTITY_WIDTH else translate("value"))
        lines = [title] + [
            [f"{x:.4g}" if isinstance(x, float) else escape_controls(str(x)) for x in cell.values()]
            for cell in best
        ]
        left = range(max(len(names) - 1, 0))
        texts = [escape_controls(translate(self.title)), head]
        notes = [translate("note: {note}", note=translate(note)) for note in self.notes]
        table = format_table(lines, left=left, width=width, names=max(len(names) - 1, 1))
        return "\n".join(
            [
                *(wrap(text, width) for text in texts),
                table,
                *(wrap(note, width, hang="  ") for note in notes),
            ]
        )

    def _repr_html_(self) -> str:
        """Return the table as static HTML for a notebook; pandas draws it if it is installed."""
        top = ["", *self.columns]
        lines = [
            [name, *("" if math.isnan(x) else f"{x:.4g}" for x in row)]
            for name, row in zip(self.rows, self.values, strict=True)
        ]
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(escape_controls(x))}</td>' for x in line)}</tr>"
            for line in [top, *lines]
        )
        texts = (translate(self.title), translate(self.quantity))
        title = html.escape(escape_controls(": ".join(texts)))
        return f"<table><caption>{title}</caption>{rows}</table>"

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, str]:
        """Return the forms that a notebook shows: a data frame if pandas is there, and text."""
        try:
            shown: str = self.frame()._repr_html_()
        except ArgumentError:
            shown = self._repr_html_()
        return {"text/plain": str(self), "text/html": shown}


def head_table(
    title: str, quantity: str, layers: Mapping[str, Sequence[float]], **facts: Any
) -> EffectTable:
    """Return a table of the heads of layers, with NaN where a layer has fewer than another.

    >>> head_table("a", "effect", {"layers.0": [0.5], "layers.1": [0.0, 1.0]}).values.tolist()
    [[0.5, nan], [0.0, 1.0]]
    """
    values = np.full((len(layers), max(map(len, layers.values()))), np.nan)
    for row, numbers in zip(values, layers.values(), strict=True):
        row[: len(numbers)] = numbers
    heads = tuple(map(str, range(values.shape[1])))
    return EffectTable(title, quantity, values, "layer", "head", tuple(layers), heads, **facts)


def changes_table(
    metric: NamedMetric,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    axes: tuple[str, str] = ("layer", "head"),
    **facts: Any,
) -> EffectTable:
    """Return a table without numbers for the changes of a metric, which `fill_table` measures."""
    quantity = Phrase("change of {name}", name=metric.name)
    values = np.full((len(rows), len(columns)), np.nan)
    return EffectTable(title, quantity, values, *axes, tuple(rows), tuple(columns), **facts)
