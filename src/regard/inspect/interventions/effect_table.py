"""The result of an intervention at many places: a table of numbers, and a map of them."""

from __future__ import annotations

import csv
import html
import importlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import ArgumentError, FileError
from regard.files.atomic_write import write_user_file
from regard.language import translate
from regard.text_table import display_width, format_table, line_width, wrap
from regard.untrusted_text import escape_controls

AXES = {"head": "attention head"}
"""Names of axes as the catalogue has them: "head" alone is the output head of a model there."""
QUANTITY_WIDTH = 16
"""The width of a quantity that heads its column in a terminal."""
ENDINGS = (".csv", ".json", ".npy", ".png", ".svg", ".pdf")
"""The endings of files that `EffectTable.to` writes."""


@dataclass(frozen=True, eq=False)
class EffectTable:
    """Numbers by row and column, such as the effect of each head of each layer.

    Args:
        title: what was done, and on what.
        quantity: what the numbers are.
        values: the numbers `[R, C]`, in fp64; NaN where there is nothing, such as a layer with
            fewer heads.
        row_axis, column_axis: what rows and columns are, such as "layer" and "head".
        rows, columns: the name of each row and of each column.
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
        records = []
        for i, j in np.ndindex(*self.values.shape):
            if math.isnan(self.values[i, j]):
                continue
            record = {self.row_axis: self.rows[i], self.column_axis: self.columns[j]}
            if self.cells:
                record["text"] = self.cells[i][j]
            records.append({**record, self.quantity: float(self.values[i, j])})
        return records

    def top(self, n: int = 10) -> list[dict[str, Any]]:
        """Return the cells with the largest numbers, by their absolute value.

        Args:
            n: how many.

        Returns:
            At most n cells, as in `records`.
        """
        return sorted(self.records(), key=lambda cell: -abs(cell[self.quantity]))[:n]

    def frame(self) -> Any:
        """Return the table as a pandas DataFrame, with one line per row and one column per column.

        Returns:
            The data frame.

        Raises:
            ArgumentError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError:
            raise ArgumentError(
                "a data frame needs pandas, which is not installed: python -m pip install pandas; "
                "without it use records(), values, or to('table.csv')"
            ) from None
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

        return EffectMap(
            self.values,
            [f"{self.row_axis} {name}" if name.isdigit() else name for name in self.rows],
            list(self.columns),
            self.title,
            self.column_axis,
            self.quantity,
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

        >>> table = EffectTable("a", "effect", np.array([[0.5]]), "layer", "head", ("0",), ("3",))
        >>> table.to("effects.csv").read_text().splitlines()
        ['layer,head,effect', '0,3,0.5']
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
        title = html.escape(escape_controls(f"{self.title}: {self.quantity}"))
        return f"<table><caption>{title}</caption>{rows}</table>"

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, str]:
        """Return the forms in which a notebook can show the table: a data frame's if pandas is
        installed, and plain text.
        """
        try:
            shown: str = self.frame()._repr_html_()
        except ArgumentError:
            shown = self._repr_html_()
        return {"text/plain": str(self), "text/html": shown}
