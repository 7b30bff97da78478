"""A recording: what attention computed in a run, at every place, in a form from which any block of
any pattern can be computed again, p_ij = exp(s_ij - lse_i).

Scores are computed in fp64 from the recorded q and k. The lse is the kernel's own, usually in fp32,
and limits the accuracy of the weights: for an lse around 10 the relative error is about 1e-6, for
one around 1000 about 1e-4. The audit (`row_sums`) reports the actual error.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.place_labels import PlaceLabels
from regard.inspect.record.recorded_place import PatternBlock, Place
from regard.language import language_of_locale
from regard.view.notebook_page import HEIGHT, PagePlace, frame, has_widgets, widget
from regard.view.report import page

if TYPE_CHECKING:
    from regard.inspect.interventions.effect_table import EffectTable
    from regard.inspect.record.row_sums import RowSums
    from regard.inspect.record.tiles import Pooled


MAX_CELLS = 1 << 22
"""The largest number of weights of a recording that a notebook shows as a page."""
_ROWS = 256
"""Number of rows whose weights `Recording.sums` computes together."""


class TopKeys(NamedTuple):
    """The keys that a query attends to most, and the remainder.

    Args:
        columns: columns of these keys, `[n]`, the largest weight first.
        weights: their weights, `[n]`.
        rest: sum of the weights of the other visible keys.
        others: number of the other visible keys.
    """

    columns: Tensor
    weights: Tensor
    rest: float
    others: int


@dataclass(frozen=True)
class UnrecordedCall:
    """Calls at one place that ran in torch and were not recorded.

    Args:
        place: the path of the module.
        reason: why they could not be recorded.
        count: their number.
    """

    place: str
    reason: str
    count: int


@dataclass(frozen=True, eq=False)
class Recording:
    """What was recorded: places by name, and facts about the run.

    In the methods, `layer` is the name of a place, or its index in the order of the run (negative
    counts from the end); `head` is a query head of the model; `batch` is a row of the batch. All
    results are fp64, computed from the recorded q, k and lse.

    Args:
        places: the places by name, in the order of the run.
        ids: token ids of the run, `[B, T]`, or None.
        pieces: text of each token of the first row, or ().
        metadata: model, dtype, device and other facts, as text.
        source_ids: token ids that the encoder read, where there are two texts.
        source_pieces: their texts.
        token_labels: the texts of rows and columns that the caller gave, by place.
        unrecorded: the calls of torch's attention functions that were not recorded: `place`,
            `reason` and `count` of each.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> list(recording.places)[:2], recording[0].H
    (['layers.0', 'layers.1'], 8)
    >>> recording.weights(0, 0, rows=-1).sum().round(decimals=5).item()
    1.0
    >>> recording.sound
    True
    """

    places: Mapping[str, Place]
    ids: Tensor | None = None
    pieces: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    source_ids: Tensor | None = None
    source_pieces: tuple[str, ...] = ()
    token_labels: Mapping[str, PlaceLabels] = field(default_factory=dict)
    unrecorded: tuple[UnrecordedCall, ...] = ()

    def __getitem__(self, layer: int | str) -> Place:
        """Return a place by its index in the order of the run, or by its name."""
        if isinstance(layer, str) and layer in self.places:
            return self.places[layer]
        names = list(self.places)
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            return self.places[names[layer]]
        raise ArgumentError(
            f"{layer!r} was not recorded; recorded: {', '.join(names) or 'nothing'}"
        )

    def __len__(self) -> int:
        return len(self.places)

    def weights(
        self,
        layer: int | str,
        head: int,
        rows: slice | int | None = None,
        columns: slice | int | None = None,
        *,
        batch: int = 0,
    ) -> Float[Tensor, "t s"]:
        """Compute any block of the exact pattern of one head: p_ij = exp(s_ij - lse_i), 0 where
        masked.

        Args:
            layer: name or index of a place.
            head: query head.
            rows: a range of rows, one row, or None for all.
            columns: a range of columns, one column, or None for all.
            batch: row of the batch.

        Returns:
            Weights, `[rows, columns]`.

        Raises:
            ArgumentError: the place, head or batch row was not recorded, or a row or column does
                not exist.
            ArgumentTypeError: `rows` or `columns` is not a slice of step 1, an index, or None.
        """
        return self._block(layer, head, rows, columns, batch).weights[batch, 0]

    def scores(
        self,
        layer: int | str,
        head: int,
        rows: slice | int | None = None,
        columns: slice | int | None = None,
        *,
        batch: int = 0,
    ) -> Float[Tensor, "t s"]:
        """Compute any block of the scores of one head: s_ij = softcap(scale q_i . k_j) + bias_ij.

        Args:
            layer: name or index of a place.
            head: query head.
            rows: a range of rows, one row, or None for all.
            columns: a range of columns, one column, or None for all.
            batch: row of the batch.

        Returns:
            Scores, `[rows, columns]`; -inf where masked, or where the step did not have the key.

        Raises:
            ArgumentError: as for `weights`.
            ArgumentTypeError: as for `weights`.
        """
        return self._block(layer, head, rows, columns, batch).scores[batch, 0]

    def row(
        self, layer: int | str, head: int, query: int, *, batch: int = 0
    ) -> Float[Tensor, " N"]:
        """Compute the weights of one query over all keys.

        Args:
            layer: name or index of a place.
            head: query head.
            query: row.
            batch: row of the batch.

        Returns:
            Weights, `[N]`.

        Raises:
            ArgumentError: as for `weights`.
        """
        return self.weights(layer, head, query, batch=batch)[0]

    def column(
        self, layer: int | str, head: int, key: int, *, batch: int = 0
    ) -> Float[Tensor, " T"]:
        """Compute the weights that all queries give to one key.

        Args:
            layer: name or index of a place.
            head: query head.
            key: column.
            batch: row of the batch.

        Returns:
            Weights, `[T]`.

        Raises:
            ArgumentError: as for `weights`.
        """
        return self.weights(layer, head, None, key, batch=batch)[:, 0]

    def sums(self, layer: int | str, head: int, *, batch: int = 0) -> Float[Tensor, " T"]:
        """Compute the sum of each row: 1 without a sink, less with one, 0 for a row that sees no
        key.

        The rows are computed in blocks, so that memory stays bounded.

        Args:
            layer: name or index of a place.
            head: query head.
            batch: row of the batch.

        Returns:
            Row sums, `[T]`.

        Raises:
            ArgumentError: as for `weights`.
        """
        place = self[layer]
        return torch.cat(
            [
                self.weights(layer, head, slice(i, i + _ROWS), batch=batch).sum(1)
                for i in range(0, max(place.T, 1), _ROWS)
            ]
        )

    def top(
        self, layer: int | str, head: int, query: int, n: int = 5, *, batch: int = 0
    ) -> TopKeys:
        """Return the n largest weights of a query, and how much weight the other visible keys have.

        Args:
            layer: name or index of a place.
            head: query head.
            query: row.
            n: number of keys.
            batch: row of the batch.

        Returns:
            Columns and weights of these keys, and the sum and the number of the others.

        Raises:
            ArgumentError: n is less than 1, or as for `weights`.
        """
        if n < 1:
            raise ArgumentError(f"n is {n}; it must be at least 1")
        block = self._block(layer, head, query, None, batch)
        p, visible = block.weights[batch, 0, 0], ~block.scores[batch, 0, 0].isneginf()
        num_visible = int(visible.sum())
        best = p.masked_fill(~visible, -1).topk(min(n, num_visible))
        rest = p.index_fill(0, best.indices, 0).sum().item()
        return TopKeys(best.indices, best.values, rest, num_visible - len(best.indices))

    def pooled(
        self, layer: int | str, head: int, size: int | tuple[int, int], *, batch: int = 0
    ) -> Pooled:
        """Pool the pattern of one head over blocks of rows and columns; see
        `regard.inspect.pooled`.

        Args:
            layer: name or index of a place.
            head: query head.
            size: rows and columns of a block.
            batch: row of the batch.

        Returns:
            Mass and maximum of each block.

        Raises:
            ArgumentError: as for `weights`, or a size is less than 1.
        """
        from regard.inspect.record.tiles import pooled

        place = self[layer]
        place.head_index(head)
        _check_batch(place, batch)
        return pooled(place, size, heads=slice(head, head + 1), batch=batch).head(0)

    def positions(self, layer: int | str, *, batch: int = 0) -> Int[Tensor, " T"]:
        """Return the positions of the rows of a place; -1 for padding.

        Args:
            layer: name or index of a place.
            batch: row of the batch.

        Returns:
            Positions, `[T]`.
        """
        place = self[layer]
        _check_batch(place, batch)
        return torch.cat([step.row_positions(batch) for step in place.steps])

    def labels(self, layer: int | str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the texts of the rows and of the columns of a place.

        Args:
            layer: name or index of a place.

        Returns:
            One text per row and one per column; () where the texts are unknown or too few.
        """
        place = self[layer]
        if place.name in self.token_labels:
            return self.token_labels[place.name]
        crosses, encodes = ".cross" in place.name, place.name.startswith("encoder.")
        rows = self.source_pieces if encodes else self.pieces
        columns = self.source_pieces if encodes or crosses else self.pieces
        token_indices = [i for step in place.steps for i in step.tokens()]
        named = (
            tuple(rows[i] for i in token_indices)
            if token_indices and max(token_indices) < len(rows)
            else ()
        )
        return named, columns[: place.N] if len(columns) >= place.N else ()

    @cached_property
    def row_sums(self) -> Mapping[str, RowSums]:
        """Return the audit of each place: how far row sums differ from 1, and outputs from the
        kernel's.

        See `regard.inspect.row_sums`.
        """
        from regard.inspect.record.row_sums import row_sums

        return {name: row_sums(place) for name, place in self.places.items()}

    @property
    def sound(self) -> bool:
        """Return whether the audits of all places found no fault."""
        return all(audit.sound for audit in self.row_sums.values())

    def compare(self, other: Recording, *, batch: int = 0) -> EffectTable:
        """Compare the patterns with those of another run: another text with as many tokens, another
        model, checkpoint, dtype or kernel.

            distance(head) = mean over rows of JS(p_i, p'_i), in bits: 0 if equal, 1 if disjoint

        Each row is divided by its sum, which leaves out a sink. `regard.inspect.report(a, b=b)`
        shows both on the page.

        Args:
            other: the other recording.
            batch: row of the batch, in both.

        Returns:
            A table of the places and heads that both recordings have.

        Raises:
            ArgumentError: no place is in both, or a place has other numbers of queries or keys.

        >>> import regard
        >>> model = regard.load("tiny")
        >>> a, b = (regard.inspect.record(model, text) for text in ("to be or", "to do or"))
        >>> float(a.compare(a).values.max()), bool(a.compare(b).values.max() > 0.01)
        (0.0, True)
        """
        from regard.inspect.record.comparison import compare_recordings

        return compare_recordings(self, other, batch=batch)

    def to(self, what: str | Path, *, layer: int | str = 0, head: int = 0, batch: int = 0) -> Any:
        """Export the patterns.

        - "numpy": the weights `[h, T, N]` of every place, by name; a file that ends in .npz has
          the same arrays;
        - "bertviz": the arguments of `bertviz.head_view` and `bertviz.model_view`;
        - "circuitsvis": the arguments of `circuitsvis.attention.attention_heads`, for one layer;
        - a file that ends in .csv: one line per weight that is not masked;
        - a file that ends in .png, .svg or .pdf: the pattern of one head.

        Args:
            what: "numpy", "bertviz", "circuitsvis", or the name of a file.
            layer: name or index of the place, for "circuitsvis" and pictures.
            head: query head, for pictures.
            batch: row of the batch.

        Returns:
            The data, or the path of the file.

        Raises:
            ArgumentError: there are too many weights to write them all, or the tool cannot show
                this kind of attention.
            FileError: the format is unknown, or the file cannot be written.

        >>> import regard
        >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
        >>> recording.to("numpy")["layers.0"].shape
        (8, 6, 6)
        """
        from regard.inspect.record.export import export

        return export(self, what, layer=layer, head=head, batch=batch)

    def widget(self, *, height: int = HEIGHT) -> Any:
        """Return the interactive page as a widget for a notebook, which other cells can move.

        Args:
            height: height of the widget, in pixels.

        Returns:
            An `anywidget.AnyWidget`; its method `show(layer, head, query, key, view)` opens a view
            ("atlas", "map", "row", "cell", ...) of a head.

        Raises:
            ArgumentError: the package anywidget is not installed (the extra `notebook`).
        """
        data = self._page_data()
        places = [
            PagePlace(place["name"], tuple(place["heads"]), place["T"], place["N"])
            for place in data["meta"]["places"]
        ]
        return widget(page(data, language_of_locale()), places, height)

    def _page_data(self) -> Mapping[str, Any]:
        """Return the data of the interactive page."""
        # by name: `report` reads recordings, and is above this module
        report = importlib.import_module("regard.inspect.report.page_data").report
        data: Mapping[str, Any] = report(self)
        return data

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, Any]:
        """Return what a notebook shows: the interactive page, as a widget if anywidget is
        installed, else in a frame; or the table of places if the recording is too large for a page.
        """
        text = {"text/plain": f"Recording of {', '.join(self.places)}"}
        if sum(place.T * place.N * len(place.heads) for place in self.places.values()) > MAX_CELLS:
            return {**text, "text/html": self._repr_html_()}
        if not has_widgets():
            return {**text, "text/html": frame(page(self._page_data(), language_of_locale()))}
        shown: Mapping[str, Any] = self.widget()._repr_mimebundle_()[0]
        return {**shown, **text}

    def _repr_html_(self) -> str:
        """Return a table of the places, their sizes and their audits, as static HTML for a
        notebook.
        """
        lines = [("place", "kernel", "heads", "queries x keys", "audit")]
        for name, place in self.places.items():
            kernels = ", ".join(dict.fromkeys(step.kernel for step in place.steps))
            sizes = f"{place.H} over {place.G}", f"{place.T} x {place.N}"
            audit = str(self.row_sums[name]).removeprefix(f"{name}: ")
            lines.append((name, kernels, *sizes, audit))
        rows = ["".join(f"<td>{html.escape(x)}</td>" for x in line) for line in lines]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def _block(
        self,
        layer: int | str,
        head: int,
        rows: slice | int | None,
        columns: slice | int | None,
        batch: int,
    ) -> PatternBlock:
        """Compute a block of one head, after checking the batch row, the head, the rows and the
        columns.
        """
        place = self[layer]
        place.head_index(head)
        _check_batch(place, batch)
        parts = _as_slice("rows", rows, place.T), _as_slice("columns", columns, place.N)
        return place.block(*parts, slice(head, head + 1))


def _check_batch(place: Place, batch: int) -> None:
    """Refuse a batch row that the place does not have."""
    if not 0 <= batch < place.B:
        raise ArgumentError(f"batch is {batch}; {place.name} has batch rows 0 to {place.B - 1}")


def _as_slice(name: str, which: slice | int | None, length: int) -> slice:
    """Return an index, a slice or None as a slice within a length."""
    if which is None:
        return slice(0, length)
    if isinstance(which, slice) and which.step in (None, 1):
        start, stop, _ = which.indices(length)
        return slice(start, max(start, stop))
    if isinstance(which, int) and -length <= which < length:
        return slice(which % length, which % length + 1)
    if isinstance(which, int):
        raise ArgumentError(
            f"{name} is {which}; there are {length} {name}, so it must be from -{length} to "
            f"{length - 1}"
        )
    raise ArgumentTypeError(
        f"{name} is {which!r}; it must be a slice of step 1, an index from -{length} to "
        f"{length - 1}, or None"
    )
