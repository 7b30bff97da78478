"""Metrics of every recorded head of a place, from one pass over its tiles; and over a corpus, one
text at a time.
"""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.files.atomic_write import write_user_file
from regard.inspect.interventions.effect_table import EffectTable, head_table
from regard.inspect.metrics.head_metrics import ACCUMULATORS, Accumulator, MeasuredPlace
from regard.inspect.record.record_model import record
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recording import Recording
from regard.inspect.record.tiles import TILE_SIZE, Tile, iterate_tiles
from regard.language import Phrase, counted
from regard.models.model import Model
from regard.units import plural
from regard.untrusted_text import tuple_repr

if TYPE_CHECKING:
    from regard.inspect.model_run import AnyModel


LARGEST = ("max_logit", "missing")
"""Metrics that are a maximum, so that the largest number of all texts counts."""


@dataclass(frozen=True, eq=False)
class CorpusMeasures:
    """Metrics of every head over a corpus.

    Args:
        tokens: number of tokens, over all texts.
        places: names of the places, one per layer.
        values: by the name of a metric the mean over texts, `[layers, H]`, each text counting once
            (the largest number for `max_logit` and `missing`); NaN where no text defines it.
        deviations: the standard deviation over texts, of the same shape; NaN for one text.
        counts: the number of texts that define the metric, by its name.
    """

    texts: int
    tokens: int
    places: tuple[str, ...]
    values: Mapping[str, Float[Tensor, "layers H"]]
    deviations: Mapping[str, Float[Tensor, "layers H"]]
    counts: Mapping[str, int]

    def __repr__(self) -> str:
        read = f"{plural(self.texts, 'text')} of {plural(self.tokens, 'token')}"
        return f"CorpusMeasures({len(self.values)} metrics, {read})"

    def _repr_html_(self) -> str:
        """Return the metrics of every head as an HTML table, a line for each head."""
        names = ["layer", "head", *self.values]
        lines = [names, *([each.get(name, "") for name in names] for each in self.records())]
        texts = ([f"{x:.4g}" if isinstance(x, float) else str(x) for x in line] for line in lines)
        rows = ("".join(f"<td>{html.escape(x)}</td>" for x in line) for line in texts)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def __getitem__(self, name: str) -> Tensor:
        """Return a metric `[layers, H]` by its name."""
        if name not in self.values:
            raise ArgumentError(
                f"{name!r} was not measured; measured: {', '.join(self.values)}"
                f"{suggest(name, self.values)}",
                argument="metric",
                value=name,
            )
        return self.values[name]

    def table(self, name: str) -> EffectTable:
        """Return a metric as a table of layers and heads, which draws itself as a map.

        Args:
            name: the metric.

        Returns:
            The table.

        Raises:
            ArgumentError: the metric was not measured.
        """
        return head_table(
            Phrase(
                "{name} of every head, over {texts} of {tokens}",
                name=name,
                texts=counted(self.texts, "text"),
                tokens=counted(self.tokens, "token"),
            ),
            name,
            dict(zip(self.places, self[name].tolist(), strict=True)),
            notes=("behaviour on these texts; another corpus may show another one",),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return one mapping per head, with its layer, its index and all metrics.

        Returns:
            The heads, layer by layer; metrics that no text defines are left out.
        """
        H = next(iter(self.values.values())).shape[1]
        return [
            {
                "layer": place,
                "head": h,
                **{n: float(x[i, h]) for n, x in self.values.items() if not x[i, h].isnan()},
            }
            for i, place in enumerate(self.places)
            for h in range(H)
        ]

    def to(self, path: str | Path) -> Path:
        """Write one line per head to a .csv file.

        Args:
            path: the file.

        Returns:
            The path.

        Raises:
            ArgumentError: the name does not end in .csv.
            FileError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() != ".csv":
            raise ArgumentError(f"{path}: the name must end in .csv; table(metric) draws pictures")
        with write_user_file(path) as place, place.open("w", encoding="utf-8") as stream:
            names = ["layer", "head", *self.values]
            writer = csv.DictWriter(stream, names, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(self.records())
        return path


class _Running:
    """The mean, the variance and the maximum of a stream of tensors (Welford's method)."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros_like(like), torch.zeros_like(like)
        self.largest = torch.full_like(like, -torch.inf)

    def add(self, x: Tensor) -> None:
        self.count += 1
        before = x - self.mean
        self.mean = self.mean + before / self.count
        self.squares = self.squares + before * (x - self.mean)
        self.largest = torch.maximum(self.largest, x)

    def deviation(self) -> Tensor:
        """Return the standard deviation with n - 1."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self.squares / (self.count - 1)).sqrt()


def measure_corpus(
    record_text: Callable[[Any], Recording],
    measure_place: Callable[[Place, Tensor | None], Measures],
    corpus: Iterable[Any],
) -> CorpusMeasures:
    """Accumulate the metrics of all heads over texts, of which one is in memory at a time."""
    places: tuple[str, ...] = ()
    running: dict[tuple[str, int], _Running] = {}
    names: dict[str, None] = {}
    texts = tokens = 0
    for text in corpus:
        recording = record_text(text)
        if texts and tuple(recording.places) != places:
            raise ArgumentError(
                f"text {texts} reached the places {', '.join(recording.places)}, and text 0 "
                f"{', '.join(places)}; measure texts of one kind"
            )
        places = tuple(recording.places)
        texts += 1
        tokens += next(iter(recording.places.values())).T
        for i, place in enumerate(recording.places.values()):
            ids = None if recording.ids is None else recording.ids[0]
            measures = measure_place(
                place, ids if ids is not None and len(ids) == place.N else None
            )
            for name, x in measures.values.items():
                names[name] = None
                running.setdefault((name, i), _Running(x)).add(x)
    if not texts:
        raise ArgumentError("the corpus is empty; give at least one text")
    H = max(each.mean.shape[0] for each in running.values())
    values, deviations = {}, {}
    for name in names:
        rows = [running.get((name, i)) for i in range(len(places))]
        values[name] = _stacked([_result(name, each) for each in rows], H)
        deviations[name] = _stacked([None if r is None else r.deviation() for r in rows], H)
    counts = {n: max(r.count for (m, _), r in running.items() if m == n) for n in names}
    return CorpusMeasures(texts, tokens, places, values, deviations, counts)


def _result(name: str, running: _Running | None) -> Tensor | None:
    if running is None:
        return None
    return running.largest if name in LARGEST else running.mean


def _stacked(rows: list[Tensor | None], H: int) -> Tensor:
    """Stack the numbers of layers, with NaN for heads that a layer lacks."""
    result = np.full((len(rows), H), np.nan)
    for i, row in enumerate(rows):
        if row is not None:
            result[i, : len(row)] = row.double().numpy()
    return torch.from_numpy(result)


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
        values: by the name of a metric, one number per head, `[h]`.
        curves: by the name of a curve, one curve per head: "offsets" `[h, d]`, "received" `[h, N]`.
    """

    place: str
    heads: tuple[int, ...]
    rows: int
    values: Mapping[str, Float[Tensor, " h"]]
    curves: Mapping[str, Float[Tensor, "h n"]]

    def __repr__(self) -> str:
        names = ", ".join((*self.values, *self.curves))
        return f"Measures({self.place}, {plural(len(self.heads), 'head')}: {names})"

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
        each = partial(measure, sinks=sinks, local_distance=local_distance, size=size, dtype=dtype)
        return measure_corpus(lambda text: record(model, text, keep=()), each, ids)
    assert ids is None or isinstance(ids, Tensor), "an iterable is for a model"
    for name, values in (("ids", ids), ("padding", padding)):
        if values is not None and values.shape != (place.N,):
            raise ArgumentError(
                f"{name} are {tuple(values.shape)}; {place.name} has "
                f"{plural(place.N, 'column')}, and "
                "there must be one entry for each"
            )
    place.check_batch(batch)
    measured = MeasuredPlace(place, ids, batch, sinks, local_distance, padding)
    accumulators: list[Accumulator] = [make(measured) for make in ACCUMULATORS]
    for tile in iterate_tiles(place, size, batch=batch, dtype=dtype):
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
    """

    values: Tensor
    rows: int

    def __repr__(self) -> str:
        return tuple_repr(self)


def keys_for(
    place: Place, share: float = 0.9, *, batch: int = 0, rows: int = SAMPLED_ROWS
) -> Sampled:
    """Count how many keys are needed for a given share of a row's weight.

    The count of a row is the smallest n for which its n largest p_ij sum to at least
    share * sum_j p_ij. The result is the mean over evenly spaced rows.

    Args:
        share: share of the weight of a row, above 0 and at most 1.
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
    for p, total in _sampled_rows(place, rows, batch):
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
    for p, total in _sampled_rows(place, rows, batch):
        p = p / total
        for i in range(h):
            divergences[i] += _divergence(p[i], p)
        n += 1
    return Sampled((divergences / max(n, 1) / torch.tensor(2.0).log()).clamp(min=0), n)


def compare(a: Recording, b: Recording, *, batch: int = 0) -> EffectTable:
    """Compare the patterns of two runs: of another text with as many tokens, another model,
    checkpoint, dtype or kernel.

        distance(head) = mean over rows of JS(p_i, p'_i), in bits: 0 if equal, 1 if disjoint

    Each row is divided by its sum, which leaves out a sink. `regard.inspect.report(a, b=b)` shows
    both on the page.

    Args:
        batch: row of the batch, in both.

    Returns:
        A table of the places and heads that both recordings have.

    Raises:
        ArgumentError: no place is in both, or a place has other numbers of queries or keys.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> a, b = (regard.inspect.record(model, text) for text in ("to be or", "to do or"))
    >>> float(compare(a, a).values.max()), bool(compare(a, b).values.max() > 0.01)
    (0.0, True)
    """
    shared = [name for name in a.places if name in b.places]
    if not shared:
        raise ArgumentError(
            f"the recordings have no place in common: {', '.join(a.places)} and "
            f"{', '.join(b.places)}"
        )
    heads = sorted({h for name in shared for h in a[name].heads if h in b[name].heads})
    values = np.full((len(shared), len(heads)), np.nan)
    for i, name in enumerate(shared):
        sizes = [(x[name].T, x[name].N) for x in (a, b)]
        if sizes[0] != sizes[1]:
            raise ArgumentError(
                f"{name} has the size {sizes[0]} (queries, keys) in one recording and {sizes[1]} "
                "in the other; compare runs with equally many tokens, or look at both on the page: "
                "regard.inspect.report(a, b=b)"
            )
        for j, head in enumerate(heads):
            if head in a[name].heads and head in b[name].heads:
                values[i, j] = _distance(a, b, name, head, batch)
    return EffectTable(
        "two recordings, head by head",
        "mean Jensen-Shannon divergence of rows, in bits",
        values,
        "layer",
        "head",
        tuple(shared),
        tuple(map(str, heads)),
    )


def _distance(a: Recording, b: Recording, name: str, head: int, batch: int) -> float:
    """Return the mean divergence of the rows that see a key in both recordings."""
    total, count = 0.0, 0
    for start in range(0, a[name].T, 256):
        rows = slice(start, start + 256)
        p, r = (x.weights(name, head, rows, batch=batch) for x in (a, b))
        visible = (p.sum(1) > 0) & (r.sum(1) > 0)
        if bool(visible.any()):
            p, r = (x[visible] / x[visible].sum(1, keepdim=True) for x in (p, r))
            divergences = _divergence(p, r).clamp(min=0) / math.log(2)
            total, count = total + float(divergences.sum()), count + len(divergences)
    return total / count if count else float("nan")


def _divergence(p: Tensor, r: Tensor) -> Tensor:
    """Return JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2 of each row, in nats."""
    entropies = [torch.special.entr(x).sum(-1) for x in ((p + r) / 2, p, r)]
    nats: Tensor = entropies[0] - (entropies[1] + entropies[2]) / 2
    return nats


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


def _sampled_rows(place: Place, rows: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Generate weights `[h, N]`, and their sums, of evenly spaced rows that are tokens, among them
    the first and the last; rows that see no key are left out.
    """
    if rows < 1:
        raise ArgumentError(f"rows is {rows}; it must be at least 1", argument="rows")
    tokens = (place.row_positions[batch] >= 0).nonzero()[:, 0].tolist()
    n = min(rows, len(tokens))
    chosen = sorted({round(i * (len(tokens) - 1) / max(1, n - 1)) for i in range(n)})
    for i in chosen:
        row = slice(tokens[i], tokens[i] + 1)
        p = place.block(row, slice(0, place.N), batch=slice(batch, batch + 1)).weights[0, :, 0]
        total = p.sum(1, keepdim=True)
        if bool((total > 0).all()):
            yield p, total


def head_scores(model: Model, ids: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "layers H"]]:
    """Compute five scores of every head of a model, as means over the rows of a batch.

    The names of the scores are previous_token, induction, duplicate, entropy (of a row, divided by
    ln of the number of keys that it sees: 0 to 1) and sink (the weight of the first key); `measure`
    defines them. The model runs on its own kernels; patterns are computed from their inputs.

    Args:
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
