"""Many edited runs of one input: as rows of one batch where the model is a stack of blocks, or a
model of transformers.

A row joins the batch at the first layer that its edits change, with the state that the unchanged
run has there, so that the layers below are computed once. If a row also names the first token that
its edits change, the tokens before it are read from the caches of the unchanged run.

Nothing is known of the code of a model of transformers, so that its rows run from the first layer.
One row of each batch is not edited: if it is not, bit for bit, what it is in a batch without edits,
then rows read one another, and the runs are made one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.caches import Cache
from regard.inspect.interventions.effect_table import EffectTable, NamedMetric
from regard.inspect.model_run import Edit, ModelRun
from regard.language import Phrase
from regard.models.decoder import Decoder
from regard.nn.mixer import Mixer
from regard.span import Positions, Span, slice_positions
from regard.tracing import Trace, is_tracing, named_scope

ReportCell: TypeAlias = Callable[[int, int, dict[str, Any]], None]
"""What is called after each number: how many there are, of how many, and the number as in
`EffectTable.records`.
"""

COMPUTED_TOKENS, READ_TOKENS = 512, 16384
"""How many tokens one batch computes, and how many its rows read from caches, at most."""


class EditedRun(NamedTuple):
    """The edits of one run by tap, and the first token that they change.

    With a first token, an edit gets only the states `[B, T - start, M]` of the tokens from there,
    so that it must count positions from the end.
    """

    edits: Mapping[str, Edit]
    start: int = 0


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a long measurement; `table` has what was measured before.

    Args:
        table: the table, with NaN where nothing was measured yet.

    >>> import numpy as np
    >>> Stopped(EffectTable("a", "b", np.zeros((1, 1)), "layer", "head", ("0",), ("0",))).table.rows
    ('0',)
    """

    def __init__(self, table: EffectTable) -> None:
        super().__init__(str(table.notes[-1]) if table.notes else "")
        self.table = table


def fill_table(
    table: EffectTable,
    run: ModelRun,
    metric: NamedMetric,
    cells: Mapping[tuple[int, int], EditedRun],
    report: ReportCell | None = None,
) -> EffectTable:
    """Measure the change of the metric by each cell's edits, and write it into the table."""
    outputs = run_edited(run, list(cells.values()), last_only=metric.last_only)
    return measure_cells(table, outputs, metric, list(cells), report)


def measure_cells(
    table: EffectTable,
    outputs: Iterable[tuple[int, Tensor]],
    metric: NamedMetric,
    places: Sequence[tuple[int, int]],
    report: ReportCell | None = None,
) -> EffectTable:
    """Write the change of the metric in each numbered output into the cell of that number."""
    done = 0
    try:
        for n, output in outputs:
            place = places[n]
            table.values[place] = float(metric.measure(output)) - (table.baseline or 0.0)
            done += 1
            if report is not None:
                report(done, len(places), table.record(*place))
    except KeyboardInterrupt as stop:
        note = Phrase("stopped after {done} of {total} numbers", done=done, total=len(places))
        raise Stopped(replace(table, notes=(*table.notes, note))) from stop
    return table


