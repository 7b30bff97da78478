"""A recording: what attention computed in a run, at every place, in a form from which any block of
any pattern can be computed again, p_ij = exp(s_ij - lse_i); and the texts of its rows and columns.

Scores are computed in fp64 from the recorded q and k. The lse is the kernel's own, usually in fp32,
and limits the accuracy of the weights: for an lse around 10 the relative error is about 1e-6, for
one around 1000 about 1e-4. The audit (`row_sums`) reports the actual error.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorded_place import PatternBlock, Place
from regard.inspect.record.row_sums import RowSums, row_sums
from regard.inspect.record.tiles import Pooled, pool_pattern
from regard.units import plural
from regard.untrusted_text import tuple_repr

Axes: TypeAlias = Sequence[str] | tuple[Sequence[str], Sequence[str]]
"""The texts of tokens, or a pair: those of the queries and those of the keys."""

Labels: TypeAlias = Axes | Mapping[str, Axes]
"""The texts of all places, or a mapping from the beginning of a place's name to its texts."""


class PlaceLabels(NamedTuple):
    """One text for each row and column of a place, or ()."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def label_places(places: Mapping[str, Place], labels: Labels) -> dict[str, PlaceLabels]:
    """Assign texts to the rows and columns of places.

    A sequence labels every axis of its length; of a pair, the first labels rows and the second
    columns, except where the lengths show self-attention of one of the two.
    """
    if isinstance(labels, Mapping):
        return _by_name(places, labels)
    pair = _pair(labels)
    if len(pair[0]) == len(pair[1]) and pair[0] != pair[1] and len(places) > 1:
        raise ArgumentError(
            f"labels are two different sequences of {plural(len(pair[0]), 'text')}, so that their "
            "lengths do not show which tokens a place has: give a mapping from the names of places "
            f"to their labels; the places are {', '.join(places)}"
        )
    place_labels = {name: _fitting(place, pair) for name, place in places.items()}
    place_labels = {name: texts for name, texts in place_labels.items() if any(texts)}
    if not place_labels:
        sizes = ", ".join(f"{name} {place.T} x {place.N}" for name, place in places.items())
        raise ArgumentError(
            f"labels are {len(pair[0])} texts for queries and {len(pair[1])} for keys, which fit "
            f"no place; the places have so many queries x keys: {sizes}"
        )
    return place_labels


def _by_name(places: Mapping[str, Place], labels: Mapping[str, Axes]) -> dict[str, PlaceLabels]:
    """Assign the texts of a mapping; of several names that fit a place, the longest counts."""
    place_labels: dict[str, PlaceLabels] = {}
    used = set()
    for name, place in places.items():
        fitting = [x for x in labels if not x or name == x or name.startswith(f"{x}.")]
        if not fitting:
            continue
        key = max(fitting, key=len)
        used.update(fitting)
        place_labels[name] = _fitting(place, _pair(labels[key]))
        if key == name and not all(place_labels[name]):
            pair = _pair(labels[key])
            raise ArgumentError(
                f"labels of {name} are {len(pair[0])} texts for queries and {len(pair[1])} for "
                f"keys; it has {plural(_queries(place), 'query', 'queries')} and "
                f"{plural(place.N, 'key')}"
            )
    if unknown := [name for name in labels if name not in used]:
        raise ArgumentError(
            f"labels are given for {', '.join(map(repr, unknown))}, which is the beginning of no "
            f"place's name; the places are {', '.join(places)}"
        )
    return {name: texts for name, texts in place_labels.items() if any(texts)}


def _pair(axes: Axes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of queries and keys."""
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise ArgumentTypeError(
            f"labels are {type(axes).__name__}; they must be texts, or a pair of sequences of texts"
        )
    is_pair = len(axes) == 2 and not any(isinstance(part, str) for part in axes)
    both = (tuple(axes[0]), tuple(axes[1])) if is_pair else (tuple(axes), tuple(axes))
    for texts in both:
        for text in texts:
            if not isinstance(text, str):
                raise ArgumentTypeError(f"a label is {type(text).__name__}; labels must be texts")
    return both  # type: ignore[return-value]


def _queries(place: Place) -> int:
    """Return the number of queries that reached a place, with those that were not kept."""
    return max((step.token + step.T for step in place.steps), default=0)


def _fitting(place: Place, pair: tuple[tuple[str, ...], tuple[str, ...]]) -> PlaceLabels:
    """Return the texts of a place, by the lengths of its axes."""
    T, N = _queries(place), place.N
    rows = next((texts for texts in pair if len(texts) == T), ())
    columns = next((texts for texts in reversed(pair) if len(texts) == N), ())
    return PlaceLabels(tuple(rows[i] for i in place.tokens) if rows else (), columns)


