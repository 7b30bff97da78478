"""Every number of every head of a place, from one walk over its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.metrics.accumulators import ACCUMULATORS, Accumulator, MeasuredPlace
from regard.inspect.record.record_model import record
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.tiles import TILE_SIZE, walk
from regard.models.model import Model

SAMPLED_ROWS = 64
"""Rows that are looked at where a number needs whole rows; the result says how many."""


SCORES = ("previous_token", "induction", "duplicate", "entropy", "sink")


@dataclass(frozen=True, eq=False)
class Measures:
    """Numbers of the heads of a place. heads: which; rows: how many rows there are.

    values: name -> [h]. curves: offsets [h,d], received [h,N].
    """

    place: str
    heads: tuple[int, ...]
    rows: int
    values: Mapping[str, Float[Tensor, " h"]]
    curves: Mapping[str, Float[Tensor, "h n"]]

    def __getitem__(self, name: str) -> Tensor:
        """A value or a curve."""
        for kind in (self.values, self.curves):
            if name in kind:
                return kind[name]
        raise ArgumentError(
            f"{name!r} was not measured at {self.place}; measured: "
            f"{', '.join((*self.values, *self.curves))}"
        )


def measure(
    place: Place,
    ids: Int[Tensor, " N"] | None = None,
    *,
    batch: int = 0,
    sinks: int = 4,
    near: int = 32,
    padding: Tensor | None = None,
    size: int = TILE_SIZE,
) -> Measures:
    """Measure all recorded heads of a place.

    n_i: the keys that row i sees. Means are over rows; rows that the definition does not concern
        are left out.

        entropy          H_i / ln n_i, H_i = -sum_j p_ij ln p_ij, a sink being one key more; 0 to 1
        effective_keys   exp(H_i)
        max_logit        max_ij s_ij
        sink             sum of p_ij over the keys at positions below `sinks`, in rows behind them
        learned_sink     P_sink, the share of a sink logit
        previous_token   p_{i,i-1}
        duplicate        sum of p_ij over earlier copies j of token i
        induction        sum of p_ij over keys j behind earlier copies of token i
        distance         sum_j p_ij (p_i - p_j), in positions
        local            sum of p_ij over |p_i - p_j| < near
        future, empty, padding   all mass on later positions, on slots at -1, on padded columns
        missing          the largest |1 - sum_j p_ij - P_sink|

    curves: offsets, D(d) = mean_i p_{i,i-d}, and received, sum_i p_ij of each column. What the
        tokens do not allow (no token twice: no induction) is not among the values.

    Args:
        place: from a recording.
        ids: tokens [N] of the columns, for copies; rows are the same tokens. None: no copies.
        batch: which row of the batch.
        sinks, near: above.
        padding: bool [N], columns that nobody should see.
        size: of the tiles.

    Raises:
        ArgumentError: ids or padding are not as many as the columns, or there is no such row of the
            batch.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> measures = measure(found[0], found.ids[0])
    >>> measures.values["future"].tolist(), bool((measures.values["missing"] < 1e-5).all())
    ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], True)
    """
    for name, given in (("ids", ids), ("padding", padding)):
        if given is not None and given.shape != (place.N,):
            raise ArgumentError(
                f"{name} are {tuple(given.shape)}; {place.name} has {place.N} columns, one for each"
            )
    if not 0 <= batch < place.B:
        raise ArgumentError(f"batch is {batch}; {place.name} has rows 0 to {place.B - 1}")
    scene = MeasuredPlace(place, ids, batch, sinks, near, padding)
    accumulators: list[Accumulator] = [make(scene) for make in ACCUMULATORS]
    for tile in walk(place, size, batch=batch):
        tile = tile.only(scene.rows >= 0)  # padding that asks is nobody
        for accumulator in accumulators:
            accumulator.add(tile)
    found = {name: x for each in accumulators for name, x in each.result().items()}
    return Measures(
        place.name,
        place.heads,
        place.T,
        {n: x for n, x in found.items() if x.ndim == 1},
        {n: x for n, x in found.items() if x.ndim == 2},
    )


class Sampled(NamedTuple):
    """A number of heads that needs whole rows, and in how many rows it was looked for."""

    values: Tensor
    rows: int


def keys_for(
    place: Place, share: float = 0.9, *, batch: int = 0, rows: int = SAMPLED_ROWS
) -> Sampled:
    """How many keys hold so much of a row's mass: the mean [h] over evenly spread rows that see
    any.

    min n: the n largest p_ij of a row sum to share * sum_j p_ij or more

    Raises:
        ArgumentError: share is not above 0 and at most 1, or rows is less than 1.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> few, many = (keys_for(found[0], share).values for share in (0.5, 0.99))
    >>> bool((few <= many).all())
    True
    """
    if not 0 < share <= 1:
        raise ArgumentError(f"share is {share}; it must be above 0 and at most 1")
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
    """How much heads look at other things: the Jensen-Shannon divergence [h,h] of their rows, 0
    (the same) to 1, in bits.

    JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2, mean over evenly spread rows; each row over its
    sum, without a sink

    Raises:
        ArgumentError: rows is less than 1.

    >>> import regard
    >>> found = redundancy(regard.inspect.record(regard.load("tiny"), "to be or not to be")[0])
    >>> found.values.diagonal().abs().max() < 1e-9, found.rows
    (tensor(True), 6)

    Source: Lin 1991, "Divergence measures based on the Shannon entropy", equation 4.1.
    """
    h = len(place.heads)
    apart, n = torch.zeros(h, h, dtype=torch.float64), 0
    for row in _evenly_spread_rows(place, rows, batch):
        p = place.block(row, slice(0, place.N), batch=slice(batch, batch + 1)).weights[0, :, 0]
        total = p.sum(1, keepdim=True)
        if not bool((total > 0).all()):
            continue
        p = p / total
        own = torch.special.entr(p).sum(1)
        for i in range(h):
            both = torch.special.entr((p[i] + p) / 2).sum(1)
            apart[i] += both - (own[i] + own) / 2
        n += 1
    return Sampled((apart / max(n, 1) / torch.tensor(2.0).log()).clamp(min=0), n)


def retrieval_score(
    place: Place, ids: Int[Tensor, " L"], needle: slice, *, batch: int = 0
) -> Float[Tensor, " h"]:
    """The share of a needle's tokens that a head looks at most while the model writes them out.

    |{j in needle: j = argmax_j p_ij and id_j = id_{i+1} for some written token i + 1}| / |needle|

    Args:
        place: of a run that goes on behind its prompt: rows behind the needle are looked at.
        ids: all tokens of the run [L].
        needle: columns.
        batch: which row of the batch.

    Raises:
        ArgumentError: the needle is empty, or not inside the columns.

    Source: Wu et al. 2024 (arXiv 2404.15574), section 2, equation 1: tokens are counted by their
    place, not by their word.
    """
    start, stop, _ = needle.indices(place.N)
    if start >= stop:
        raise ArgumentError(f"needle is {needle}; it must hold some of the {place.N} columns")
    hit = torch.zeros(len(place.heads), place.N, dtype=torch.bool)
    row = 0
    for step in place.steps:
        for own, token in enumerate(step.tokens()):
            if stop <= token < len(ids) - 1:
                at = slice(row + own, row + own + 1)
                block = place.block(at, slice(0, place.N), batch=slice(batch, batch + 1))
                top = block.weights[0, :, 0].argmax(1)
                right = ids[top] == ids[token + 1]
                hit[right.nonzero()[:, 0], top[right]] = True
        row += step.T
    return hit[:, start:stop].double().mean(1)


def _evenly_spread_rows(place: Place, rows: int, batch: int) -> list[slice]:
    """Evenly spread rows that are tokens, the first and the last among them."""
    if rows < 1:
        raise ArgumentError(f"rows is {rows}; it must be at least 1")
    tokens = (place.row_positions[batch] >= 0).nonzero()[:, 0].tolist()
    n = min(rows, len(tokens))
    chosen = sorted({round(i * (len(tokens) - 1) / max(1, n - 1)) for i in range(n)})
    return [slice(tokens[i], tokens[i] + 1) for i in chosen]


def head_scores(model: Model, ids: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "layers H"]]:
    """Every score of every head, as means over the rows of a batch.

    Keys: previous_token, induction, duplicate, entropy (of a row, over ln of the keys that it may
        see: 0 to 1), sink (the share of the first key). The model runs on its own kernels; patterns
        are computed from what they were given.

    Args:
        model: a model.
        ids: token ids; random ids repeated (`repeated_ids`) show what a head does whatever the
            words mean.

    Raises:
        ArgumentError: ids are shorter than 2, or a row repeats no token.

    >>> import regard
    >>> from regard.inspect import repeated_ids
    >>> model = regard.load("tiny")
    >>> scores = head_scores(model, repeated_ids(model.config.vocab_size, 16, batch=2))
    >>> sorted(scores)
    ['duplicate', 'entropy', 'induction', 'previous_token', 'sink']
    """
    found: dict[str, list[Tensor]] = {name: [] for name in SCORES}
    for place in record(model, ids, keep=()).places.values():
        rows = [measure(place, row, batch=b, sinks=1).values for b, row in enumerate(ids)]
        for name in SCORES:
            if any(name not in values for values in rows):
                raise ArgumentError(
                    f"{name}: no token occurs twice, far enough apart, in ids, or there is one "
                    "token; "
                    "give a text that repeats itself, such as repeated_ids(...)"
                )
            found[name].append(torch.stack([values[name] for values in rows]).mean(0).float())
    return {name: torch.stack(values) for name, values in found.items()}
