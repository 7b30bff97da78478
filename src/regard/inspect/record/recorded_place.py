"""What attention computed at one place, call by call, and any block of its scores and weights,
computed again: p_ij = exp(s_ij - lse_i).

A `RecordedStep` is one call: its queries, its rules, and where its keys stand in a `KeyValuePool` that calls share.
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
from regard.span import Positions, as_tensor, part

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One call: t queries against s keys, which are `columns` of the pattern, and what the kernel
    answered.

    q: [B,h,t,D] of the recorded heads, as the kernel got it. lse: [B,h,t], natural, without the
        sink. out: [B,h,t,E] or None.
    columns: [s], the keys' columns; k_positions are theirs, -1 = a slot that held nothing in that
        row of the batch.
    first: how many queries of the call stand before those kept; `q_positions`, `mask` and `bias`
        are the whole call's.
    token: the number of the first kept query among all queries that came to the place.
    pool: which pool of the place its keys are in; keys: [s], their numbers there, or None where
        they are the columns.
    scores, pattern: [B,h,t,s], what the run went on with where an edit replaced them; None where
        they follow from q and k.
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
    keys: Tensor | None = None
    scores: Tensor | None = None
    pattern: Tensor | None = None

    @property
    def edited(self) -> tuple[str, ...]:
        """What of "scores" and "pattern" an edit replaced."""
        both = {"scores": self.scores, "pattern": self.pattern}
        return tuple(name for name, x in both.items() if x is not None)

    @property
    def T(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Its queries."""
        return self.q.shape[2]

    @property
    def denominator(self) -> Tensor:
        """ln of the softmax's denominator [B,h,t], fp64: the lse, with the sink in it."""
        lse = self.lse.double()
        return lse if self.sink is None else torch.logaddexp(lse, self.sink.double()[:, None])

    def row_positions(self, batch: int = 0) -> Tensor:
        """The positions [t] of its kept queries in a row of the batch."""
        at = as_tensor(part(self.q_positions, slice(self.first, self.first + self.T)))
        return at[batch if at.shape[0] > 1 else 0].cpu()

    def tokens(self) -> range:
        """Which queries, of all that came to the place, it kept."""
        return range(self.token, self.token + self.T)

    @cached_property
    def run(self) -> int | None:
        """The first column, if its keys are one run of columns in order; else None."""
        n, start = len(self.columns), int(self.columns[0]) if len(self.columns) else 0
        whole = torch.equal(self.columns, torch.arange(start, start + n))
        return start if whole else None

    def slots(self, columns: slice) -> slice | Tensor:
        """Which of its keys stand in a range of columns."""
        if self.run is not None:
            n = len(self.columns)
            edges = (min(max(x - self.run, 0), n) for x in (columns.start, columns.stop))
            return slice(*edges)
        inside = (self.columns >= columns.start) & (self.columns < columns.stop)
        result: slice | Tensor = inside.nonzero()[:, 0]
        return result

    def numbers(self, slots: slice | Tensor = ALL) -> slice | Tensor:
        """The numbers of some keys in their pool."""
        if self.keys is not None:
            return self.keys[slots]
        if self.run is None or isinstance(slots, Tensor):
            return self.columns[slots]
        start, stop, _ = slots.indices(len(self.columns))
        return slice(self.run + start, self.run + stop)