_ROWS = 256
"""Number of rows whose weights `Recording.sums` computes together."""


class TopKeys(NamedTuple):
    """The keys that a query attends to most, and the remainder.

    Args:
        columns: columns of these keys, `[n]`, the largest weight first.
        weights: their weights, `[n]`.
        rest: sum of the weights of the other visible keys.
    """

    columns: Tensor
    weights: Tensor
    rest: float
    others: int

    def __repr__(self) -> str:
        return tuple_repr(self)


@dataclass(frozen=True)
class UnrecordedCall:
    """Calls at one place that ran in torch, and why they were not recorded."""

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
        token_labels: the texts of rows and columns that the caller gave, by place.
        unrecorded: the attention that was not recorded, of torch's functions or written out:
            `place`, `reason` and `count` of each.

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

    def __repr__(self) -> str:
        names = list(self.places)
        shown = names if len(names) < 3 else [names[0], "...", names[-1]]
        tokens = "" if self.ids is None else f", {plural(self.ids.shape[1], 'token')}"
        return f"Recording({plural(len(names), 'place')}: {' '.join(shown)}{tokens})"

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
            rows: a range of rows, one row, or None for all.
            columns: a range of columns, one column, or None for all.

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
            rows: a range of rows, one row, or None for all.
            columns: a range of columns, one column, or None for all.

        Returns:
            Scores, `[rows, columns]`; -inf where masked, or where the step did not have the key.
        """
        return self._block(layer, head, rows, columns, batch).scores[batch, 0]

    def row(
        self, layer: int | str, head: int, query: int, *, batch: int = 0
    ) -> Float[Tensor, " N"]:
        """Compute the weights of one query over all keys.

        Args:
            layer: name or index of a place.

        Returns:
            Weights, `[N]`.
        """
        return self.weights(layer, head, query, batch=batch)[0]

    def column(
        self, layer: int | str, head: int, key: int, *, batch: int = 0
    ) -> Float[Tensor, " T"]:
        """Compute the weights that all queries give to one key.

        Args:
            layer: name or index of a place.

        Returns:
            Weights, `[T]`.
        """
        return self.weights(layer, head, None, key, batch=batch)[:, 0]

    def sums(self, layer: int | str, head: int, *, batch: int = 0) -> Float[Tensor, " T"]:
        """Compute the sum of each row: 1 without a sink, less with one, 0 for a row that sees no
        key.

        The rows are computed in blocks, so that memory stays bounded.

        Args:
            layer: name or index of a place.

        Returns:
            Row sums, `[T]`.
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
        `regard.inspect.pool_pattern`.

        Args:
            layer: name or index of a place.

        Returns:
            Mass and maximum of each block.

        Raises:
            ArgumentError: as for `weights`, or a size is less than 1.
        """
        place = self[layer]
        place.head_index(head)
        place.check_batch(batch)
        return pool_pattern(place, size, heads=slice(head, head + 1), batch=batch).head(0)

    def positions(self, layer: int | str, *, batch: int = 0) -> Int[Tensor, " T"]:
        """Return the positions of the rows of a place; -1 for padding.

        Args:
            layer: name or index of a place.

        Returns:
            Positions, `[T]`.
        """
        place = self[layer]
        place.check_batch(batch)
        return place.row_positions[batch]

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
        are_known = max(place.tokens, default=len(rows)) < len(rows)
        named = tuple(rows[i] for i in place.tokens) if are_known else ()
        return named, columns[: place.N] if len(columns) >= place.N else ()

    @cached_property
    def row_sums(self) -> Mapping[str, RowSums]:
        """Return the audit of each place: how far row sums differ from 1, and outputs from the
        kernel's.

        See `regard.inspect.row_sums`.
        """
        return {name: row_sums(place) for name, place in self.places.items()}

    @property
    def sound(self) -> bool:
        """Return whether the audits of all places found no fault, and no attention is missing."""
        return not self.unrecorded and all(audit.sound for audit in self.row_sums.values())

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, Any]:
        """Return the page as a widget or in a frame, or the table of places if it is too large."""
        # by name: the page reads recordings, and is above this module
        bundle: Mapping[str, Any] = importlib.import_module(
            "regard.inspect.record.export"
        ).notebook_bundle(self)
        return bundle

    def _repr_html_(self) -> str:
        """Return a table of the places, their sizes and their audits, as HTML."""
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
        """Compute a block of one head, after checking what was asked for."""
        place = self[layer]
        place.head_index(head)
        place.check_batch(batch)
        parts = _as_slice("rows", rows, place.T), _as_slice("columns", columns, place.N)
        return place.block(*parts, slice(head, head + 1))


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