def run_edited(
    run: ModelRun, runs: Sequence[EditedRun], *, last_only: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Generate the number and the output `[B, T, ...]` of each edited run, in any order.

    Args:
        runs: the edited runs.
        last_only: whether the outputs of the last position suffice, `[B, 1, ...]`.

    >>> import regard
    >>> from regard.inspect.model_run import prepare_run
    >>> run = prepare_run(regard.load("tiny"), "to be")
    >>> rows = [EditedRun({"layers.1.z": torch.zeros_like}), EditedRun({"embed": torch.zeros_like})]
    >>> sorted((n, tuple(output.shape)[:2]) for n, output in run_edited(run, rows, last_only=True))
    [(0, (1, 1)), (1, (1, 1))]
    """
    decoder = run.network
    firsts = [_first_layer(each.edits) for each in runs]
    if run.decoder_inputs is None or not _is_plain(decoder) or None in firsts:
        if run.rows is not None and len(runs) > 1 and not is_tracing():
            yield from _rows_of_module(run, runs)
            return
        for n, each in enumerate(runs):
            yield n, run.run(each.edits).output
        return
    assert isinstance(decoder, Decoder)
    ids, positions = run.decoder_inputs
    T = ids.shape[1]
    batches = _RowBatches(
        decoder, ids, Span(0, T) if positions is None else positions, last_only=last_only
    )
    is_causal = last_only and _is_causal(decoder)
    order = sorted(range(len(runs)), key=lambda n: (runs[n].start * is_causal, firsts[n], n))
    while order:
        start = runs[order[0]].start * is_causal
        size = max(1, min(COMPUTED_TOKENS // (T - start), READ_TOKENS // T) // len(ids))
        chunk = [n for n in order[:size] if runs[n].start * is_causal == start]
        order = order[len(chunk) :]
        rows = [(int(firsts[n] or 0), runs[n].edits) for n in chunk]
        yield from zip(chunk, batches.run(rows, start), strict=True)


def _rows_of_module(run: ModelRun, runs: Sequence[EditedRun]) -> Iterator[tuple[int, Tensor]]:
    """Generate the outputs of edited runs of a module, many as rows of one batch."""
    assert run.tokens is not None, "rows are repeated by their ids"
    most = max(1, COMPUTED_TOKENS // len(run.tokens.ids))
    times = min(len(runs), most) + 1
    unchanged = run.run(times=times).output
    B, alone = len(unchanged) // times, len(unchanged) % times > 0
    for begin in range(0, len(runs), times - 1):
        chunk = range(begin, min(begin + times - 1, len(runs)))
        edits: dict[str, list[tuple[int, Edit]]] = {}
        for row, n in enumerate(chunk, 1):
            for name, edit in runs[n].edits.items():
                edits.setdefault(name, []).append((row, edit))
        if not alone:
            edited = {name: _edit_rows(each, times=times) for name, each in edits.items()}
            try:
                output = run.run(edited, times=times).output
            except _NoRows:
                alone = True
            else:
                alone = not torch.equal(output[:B], unchanged[:B])
        for row, n in enumerate(chunk, 1):
            yield n, run.run(runs[n].edits).output if alone else output[row * B : (row + 1) * B]


class _NoRows(Exception):
    """A tensor of an edited run has no rows for the runs of a batch."""


def _first_layer(edits: Mapping[str, Edit]) -> int | None:
    """Return the first layer whose input or steps are edited; None if a name is no full one."""
    layers = []
    for name in edits:
        match = re.fullmatch(r"layers\.(\d+)\.([\w.]+)", name)
        if match is None and name != "embed":
            return None
        layers.append(0 if match is None else int(match[1]) + (match[2] == "residual"))
    return min(layers, default=0)


def _is_plain(network: object) -> bool:
    """Return whether the layers of a decoder pass nothing but their states to one another, and no
    trace of the caller would see the rows of a batch.
    """
    if not isinstance(network, Decoder) or network.shares_between_layers or network.reads_ids:
        return False
    return not is_tracing()


def _is_causal(decoder: Decoder) -> bool:
    """Return whether no token depends on a later one, by the masks of all layers."""
    mixers = [m for layer in decoder.layers for m in layer.modules() if isinstance(m, Mixer)]
    return all(mixer.is_causal for mixer in mixers)


class _RowBatches:
    """The unchanged run of a decoder: its states before each layer, and caches of its tokens."""

    def __init__(
        self, decoder: Decoder, ids: Tensor, positions: Positions, *, last_only: bool
    ) -> None:
        self.decoder, self.ids, self.positions, self.last_only = decoder, ids, positions, last_only
        with torch.no_grad():
            self.states = [decoder.embed(ids, positions)]
            for layer in decoder.layers:
                self.states.append(layer(self.states[-1], positions, None))
        self.caches: list[Cache] | None = None
        self.cached = 0

    @torch.no_grad()
    def run(self, rows: Sequence[tuple[int, Mapping[str, Edit]]], start: int) -> Iterator[Tensor]:
        """Generate the outputs of rows, each with its first layer, which must not decrease."""
        B, caches = len(self.ids), self._caches_before(start)
        positions = slice_positions(self.positions, slice(start, None))
        edits: dict[str, list[tuple[int, Edit]]] = {}
        x = self.states[0][:0, start:]
        joined = 0
        layers = self.decoder.layers
        for row, (first, named) in enumerate(rows):
            entered = "embed" if first == 0 else f"layers.{first - 1}.residual"
            for name, edit in named.items():
                if name != entered:
                    edits.setdefault(name, []).append((row, edit))
        with Trace(edit={name: _edit_rows(each, B) for name, each in edits.items()}):
            for i in range(rows[0][0], len(layers) + 1):
                entered = "embed" if i == 0 else f"layers.{i - 1}.residual"
                while joined < len(rows) and rows[joined][0] == i:
                    state = self.states[i][:, start:]
                    enter = rows[joined][1].get(entered)
                    x = torch.cat([x, state if enter is None else enter(state)])
                    joined += 1
                if i == len(layers):
                    break
                cache = None if caches is None else _repeated(caches[i], B, joined)
                own = positions if isinstance(positions, Span) else positions.repeat(joined, 1)
                with named_scope(f"layers.{i}"):
                    x = layers[i](x, own, cache)
        x = self.decoder.norm(x[:, -1:] if self.last_only else x)
        head = self.decoder.head
        yield from (x if head is None else head(x)).split(B)

    def _caches_before(self, start: int) -> list[Cache] | None:
        """Return caches with the first tokens of the unchanged run; starts must not decrease."""
        if start == 0:
            return None
        self.caches = self.decoder.new_caches() if self.caches is None else self.caches
        if start > self.cached:
            new = slice(self.cached, start)
            positions = slice_positions(self.positions, new)
            self.decoder.hidden(self.ids[:, new], positions, self.caches)
            self.cached = start
        return self.caches


def _repeated(cache: Cache, B: int, times: int) -> Cache:
    """Return a copy of a cache whose B rows stand there several times."""
    other = cache.fork()
    other.select(torch.arange(B).repeat(times))
    return other


def _edit_rows(
    edits: Sequence[tuple[int, Edit]], own_rows: int | None = None, *, times: int = 1
) -> Edit:
    """Return the edit of a batch that applies each edit to its own row: some rows of the input, or
    one of `times` equal parts of a tensor.
    """

    def edit(x: Tensor) -> Tensor:
        if len(x) % times:
            raise _NoRows
        x, B = x.clone(), own_rows or len(x) // times
        for row, change in edits:
            own = slice(row * B, (row + 1) * B)
            x[own] = change(x[own])
        return x

    return edit