@dataclass(frozen=True, eq=False)
class KeyValuePool:
    """Keys k [B,g,n,D] and values v [B,g,n,E] (None: not kept), each once; several steps read the
    same ones.

    columns: [n], the column of each. groups: which of the G key/value heads these g are.
    held: what they are, in words: "keys"; "latents" where they are MLA's latents with the rotary
        key; "keys from a quantised cache" where they are what its codes say.
    """

    k: Tensor
    v: Tensor | None
    columns: Tensor
    groups: tuple[int, ...]
    G: int
    held: str = "keys"

    def at(self, head: int, H: int) -> int:
        """Which of the g the query head reads: h // (H/G)."""
        return self.groups.index(head // (H // self.G))


class PatternBlock(NamedTuple):
    """Part of a pattern: scores (-inf where masked, or where the step did not hold the key) and
    weights.
    """

    scores: Tensor
    weights: Tensor


class ScoreInputs(NamedTuple):
    """What scores are made of: q_i . k_j and the bias (None without one), and which keys are
    visible; [B,h,t,n] or broadcast.
    """

    dot: Tensor
    bias: Tensor | None
    visible: Tensor

    def scores(self, scale: float, softcap: float | None) -> Tensor:
        """softcap(scale q_i . k_j) + bias_ij, -inf where masked."""
        s = self.dot * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s if self.bias is None else s + self.bias
        return s.masked_fill(~self.visible, -math.inf)


@dataclass(frozen=True, eq=False)
class Place:
    """What one place computed: its steps, and the keys and values that they read.

    H: the query heads of the model; heads: which are recorded. N: the columns of the pattern, one
        for each token.
    """

    name: str
    steps: tuple[RecordedStep, ...]
    pools: tuple[KeyValuePool, ...]
    H: int
    heads: tuple[int, ...]
    N: int

    @property
    def B(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Rows of the batch."""
        return self.steps[0].q.shape[0]

    @property
    def G(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Key/value heads, of the first call."""
        return self.pools[0].G

    @property
    def held(self) -> str:
        """What the keys are, in words."""
        return " and ".join(dict.fromkeys(pool.held for pool in self.pools))

    @property
    def plain(self) -> bool:
        """Each column has one key for all steps: `k` and `v` are those."""
        return len(self.pools) == 1 and len(self.pools[0].columns) == self.N

    @property
    def k(self) -> Tensor:
        """The keys by column [B,g,N,D]; refused where a column has several (see `keys`)."""
        return self._only().k

    @property
    def v(self) -> Tensor | None:
        """The values by column [B,g,N,E], or None if they were not kept."""
        return self._only().v

    def keys(self, step: RecordedStep) -> Tensor:
        """The keys [B,g,s,D] that a step saw, beside its `columns`."""
        return self.pools[step.pool].k[:, :, step.numbers()]

    def values(self, step: RecordedStep) -> Tensor | None:
        """The values [B,g,s,E] that a step saw, or None if they were not kept."""
        v = self.pools[step.pool].v
        return None if v is None else v[:, :, step.numbers()]

    @cached_property
    def T(self) -> int:  # noqa: N802  (a letter of the glossary)
        """Queries of all steps: rows of the pattern."""
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for step in self.steps:
            starts.append(starts[-1] + step.T)
        return starts

    def start(self, number: int) -> int:
        """The first row of a step."""
        return self._starts[number]

    def parts(self, rows: slice) -> Iterator[tuple[RecordedStep, slice, slice]]:
        """The steps that some rows belong to: (step, its own rows, where they stand among the rows
        asked for).
        """
        start, stop = rows.start, rows.stop
        for n in range(max(bisect_right(self._starts, start) - 1, 0), len(self.steps)):
            step, first = self.steps[n], self._starts[n]
            if first >= stop:
                return
            a, b = max(start, first), min(stop, first + step.T)
            if a < b:
                yield step, slice(a - first, b - first), slice(a - start, b - start)

    def at(self, head: int) -> int:
        """Where a head stands among the recorded ones.

        Raises:
            ArgumentError: it was not recorded.
        """
        if head not in self.heads:
            raise ArgumentError(
                f"head {head} of {self.name} was not recorded; recorded: "
                f"{', '.join(map(str, self.heads))} of {self.H}"
            )
        return self.heads.index(head)

    def block(
        self,
        rows: slice,
        columns: slice,
        heads: slice = ALL,
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> PatternBlock:
        """The exact scores and weights of rows x columns: [batch, heads, rows, columns]; heads as
        the model numbers them.
        """
        chosen = self.heads if heads == ALL else tuple(range(self.H)[heads])
        local = [self.at(head) for head in chosen]
        b = len(range(self.B)[batch])
        shape = (b, len(local), rows.stop - rows.start, columns.stop - columns.start)
        found = PatternBlock(*(torch.full(shape, fill, dtype=dtype) for fill in (-math.inf, 0.0)))
        for step, own, there in self.parts(rows):
            slots = step.slots(columns)
            if (slots.stop - slots.start if isinstance(slots, slice) else len(slots)) < 1:
                continue
            made = self.part(step, own, slots, chosen, batch=batch, dtype=dtype)
            at = step.columns[slots] - columns.start
            found.scores[:, :, there].index_copy_(3, at, made.scores)
            found.weights[:, :, there].index_copy_(3, at, made.weights)
        return found

    def part(
        self,
        step: RecordedStep,
        own: slice,
        slots: slice | Tensor,
        heads: tuple[int, ...],
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> PatternBlock:
        """Scores and weights of a step's own rows with some of its keys, in the order of the keys.

        They are computed from q, k and the lse; what an edit replaced is what it put there. A
        weight on a masked key is 0, whatever an edit put there: the kernel leaves it out, too.
        """
        made, local = (
            self.ingredients(step, own, slots, heads, batch=batch, dtype=dtype),
            [self.at(h) for h in heads],
        )

        def edited(x: Tensor) -> Tensor:
            return _select_heads(x[batch, :, own], local)[..., slots].to(dtype)

        s = made.scores(step.scale, step.softcap)
        if step.scores is not None:
            s = edited(step.scores).masked_fill(~made.visible, -math.inf)
        if step.pattern is not None:
            return PatternBlock(s, edited(step.pattern).masked_fill(~made.visible, 0))
        lse = step.denominator[batch, :, own][:, local, :, None]
        p = torch.exp(s - lse.masked_fill(lse.isneginf(), math.inf).to(dtype))
        return PatternBlock(s, p.masked_fill(s.isneginf(), 0))  # also where the lse is NaN

    def ingredients(
        self,
        step: RecordedStep,
        own: slice,
        slots: slice | Tensor,
        heads: tuple[int, ...],
        *,
        batch: slice = ALL,
        dtype: torch.dtype = torch.float64,
    ) -> ScoreInputs:
        """What the scores of a step's own rows with some of its keys are made of."""
        pool, local = self.pools[step.pool], [self.at(head) for head in heads]
        k = pool.k[batch][:, :, step.numbers(slots)].to(dtype)
        q = step.q[batch, :, own].to(dtype)
        dot = (
            _select_heads(q, local) @ _select_heads(k, [pool.at(head, self.H) for head in heads]).mT
        )
        rows = slice(own.start + step.first, own.stop + step.first)
        keys, picked = _range_of(slots)
        where = (step.q_positions, step.k_positions, rows, keys)

        def of(x: Tensor) -> Tensor:
            x = x[batch] if x.shape[0] > 1 else x
            x = _select_heads(x, list(heads)) if x.shape[1] > 1 else x
            return x if picked is None else x[..., picked]

        bias = None if step.bias is None else of(step.bias.block(*where, dtype=dtype))
        return ScoreInputs(dot, bias, of(step.mask.block(*where)))

    @cached_property
    def column_positions(self) -> Tensor:
        """The positions of the columns [B,N], -1 = nothing stood there in that row of the batch."""
        found = torch.full((self.B, self.N), -1)
        for step in self.steps:
            at = as_tensor(step.k_positions).expand(self.B, -1)
            found[:, step.columns] = torch.maximum(found[:, step.columns], at)
        return found

    @cached_property
    def row_positions(self) -> Tensor:
        """The positions of the rows [B,T], -1 for padding."""
        every = [torch.stack([step.row_positions(b) for b in range(self.B)]) for step in self.steps]
        return torch.cat(every, 1)

    def _only(self) -> KeyValuePool:
        if self.plain:
            return self.pools[0]
        raise ArgumentError(
            f"{self.name} read several keys for one token ({self.held}); ask place.keys(step) for "
            "those of a step"
        )


def _range_of(slots: slice | Tensor) -> tuple[slice, Tensor | None]:
    """A rule is asked for a range, out of which slots are picked."""
    if isinstance(slots, slice):
        return slots, None
    low = int(slots.min())
    return slice(low, int(slots.max()) + 1), slots - low


def _select_heads(x: Tensor, heads: list[int]) -> Tensor:
    """Heads of [B,h,...]; all of them in order are no copy."""
    return x if heads == list(range(x.shape[1])) else x[:, heads]
