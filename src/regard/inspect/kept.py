"""What is kept of one call of attention, and of the keys that calls share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.biases import Bias
from regard.masks import Mask
from regard.span import Positions, as_tensor, part

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Step:
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
        return torch.nonzero(inside)[:, 0]

    def numbers(self, slots: slice | Tensor = ALL) -> slice | Tensor:
        """The numbers of some keys in their pool."""
        if self.keys is not None:
            return self.keys[slots]
        if self.run is None or isinstance(slots, Tensor):
            return self.columns[slots]
        start, stop, _ = slots.indices(len(self.columns))
        return slice(self.run + start, self.run + stop)


@dataclass(frozen=True, eq=False)
class Pool:
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
