"""Metrics of every recorded head of a place, from one pass over its tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.metrics.accumulators import ACCUMULATORS, Accumulator, MeasuredPlace
from regard.inspect.record.record_model import record
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.tiles import TILE_SIZE, Tile, walk
from regard.models.model import Model
from regard.units import plural

if TYPE_CHECKING:
    from regard.inspect.interventions.model_run import AnyModel
    from regard.inspect.metrics.corpus import CorpusMeasures

SAMPLED_ROWS = 64
"""Number of rows that are sampled for a metric that needs whole rows; `Sampled.rows` is the actual
number.
"""


SCORES = ("previous_token", "induction", "duplicate", "entropy", "sink")
"""Metrics that `head_scores` returns."""


class TileObserver(Protocol):
    """Whatever receives the tiles of a pattern, one after another."""

    def add(self, tile: Tile) -> object:
        """Receive one tile of the pattern."""


@dataclass(frozen=True, eq=False)
class Measures:
    """Metrics of the heads of one place of a recording.

    Args:
        place: name of the place.
        heads: the query heads.
        rows: number of rows of the place.
        values: by the name of a metric, one number per head, `[h]`.
        curves: by the name of a curve, one curve per head: "offsets" `[h, d]`, "received" `[h, N]`.
    """

    place: str
    heads: tuple[int, ...]
    rows: int
    values: Mapping[str, Float[Tensor, " h"]]
    curves: Mapping[str, Float[Tensor, "h n"]]

    def __getitem__(self, name: str) -> Tensor:
        """Return a metric or a curve by name."""
        for kind in (self.values, self.curves):
            if name in kind:
                return kind[name]
        raise ArgumentError(
            f"{name!r} was not measured at {self.place}; measured: "
            f"{', '.join((*self.values, *self.curves))}"
        )


@overload
def measure(
    place: Place,
    ids: Int[Tensor, " N"] | None = ...,
    *,
    batch: int = ...,
    sinks: int = ...,
    local_distance: int = ...,
    padding: Tensor | None = ...,
    size: int | tuple[int, int] = ...,
    dtype: torch.dtype = ...,
    also: Sequence[TileObserver] = ...,
) -> Measures: ...
@overload
def measure(
    place: AnyModel, ids: Iterable[Any], *, sinks: int = ..., local_distance: int = ...
) -> CorpusMeasures: ...
def measure(
    place: Place | AnyModel,
    ids: Int[Tensor, " N"] | Iterable[Any] | None = None,
    *,
    batch: int = 0,
    sinks: int = 4,
    local_distance: int = 32,
    padding: Tensor | None = None,
    size: int | tuple[int, int] = TILE_SIZE,
    dtype: torch.dtype = torch.float64,
    also: Sequence[TileObserver] = (),
) -> Measures | CorpusMeasures:
    """Measure all recorded heads of a place, or all heads of a model over a corpus.

    n_i is the number of keys that row i sees. Means are over rows; rows to which a definition does
    not apply are left out.

        entropy          H_i / ln n_i, 0 to 1; H_i = -sum_j p_ij ln p_ij, a sink counts as a key
        effective_keys   exp(H_i)
        max_logit        max_ij s_ij
        sink             sum of p_ij over the keys at positions below `sinks`, in later rows
        learned_sink     P_sink, the share of a sink logit
        previous_token   p_{i,i-1}
        duplicate        sum of p_ij over earlier copies j of token i
        induction        sum of p_ij over keys j that follow earlier copies of token i
        distance         sum_j p_ij (i - j), in positions
        local            sum of p_ij over |i - j| < local_distance
        future, empty, padding   total weight on later positions, on empty slots, on padded columns
        missing          the largest |1 - sum_j p_ij - P_sink|

    The curves are offsets, D(d) = mean_i p_{i,i-d}, and received, sum_i p_ij of each column.
    A metric that is not defined for these tokens is left out of the values: for example, induction
    if no token occurs twice.

    With a model and a corpus, `measure(model, texts)`, each text is recorded and measured alone,
    and the result has the mean over texts of every head.

    Args:
        place: a place of a recording; or a model, as for `record`.
        ids: token ids of the columns, `[N]`, for the metrics of copies; the rows are the same
            tokens. None leaves these metrics out. With a model, the texts: any iterable of what
            `record` takes, which is read once.
        batch: row of the batch.
        sinks: number of first positions that count as sinks.
        local_distance: keys at a smaller distance are local.
        padding: which columns are padding, bool `[N]`.
        size: rows and columns of the tiles.
        dtype: dtype in which scores and weights are computed; sums are kept in fp64. In fp32 a
            weight has a relative error of about 2^-22 times the size of its score.
        also: what else is to receive each tile, so that the pattern is computed once.

    Returns:
        The metrics and curves of each head; of a model, a `CorpusMeasures`.

    Raises:
        ArgumentError: the corpus is empty; an option does not apply to a model; `ids` or `padding`
            does not have one entry per column, or there is no such row of the batch.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> measures = measure(recording[0], recording.ids[0])
    >>> measures.values["future"].tolist(), bool((measures.values["missing"] < 1e-5).all())
    ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], True)
    """
    if not isinstance(place, Place):
        if batch or padding is not None or also or ids is None or isinstance(ids, (str, Tensor)):
            raise ArgumentError(
                "measure(model, texts) takes a list of texts, and neither batch, padding nor also; "
                "for one run, record it and measure its places"
            )
        model: Any = place
        from regard.inspect.metrics.corpus import measure_corpus

        return measure_corpus(
            lambda text: record(model, text, keep=()),
            lambda each, own: (
                measure_place(
                    each, own, sinks=sinks, local_distance=local_distance, size=size, dtype=dtype
                ).values
            ),
            ids,
        )
    assert ids is None or isinstance(ids, Tensor), "an iterable is for a model"
    return measure_place(
        place,
        ids,
        batch=batch,
        sinks=sinks,
        local_distance=local_distance,
        padding=padding,
        size=size,
        dtype=dtype,
        also=also,
    )


def measure_place(
    place: Place,
    ids: Tensor | None = None,
    *,
    batch: int = 0,
    sinks: int = 4,
    local_distance: int = 32,
    padding: Tensor | None = None,
    size: int | tuple[int, int] = TILE_SIZE,
    dtype: torch.dtype = torch.float64,
    also: Sequence[TileObserver] = (),
) -> Measures:
    """Measure all recorded heads of a place; see `measure`."""
    for name, values in (("ids", ids), ("padding", padding)):
        if values is not None and values.shape != (place.N,):
            raise ArgumentError(
                f"{name} are {tuple(values.shape)}; {place.name} has "
                f"{plural(place.N, 'column')}, and "
                "there must be one entry for each"
            )
    if not 0 <= batch < place.B:
        raise ArgumentError(
            f"batch is {batch}; {place.name} has batch rows 0 to {place.B - 1}", argument="batch"
        )
    measured = MeasuredPlace(place, ids, batch, sinks, local_distance, padding)
    accumulators: list[Accumulator] = [make(measured) for make in ACCUMULATORS]
    for tile in walk(place, size, batch=batch, dtype=dtype):
        for observer in also:
            observer.add(tile)
        tile = tile.keep_rows(measured.rows >= 0)  # rows of padding are not measured
        for accumulator in accumulators:
            accumulator.add(tile)
    results = {name: x for each in accumulators for name, x in each.result().items()}
    return Measures(
        place.name,
        place.heads,
        place.T,
        {n: x for n, x in results.items() if x.ndim == 1},
        {n: x for n, x in results.items() if x.ndim == 2},
    )


class Sampled(NamedTuple):
    """A metric that needs whole rows of the pattern, computed from a sample of the rows.

    Args:
        values: the metric: `[h]` with one number per head, or `[h, h]` for pairs of heads.
        rows: the number of rows that were sampled.
    """

    values: Tensor
    rows: int


def keys_for(
    place: Place, share: float = 0.9, *, batch: int = 0, rows: int = SAMPLED_ROWS
) -> Sampled:
    """Count how many keys are needed for a given share of a row's weight.

    The count of a row is the smallest n for which its n largest p_ij sum to at least
    share * sum_j p_ij. The result is the mean over evenly spaced rows.

    Args:
        place: a place of a recording.
        share: share of the weight of a row, above 0 and at most 1.
        batch: row of the batch.
        rows: number of rows to sample; rows that see no key are left out.

    Returns:
        The mean count of each head, `[h]`, and the number of rows.

    Raises:
        ArgumentError: `share` is out of range, or `rows` is less than 1.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> few, many = (keys_for(recording[0], share).values for share in (0.5, 0.99))
    >>> bool((few <= many).all())
    True
    """
    if not 0 < share <= 1:
        raise ArgumentError(f"share is {share}; it must be above 0 and at most 1", argument="share")
    counts, n = torch.zeros(len(place.heads), dtype=torch.float64), 0
    for row in _evenly_spread_rows(place, rows, batch):
        p = place.block(row, slice(0, place.N), batch=slice(batch, batch + 1)).weights[0, :, 0]
        total = p.sum(1, keepdim=True)
        if not bool((total > 0).all()):
            continue
        mass = p.sort(1, descending=True).values.cumsum(1)
        counts += (mass < share * total - 1e-12).sum(1) + 1
        n += 1
    return Sampled(counts / max(n, 1), n)


def redundancy(place: Place, *, batch: int = 0, rows: int = SAMPLED_ROWS) -> Sampled:
    """Compute how different the rows of each pair of heads are: the Jensen-Shannon divergence in
    bits, from 0 (equal) to 1.

    JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2, mean over evenly spaced rows; each row is divided
    by its sum, which leaves out a sink

    Args:
        place: a place of a recording.
        batch: row of the batch.
        rows: number of rows to sample.

    Returns:
        The divergences, `[h, h]`, and the number of rows.

    Raises:
        ArgumentError: `rows` is less than 1.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> divergences = redundancy(recording[0])
    >>> divergences.values.diagonal().abs().max() < 1e-9, divergences.rows
    (tensor(True), 6)

    Source: Lin 1991, "Divergence measures based on the Shannon entropy", equation 4.1.
    """
    h = len(place.heads)
    divergences, n = torch.zeros(h, h, dtype=torch.float64), 0
    for row in _evenly_spread_rows(place, rows, batch):
        p = place.block(row, slice(0, place.N), batch=slice(batch, batch + 1)).weights[0, :, 0]
        total = p.sum(1, keepdim=True)
        if not bool((total > 0).all()):
            continue
        p = p / total
        entropies = torch.special.entr(p).sum(1)
        for i in range(h):
            entropy_of_mean = torch.special.entr((p[i] + p) / 2).sum(1)
            divergences[i] += entropy_of_mean - (entropies[i] + entropies) / 2
        n += 1
    return Sampled((divergences / max(n, 1) / torch.tensor(2.0).log()).clamp(min=0), n)


def retrieval_score(
    place: Place, ids: Int[Tensor, " L"], needle: slice, *, batch: int = 0
) -> Float[Tensor, " h"]:
    """Compute the share of the tokens of a passage (the needle) that a head retrieves while the
    model copies them.

    |{j in needle: j = argmax_j p_ij and id_j = id_{i+1} for a row i after the needle}| / |needle|

    Args:
        place: a place of a run that continues after its prompt; rows after the needle are used.
        ids: all token ids of the run, `[L]`.
        needle: the range of columns of the passage.
        batch: row of the batch.

    Returns:
        The share of each head, `[h]`.

    Raises:
        ArgumentError: the needle is empty, or not inside the columns.

    >>> import regard
    >>> recording = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> needle = slice(0, 2)  # "to be": the last "to" is followed by "be" again
    >>> retrieval_score(recording[0], recording.ids[0], needle).tolist()
    [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]

    Source: Wu et al. 2024 (arXiv 2404.15574), section 2, equation 1; tokens are counted by their
        position, not by their text.
    """
    start, stop, _ = needle.indices(place.N)
    if start >= stop:
        raise ArgumentError(
            f"needle is {needle}; it must contain some of the {plural(place.N, 'column')}",
            argument="needle",
        )
    retrieved = torch.zeros(len(place.heads), place.N, dtype=torch.bool)
    row = 0
    for step in place.steps:
        for own, token in enumerate(step.tokens()):
            if stop <= token < len(ids) - 1:
                row_slice = slice(row + own, row + own + 1)
                block = place.block(row_slice, slice(0, place.N), batch=slice(batch, batch + 1))
                top = block.weights[0, :, 0].argmax(1)
                right = ids[top] == ids[token + 1]
                retrieved[right.nonzero()[:, 0], top[right]] = True
        row += step.T
    return retrieved[:, start:stop].double().mean(1)


def _evenly_spread_rows(place: Place, rows: int, batch: int) -> list[slice]:
    """Return evenly spaced rows that are tokens, among them the first and the last."""
    if rows < 1:
        raise ArgumentError(f"rows is {rows}; it must be at least 1", argument="rows")
    tokens = (place.row_positions[batch] >= 0).nonzero()[:, 0].tolist()
    n = min(rows, len(tokens))
    chosen = sorted({round(i * (len(tokens) - 1) / max(1, n - 1)) for i in range(n)})
    return [slice(tokens[i], tokens[i] + 1) for i in chosen]


def head_scores(model: Model, ids: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "layers H"]]:
    """Compute five scores of every head of a model, as means over the rows of a batch.

    The names of the scores are previous_token, induction, duplicate, entropy (of a row, divided by
    ln of the number of keys that it sees: 0 to 1) and sink (the weight of the first key); `measure`
    defines them. The model runs on its own kernels; patterns are computed from their inputs.

    Args:
        model: a model.
        ids: token ids `[B, T]`; repeated random ids (`repeated_ids`) show what a head does
            independently of the words.

    Returns:
        The scores of all heads, `[layers, H]`, by the name of the score.

    Raises:
        ArgumentError: `ids` are shorter than 2, or a row repeats no token.

    >>> import regard
    >>> from regard.inspect import repeated_ids
    >>> model = regard.load("tiny")
    >>> scores = head_scores(model, repeated_ids(model.config.vocab_size, 16, batch=2))
    >>> sorted(scores)
    ['duplicate', 'entropy', 'induction', 'previous_token', 'sink']
    """
    scores: dict[str, list[Tensor]] = {name: [] for name in SCORES}
    for place in record(model, ids, keep=()).places.values():
        rows = [measure(place, row, batch=b, sinks=1).values for b, row in enumerate(ids)]
        for name in SCORES:
            if any(name not in values for values in rows):
                raise ArgumentError(
                    f"{name} cannot be computed: in ids no token occurs twice, far enough apart, "
                    "or "
                    "there is only one token; use ids with repetitions, such as repeated_ids(...)"
                )
            scores[name].append(torch.stack([values[name] for values in rows]).mean(0).float())
    return {name: torch.stack(values) for name, values in scores.items()}
