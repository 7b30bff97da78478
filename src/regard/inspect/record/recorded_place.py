"""What attention computed at one place of a model, call by call.

A place is the dotted module name at which attention is called, such as `layers.3` or
`decoder.layers.0.cross`. `Place` holds its calls in order. Each call is a `RecordedStep`: its
queries, its mask and bias, and the log-sum-exp (lse) of the kernel. Keys and values that several
calls read are stored once, in a `KeyValuePool`. Any block of scores and weights is computed again
from these: p_ij = exp(s_ij - lse_i).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.scores import ScoreRule
from regard.span import Positions, as_tensor, slice_positions
from regard.units import plural

ALL = slice(None)


class ColumnRanges(NamedTuple):
    """The ranges of columns that queries see: first columns, and ends, each `[h or 1, t, n]`."""

    starts: Tensor
    stops: Tensor


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One call of attention: t queries against s keys, and the results of the kernel.

    Args:
        q: queries of the recorded heads as the kernel received them, `[B, h, t, D]`.
        lse: natural log-sum-exp of the scores, without the sink, `[B, h, t]`.
        out: output of the kernel, `[B, h, t, E]`, or None if it was not kept.
        columns: column of the pattern for each key, `[s]`.
        q_positions: positions of all queries of the call, including those that were not kept.
        k_positions: positions of the keys; -1 is an empty slot in that row of the batch.
        scale: factor on q . k.
        softcap: cap c of s = c tanh(s / c), or None.
        sink: sink logit of each recorded head, `[h]`, or None.
        first: index of the first kept query within the call.
        token: index of the first kept query among all queries that reached the place.
        pool_index: index of each key in its pool, `[s]`; None if it equals `columns`.
        scores: scores `[B, h, t, s]` that an edit put in place of the computed ones, or None.
        pattern: weights `[B, h, t, s]` that an edit put in place of the computed ones, or None.
        score: the score rule of the whole call, or None. With a rule, `scores` and `pattern` are
            those that were computed, because they do not follow from q, k and the lse.
    """

    q: Tensor
    lse: Tensor
    out: Tensor | None
    columns: Tensor
    q_positions: Positions
    k_positions: Positions
    mask: Mask
    bias: Bias | None
    scale: float
    softcap: float | None
    sink: Tensor | None
    kernel: str
    first: int = 0
    token: int = 0
    dropout: float = 0.0
    pool: int = 0
    pool_index: Tensor | None = None
    scores: Tensor | None = None
    pattern: Tensor | None = None
    score: ScoreRule | None = None

    def __repr__(self) -> str:
        queries, keys = plural(self.T, "query"), plural(len(self.columns), "key")
        return f"RecordedStep({queries} x {keys}, {self.kernel})"

    @property
    def edited(self) -> tuple[str, ...]:
        """Return which of "scores" and "pattern" an edit or a score rule gave."""
        both = {"scores": self.scores, "pattern": self.pattern}
        return tuple(name for name, x in both.items() if x is not None)

    @property
    def T(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Return the number of queries that were kept."""
        return self.q.shape[2]

    @property
    def denominator(self) -> Tensor:
        """Return ln of the softmax denominator, sink included, `[B, h, t]` in fp64."""
        lse = self.lse.double()
        return lse if self.sink is None else torch.logaddexp(lse, self.sink.double()[:, None])

    def row_positions(self, batch: int = 0) -> Tensor:
        """Return the positions `[t]` of the kept queries in one row of the batch."""
        positions = slice_positions(self.q_positions, slice(self.first, self.first + self.T))
        return own_or_shared(as_tensor(positions), batch).cpu()

    def key_positions(self, batch: int = 0) -> Tensor:
        """Return the positions `[s]` of the keys in one row of the batch."""
        return own_or_shared(as_tensor(self.k_positions), batch).cpu()

    def call_rows(self, own: slice) -> slice:
        """Return rows of this step as rows of its call, which may have had more of them."""
        return slice(own.start + self.first, own.stop + self.first)

    def allowed(self, mask: Mask, own: slice, keys: slice, batch: int) -> Tensor:
        """Return which keys a mask allows some rows, bool `[h or 1, t, s]`."""
        block = mask.block(self.q_positions, self.k_positions, self.call_rows(own), keys)
        return own_or_shared(block, batch).cpu()

    def tokens(self) -> range:
        """Return the indices of the kept queries among all queries that reached the place."""
        return range(self.token, self.token + self.T)

    @cached_property
    def first_column(self) -> int | None:
        """Return the first column if the keys are consecutive columns in order, else None."""
        n, start = len(self.columns), int(self.columns[0]) if len(self.columns) else 0
        whole = torch.equal(self.columns, torch.arange(start, start + n))
        return start if whole else None

    def slots(self, columns: slice) -> slice | Tensor:
        """Return the indices of the keys whose columns lie in a range of columns."""
        if self.first_column is not None:
            n = len(self.columns)
            edges = (min(max(x - self.first_column, 0), n) for x in (columns.start, columns.stop))
            return slice(*edges)
        inside = (self.columns >= columns.start) & (self.columns < columns.stop)
        result: slice | Tensor = inside.nonzero()[:, 0]
        return result

    def column_ranges(self, batch: int = 0) -> ColumnRanges | None:
        """Return the ranges of columns that the kept queries see, by a closed form of the mask.

        It needs such a form, and keys whose columns and positions are consecutive; else None.
        """
        keys = self.key_positions(batch)
        first = int(keys[0]) if len(keys) else 0
        if self.first_column is None or first < 0:
            return None
        if not torch.equal(keys, torch.arange(first, first + len(keys))):
            return None
        visible = self.mask.intervals(self.row_positions(batch)[None])
        if visible is None or visible.starts.shape[0] > 1:
            return None
        starts, stops = (
            ((x[0].cpu() - first).clamp(0, len(keys)) + self.first_column).expand(-1, self.T, -1)
            for x in (visible.starts, visible.stops)
        )
        return ColumnRanges(starts, stops)

    def pool_slots(self, slots: slice | Tensor = ALL) -> slice | Tensor:
        """Return the indices in the pool of some keys of this step."""
        if self.pool_index is not None:
            return self.pool_index[slots]
        if self.first_column is None or isinstance(slots, Tensor):
            return self.columns[slots]
        start, stop, _ = slots.indices(len(self.columns))
        return slice(self.first_column + start, self.first_column + stop)


@dataclass(frozen=True, eq=False)
class KeyValuePool:
    """Keys and values of a place, each stored once; several steps may read the same ones.

    Args:
        k: keys, `[B, g, n, D]`.
        v: values, `[B, g, n, E]`, or None if they were not kept.
        columns: column of the pattern for each key, `[n]`.
        groups: indices of the g key/value heads that are stored, out of G.
        key_kind: what the keys are: "keys"; "latents" for the latents of MLA with the rotary key;
            or "keys from a quantized cache" for values decoded from it.
    """

    k: Tensor
    v: Tensor | None
    columns: Tensor
    groups: tuple[int, ...]
    G: int
    key_kind: str = "keys"

    def __repr__(self) -> str:
        values = "" if self.v is not None else ", values not kept"
        heads = plural(self.G, "head")
        return f"KeyValuePool({len(self.columns)} {self.key_kind}, {heads}{values})"

    def group_index(self, head: int, H: int) -> int:
        """Return the index, among the stored groups, of the key/value head h // (H/G)."""
        return self.groups.index(head // (H // self.G))


class PatternBlock(NamedTuple):
    """A block of scores (-inf where masked or absent) and weights (0 there)."""

    scores: Tensor
    weights: Tensor


class ScoreInputs(NamedTuple):
    """The terms q_i . k_j, bias and mask of scores, each broadcastable to `[B, h, t, n]`."""

    dot: Tensor
    bias: Tensor | None
    visible: Tensor

    def scores(self, scale: float, softcap: float | None) -> Tensor:
        """Return softcap(scale q_i . k_j) + bias_ij, with -inf where masked."""
        s = self.dot * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s if self.bias is None else s + self.bias
        return s if bool(self.visible.all()) else s.masked_fill(~self.visible, -math.inf)


@dataclass(frozen=True, eq=False)
class Place:
    """Everything that attention computed at one place of a model.

    A place is the dotted module name at which attention is called. Rows of the pattern are the
    recorded queries of all steps, in order; columns are tokens, in the order in which their keys
    first appeared.

    Args:
        name: the dotted name, such as `layers.3`.
        steps: the recorded calls, in order.
        pools: the keys and values that the steps read.
        N: number of columns of the pattern, one per token.
    """

    name: str
    steps: tuple[RecordedStep, ...]
    pools: tuple[KeyValuePool, ...]
    H: int
    heads: tuple[int, ...]
    N: int

    def __repr__(self) -> str:
        heads = f"{plural(self.H, 'head')} over {self.G}"
        sizes = f"{heads}, {plural(self.T, 'query')} x {plural(self.N, 'key')}"
        return f"Place({self.name}, {sizes}, {plural(len(self.steps), 'step')})"

    @property
    def B(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Return the number of rows of the batch."""
        return self.steps[0].q.shape[0]

    @property
    def G(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Return the number of key/value heads of the first call."""
        return self.pools[0].G

    @property
    def key_kind(self) -> str:
        """Return what the keys are, in words, such as "keys" or "keys and latents"."""
        return " and ".join(dict.fromkeys(pool.key_kind for pool in self.pools))

    @property
    def has_one_key_per_column(self) -> bool:
        """Return whether each column has one key that all steps read, so that `k` and `v` exist."""
        return len(self.pools) == 1 and len(self.pools[0].columns) == self.N

    @property
    def k(self) -> Tensor:
        """Return the keys in the order of the columns, `[B, g, N, D]`.

        Raises:
            ArgumentError: a column has several keys; see `keys`.
        """
        return self._single_pool().k

    @property
    def v(self) -> Tensor | None:
        """Return the values in the order of the columns, `[B, g, N, E]`, or None if they were not
        kept.

        Raises:
            ArgumentError: a column has several values; see `values`.
        """
        return self._single_pool().v

    def keys(self, step: RecordedStep) -> Tensor:
        """Return the keys that a step read, in the order of its `columns`.

        Args:
            step: a step of this place.

        Returns:
            Keys, `[B, g, s, D]`.
        """
        return self.pools[step.pool].k[:, :, step.pool_slots()]

    def values(self, step: RecordedStep) -> Tensor | None:
        """Return the values that a step read, in the order of its `columns`.

        Args:
            step: a step of this place.

        Returns:
            Values, `[B, g, s, E]`, or None if they were not kept.
        """
        v = self.pools[step.pool].v
        return None if v is None else v[:, :, step.pool_slots()]

    def groups_read(self, step: RecordedStep) -> list[int]:
        """Return the index of the key/value head that each recorded head of a step reads.

        Args:
            step: a step of this place.

        Returns:
            One index for each head of `heads`.
        """
        return [self.pools[step.pool].group_index(head, self.H) for head in self.heads]

    @cached_property
    def T(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Return the number of rows of the pattern: the queries of all steps."""
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for step in self.steps:
            starts.append(starts[-1] + step.T)
        return starts

    @cached_property
    def tokens(self) -> list[int]:
        """Return the index of each row among all queries that reached the place, `[T]`."""
        return [i for step in self.steps for i in step.tokens()]

    def first_row(self, number: int) -> int:
        """Return the first row of a step.

        Args:
            number: index of the step.

        Returns:
            The row of the pattern at which the step begins.
        """
        return self._starts[number]

    def split_rows(self, rows: slice) -> Iterator[tuple[RecordedStep, slice, slice]]:
        """Split a range of rows by the steps that they belong to.

        Args:
            rows: a range of rows of the pattern.

        Returns:
            An iterator of (step, range of rows of the step, range of rows relative to
            `rows.start`).
        """
        start, stop = rows.start, rows.stop
        for n in range(max(bisect_right(self._starts, start) - 1, 0), len(self.steps)):
            step, first = self.steps[n], self._starts[n]
            if first >= stop:
                return
            a, b = max(start, first), min(stop, first + step.T)
            if a < b:
                yield step, slice(a - first, b - first), slice(a - start, b - start)

    def head_index(self, head: int) -> int:
        """Return the index of a query head among the recorded ones.

        Args:
            head: number of a query head of the model.

        Returns:
            Its index in the head dimension of the recorded tensors.

        Raises:
            ArgumentError: the head was not recorded.
        """
        if head not in self.heads:
            raise ArgumentError(
                f"head {head} of {self.name} was not recorded; recorded heads: "
                f"{', '.join(map(str, self.heads))} of {self.H}"
            )
        return self.heads.index(head)

    def check_batch(self, batch: int) -> None:
        """Refuse a row of the batch that the place does not have.

        Args:
            batch: index of the row.

        Raises:
            ArgumentError: there is no such row.
        """
        if not 0 <= batch < self.B:
            raise ArgumentError(
                f"batch is {batch}; {self.name} has batch rows 0 to {self.B - 1}", argument="batch"
            )

    def block(
        self,
        rows: slice,
        columns: slice,
        heads: slice = ALL,
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> PatternBlock:
        """Compute the exact scores and weights of a block of rows and columns.

        Args:
            heads: a range of query heads of the model; by default all recorded heads.

        Returns:
            Scores and weights, each `[batch, heads, rows, columns]`.

        Raises:
            ArgumentError: a head was not recorded.
        """
        chosen = self.heads if heads == ALL else tuple(range(self.H)[heads])
        head_indices = [self.head_index(head) for head in chosen]
        b = len(range(self.B)[batch])
        shape = (b, len(head_indices), rows.stop - rows.start, columns.stop - columns.start)
        parts = list(self.split_rows(rows))
        if len(parts) == 1 and parts[0][1].stop - parts[0][1].start == shape[2]:
            step, own, _ = parts[0]  # one call with all these keys in order: nothing to arrange
            slots = step.slots(columns)
            if isinstance(slots, slice) and slots.stop - slots.start == shape[3]:
                return self.step_block(step, own, slots, chosen, batch=batch, dtype=dtype)
        result = PatternBlock(*(torch.full(shape, fill, dtype=dtype) for fill in (-math.inf, 0.0)))
        for step, own, target_rows in parts:
            slots = step.slots(columns)
            if (slots.stop - slots.start if isinstance(slots, slice) else len(slots)) < 1:
                continue
            step_block = self.step_block(step, own, slots, chosen, batch=batch, dtype=dtype)
            target_columns = step.columns[slots] - columns.start
            result.scores[:, :, target_rows].index_copy_(3, target_columns, step_block.scores)
            result.weights[:, :, target_rows].index_copy_(3, target_columns, step_block.weights)
        return result

    def step_block(
        self,
        step: RecordedStep,
        own: slice,
        slots: slice | Tensor,
        heads: tuple[int, ...],
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> PatternBlock:
        """Compute scores and weights of some rows of a step with some of its keys, in the order of
        the keys.

        They are computed from q, k and the lse. Where an edit replaced scores or weights, the
        replacements are returned. A masked key has weight 0 even if an edit gave it weight, because
        the kernel leaves it out as well.

        Args:
            step: a step of this place.

        Returns:
            Scores and weights, each `[batch, heads, rows, keys]`.
        """
        inputs = self.score_inputs(step, own, slots, heads, batch=batch, dtype=dtype)
        local = [self.head_index(h) for h in heads]

        def edited(x: Tensor) -> Tensor:
            return _select_heads(x[batch, :, own], local)[..., slots].to(dtype)

        s = inputs.scores(step.scale, step.softcap)
        if step.scores is not None:
            s = edited(step.scores).masked_fill(~inputs.visible, -math.inf)
        if step.pattern is not None:
            return PatternBlock(s, edited(step.pattern).masked_fill(~inputs.visible, 0))
        lse = step.denominator[batch, :, own][:, local, :, None]
        p = torch.exp(s - lse.masked_fill(lse.isneginf(), math.inf).to(dtype))
        # exp(-inf - lse) is 0 already, except for a lse of NaN
        return PatternBlock(s, p.masked_fill(s.isneginf(), 0) if bool(lse.isnan().any()) else p)

    def score_inputs(
        self,
        step: RecordedStep,
        own: slice,
        slots: slice | Tensor,
        heads: tuple[int, ...],
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> ScoreInputs:
        """Compute the terms of the scores of some rows of a step with some of its keys.

        Args:
            dtype: dtype of the products and the bias.

        Returns:
            The products q . k, the bias, and which keys are visible.
        """
        pool, local = self.pools[step.pool], [self.head_index(head) for head in heads]
        k = pool.k[batch][:, :, step.pool_slots(slots)].to(dtype)
        q = step.q[batch, :, own].to(dtype)
        groups = [pool.group_index(head, self.H) for head in heads]
        dot = _select_heads(q, local) @ _select_heads(k, groups).mT
        keys, picked = range_of(slots)
        where = (step.q_positions, step.k_positions, step.call_rows(own), keys)

        def select(x: Tensor) -> Tensor:
            x = x[batch] if x.shape[0] > 1 else x
            x = _select_heads(x, list(heads)) if x.shape[1] > 1 else x
            return x if picked is None else x[..., picked]

        bias = None if step.bias is None else select(step.bias.block(*where, dtype=dtype))
        return ScoreInputs(dot, bias, select(step.mask.block(*where)))

    @cached_property
    def column_positions(self) -> Tensor:
        """Return the positions of the columns, `[B, N]`; -1 where a row of the batch has no
        token.
        """
        positions = torch.full((self.B, self.N), -1)
        for step in self.steps:
            step_positions = as_tensor(step.k_positions).expand(self.B, -1)
            positions[:, step.columns] = torch.maximum(positions[:, step.columns], step_positions)
        return positions

    @cached_property
    def row_positions(self) -> Tensor:
        """Return the positions of the rows, `[B, T]`; -1 for padding."""
        every = [torch.stack([step.row_positions(b) for b in range(self.B)]) for step in self.steps]
        return torch.cat(every, 1)

    def _single_pool(self) -> KeyValuePool:
        """Return the pool if each column has one key, or raise ArgumentError."""
        if self.has_one_key_per_column:
            return self.pools[0]
        raise ArgumentError(
            f"{self.name} has several keys for one token ({self.key_kind}); call place.keys(step) "
            "for the keys of one step"
        )


def own_or_shared(x: Tensor, i: int) -> Tensor:
    """Return entry i of `[n, ...]`, or the only entry, which all share."""
    return x[i if x.shape[0] > 1 else 0]


def range_of(slots: slice | Tensor) -> tuple[slice, Tensor | None]:
    """Return the smallest range with the slots, and the slots in it (None is all)."""
    if isinstance(slots, slice):
        return slots, None
    if not len(slots):
        return slice(0, 0), slots
    low = int(slots.min())
    return slice(low, int(slots.max()) + 1), slots - low


def _select_heads(x: Tensor, heads: list[int]) -> Tensor:
    """Return some heads of `[B, h, ...]`, without a copy if they are all heads in order."""
    return x if heads == list(range(x.shape[1])) else x[:, heads]
