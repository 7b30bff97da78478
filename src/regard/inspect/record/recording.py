"""What attention computed, kept so that any block of any pattern can be computed again: p_ij =
exp(s_ij - lse_i).

A place (a layer, or the cross-attention of one) is called once for a prompt and once more for every
decoded token. Each call is a `Step`; keys that a step shares with the one before are kept once, in
a pool of the place. Columns are tokens, in the order in which they came; rows are the queries that
were kept, of all steps, in order.

Scores are computed in fp64; the lse is the kernel's own, in fp32 mostly. A weight is as exact as
that: of an lse around 10 about 1e-6 of itself, of one around 1000 about 1e-4. The audit
(`row_sums`) says how far it was.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorded_place import PatternBlock, Place

if TYPE_CHECKING:
    from regard.inspect.record.row_sums import RowSums
    from regard.inspect.record.tiles import Pooled


_ROWS = 256


class TopKeys(NamedTuple):
    """The keys that a query attends to most, and what is left: columns [n], weights [n], the
    others' sum and number.
    """

    columns: Tensor
    weights: Tensor
    rest: float
    others: int


@dataclass(frozen=True, eq=False)
class Recording:
    """What was recorded: places by name, and what the run was.

    ids: [B,T] tokens of the run, or None; pieces: their texts, or (). source_ids, source_pieces:
        those that an encoder read, where there are two texts. about: model, dtype, ... in words.

    `layer` below is a place's number in the order of the run (negative counts from the end), or its
    name; `head` the model's number of a query head; `batch` a row of the batch. All numbers are
    fp64, from the recorded q, k and lse.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> list(found.places)[:2], found[0].H
    (['layers.0', 'layers.1'], 8)
    >>> found.weights(0, 0, rows=-1).sum().round(decimals=5).item()
    1.0
    >>> found.sound
    True
    """

    places: Mapping[str, Place]
    ids: Tensor | None = None
    pieces: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    source_ids: Tensor | None = None
    source_pieces: tuple[str, ...] = ()

    def __getitem__(self, layer: int | str) -> Place:
        """A place by its number, in the order of the run, or by its name."""
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
        """Any block of the exact pattern of one head: p_ij = exp(s_ij - lse_i), 0 where masked.

        Raises:
            ArgumentError: the place, head or batch row was not recorded, or a row or column does
                not exist.
            ArgumentTypeError: rows or columns is no slice of step 1, index or None.
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
        """Any block of the scores: s_ij = softcap(scale q_i . k_j) + bias_ij, -inf where masked or
        not held; raises as `weights`.
        """
        return self._block(layer, head, rows, columns, batch).scores[batch, 0]

    def row(
        self, layer: int | str, head: int, query: int, *, batch: int = 0
    ) -> Float[Tensor, " N"]:
        """The weights of one query over all keys; raises as `weights`."""
        return self.weights(layer, head, query, batch=batch)[0]

    def column(
        self, layer: int | str, head: int, key: int, *, batch: int = 0
    ) -> Float[Tensor, " T"]:
        """The weights that all queries give one key; raises as `weights`."""
        return self.weights(layer, head, None, key, batch=batch)[:, 0]

    def sums(self, layer: int | str, head: int, *, batch: int = 0) -> Float[Tensor, " T"]:
        """The sum of each row: 1, less the share of a sink, 0 for a row that sees nothing; a block
        of rows at a time.
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
        """The n largest weights of a query, and the sum and number of the other keys that it sees.

        Raises:
            ArgumentError: n is less than 1; or as `weights`.
        """
        if n < 1:
            raise ArgumentError(f"n is {n}; it must be at least 1")
        block = self._block(layer, head, query, None, batch)
        p, seen = block.weights[batch, 0, 0], ~block.scores[batch, 0, 0].isneginf()
        seen_n = int(seen.sum())
        best = p.masked_fill(~seen, -1).topk(min(n, seen_n))
        rest = p.index_fill(0, best.indices, 0).sum().item()
        return TopKeys(best.indices, best.values, rest, seen_n - len(best.indices))

    def pooled(
        self, layer: int | str, head: int, size: int | tuple[int, int], *, batch: int = 0
    ) -> Pooled:
        """Mass and max of each block of `size` rows and columns: see `regard.inspect.record.tiles`;
        raises as `weights`.
        """
        from regard.inspect.record.tiles import pooled

        place = self[layer]
        place.at(head)
        _check_batch(place, batch)
        return pooled(place, size, heads=slice(head, head + 1), batch=batch).head(0)

    def positions(self, layer: int | str, *, batch: int = 0) -> Int[Tensor, " T"]:
        """The positions of the rows of a place, -1 for padding."""
        place = self[layer]
        _check_batch(place, batch)
        return torch.cat([step.row_positions(batch) for step in place.steps])

    def labels(self, layer: int | str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The texts of a place's rows and columns, if the run's are known and are as many; else
        ().
        """
        place = self[layer]
        crosses, encodes = ".cross" in place.name, place.name.startswith("encoder.")
        rows = self.source_pieces if encodes else self.pieces
        columns = self.source_pieces if encodes or crosses else self.pieces
        at = [i for step in place.steps for i in step.tokens()]
        named = tuple(rows[i] for i in at) if at and max(at) < len(rows) else ()
        return named, columns[: place.N] if len(columns) >= place.N else ()

    @cached_property
    def row_sums(self) -> Mapping[str, RowSums]:
        """The audit of each place: row sums against 1, outputs against the kernel's; see
        `regard.inspect.record.row_sums`.
        """
        from regard.inspect.record.row_sums import row_sums

        return {name: row_sums(place) for name, place in self.places.items()}

    @property
    def sound(self) -> bool:
        """No audit found anything."""
        return all(found.sound for found in self.row_sums.values())

    def _repr_html_(self) -> str:
        """Places, their sizes and audits, as an inert table for a notebook."""
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
        place = self[layer]
        place.at(head)
        _check_batch(place, batch)
        parts = _as_slice("rows", rows, place.T), _as_slice("columns", columns, place.N)
        return place.block(*parts, slice(head, head + 1))


def _check_batch(place: Place, batch: int) -> None:
    if not 0 <= batch < place.B:
        raise ArgumentError(
            f"batch is {batch}; {place.name} has the rows 0 to {place.B - 1} of a batch"
        )


def _as_slice(name: str, which: slice | int | None, length: int) -> slice:
    if which is None:
        return slice(0, length)
    if isinstance(which, slice) and which.step in (None, 1):
        start, stop, _ = which.indices(length)
        return slice(start, max(start, stop))
    if isinstance(which, int) and -length <= which < length:
        return slice(which % length, which % length + 1)
    if isinstance(which, int):
        raise ArgumentError(f"{name} is {which}; there are {length}: -{length} to {length - 1}")
    raise ArgumentTypeError(
        f"{name} is {which!r}; it must be a slice of step 1, an index from -{length} to "
        f"{length - 1}, or None"
    )
