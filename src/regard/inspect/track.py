"""The calls of one place while it is recorded: which tokens their keys are, and which calls go on
from which.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.caches.codes import Packed
from regard.inspect.copies import copied, speaks_of_slots, written_out
from regard.inspect.kept import Step
from regard.inspect.place import Place
from regard.inspect.store import Store
from regard.masks import Mask
from regard.ops.softmax.call import Call, Result
from regard.span import Positions, Span, as_tensor


class Kept(NamedTuple):
    """What is kept of a call: "v" and "out" or not; these heads, or all; the last so many rows of a
    call, or all.
    """

    names: Collection[str]
    heads: Collection[int] | None = None
    rows: int | None = None


class Slots(NamedTuple):
    """Keys of a call in the order of the columns that they are: which slots, whose positions, under
    which rule.
    """

    columns: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    mask: Mask
    bias: Bias | None
    there: Tensor | None
    picked: Tensor | None = (
        None  # [b or 1,n], which slots of the call these are; None: all, in order
    )


class Track:
    """The steps of one place so far."""

    def __init__(self, kept: Kept, originals: dict[int, tuple[object, object]]) -> None:
        self._kept, self._originals = kept, originals
        self._steps: list[Step] = []
        self._stores: dict[tuple[Any, ...], Store] = {}
        self._at = torch.zeros(1, 0, dtype=torch.int64)  # [b,N] positions of the columns
        self._last: Tensor | None = None  # [b] the last position that asked
        self._batch, self._H, self._queries = 0, 0, 0
        self.heads: tuple[int, ...] = ()

    def goes_on(self, call: Call) -> bool:
        """Whether the call's queries stand behind all those before, in every row of the batch."""
        if self._last is None:
            return True
        asked = as_tensor(call.q_positions).cpu()
        first = torch.where(asked >= 0, asked, 1 << 62).amin(1)
        same = (self._batch, self._H) == (call.B, call.H)
        return same and bool((first > self._last).all())

    def add(self, call: Call, result: Result, kernel: str) -> None:
        """A call and its result; tensors are copied, since caches write over their own."""
        if self._last is None:
            self._batch, self._H = call.B, call.H
            wanted = range(call.H) if self._kept.heads is None else self._kept.heads
            self.heads = tuple(h for h in range(call.H) if h in wanted)
        asked = as_tensor(call.q_positions).cpu()
        last = asked.amax(1) if asked.shape[1] else asked.new_full((asked.shape[0],), -1)
        self._last = last if self._last is None else torch.maximum(self._last, last)
        if self.heads:
            self._steps.append(self._step(call, result, kernel))
        self._queries += call.T

    def place(self, name: str) -> Place:
        """What was kept, as one place."""
        pools = tuple(store.pool() for store in self._stores.values())
        return Place(name, tuple(self._steps), pools, self._H, self.heads, self._at.shape[1])

    @property
    def empty(self) -> bool:
        """Nothing was kept."""
        return not self._steps

    def _step(self, call: Call, result: Result, kernel: str) -> Step:
        assert result.lse is not None, "an observed call asks for its lse"
        heads, n = list(self.heads), call.H // call.G
        first = 0 if self._kept.rows is None else max(0, call.T - self._kept.rows)

        def own(x: Tensor) -> Tensor:
            return x.detach()[:, heads, first:].to("cpu", copy=True)

        groups = sorted({h // n for h in heads})
        slots = self._slots(call)

        def replaced(x: Tensor | None) -> Tensor | None:
            if x is None or slots.picked is None:
                return None if x is None else own(x)
            which = slots.picked[:, None, None].expand(x.shape[0], x.shape[1], x.shape[2], -1)
            return own(x.gather(3, which.to(x.device)))

        pool, store = self._store(call, tuple(groups))
        given = slots.k[:, groups], (slots.v[:, groups] if "v" in self._kept.names else None)
        keys = store.numbers(slots.columns, given, slots.there)
        return Step(
            own(call.q),
            own(result.lse),
            own(result.out) if "out" in self._kept.names else None,
            slots.columns,
            _kept(call.q_positions),
            _kept(slots.positions),
            slots.mask,
            slots.bias,
            call.scale,
            call.softcap,
            None if call.sink is None else call.sink.detach()[heads].to("cpu", copy=True),
            kernel,
            first,
            self._queries + first,
            call.dropout,
            pool,
            None if torch.equal(keys, slots.columns) else keys,
            replaced(result.scores),
            replaced(result.pattern),
        )

    def _store(self, call: Call, groups: tuple[int, ...]) -> tuple[int, Store]:
        """The store of keys of this form: a projection may answer a prompt in one, and a token in
        another.
        """
        coded = isinstance(call.k, Packed)
        form = (call.G, call.D, call.E, call.k.dtype, call.v.dtype, coded)
        if form not in self._stores:
            latents = call.E < call.D and call.k.data_ptr() == call.v.data_ptr()
            held = "latents" if latents else "keys"
            held += " from a quantised cache" if coded else ""
            v = call.v.detach()[:, list(groups)] if "v" in self._kept.names else None
            like = call.k.detach()[:, list(groups)], v
            self._stores[form] = Store(like, groups, call.G, held)
        return list(self._stores).index(form), self._stores[form]

    def _slots(self, call: Call) -> Slots:
        """The call's keys by column."""
        k, v = call.k.detach(), call.v.detach()
        at = as_tensor(call.k_positions).cpu().long()
        mask, bias = self._original(call.mask), self._original(call.bias)
        N = self._at.shape[1]
        same = at.shape[1] >= N and bool((at[:, :N] == self._at).all())
        if same and (N or not _moved(at, as_tensor(call.q_positions).cpu())):
            # the same slots as before, and new ones behind them
            rows = max(at.shape[0], self._at.shape[0])
            self._at = torch.cat([self._at.expand(rows, -1), at[:, N:].expand(rows, -1)], 1)
            return Slots(torch.arange(at.shape[1]), k, v, call.k_positions, mask, bias, None)
        return self._by_position(call, at, mask, bias)

    def _by_position(self, call: Call, at: Tensor, mask: Mask, bias: Bias | None) -> Slots:
        """Slots in any order, as of a ring: a key is the column that had its position; empty slots
        are left out.
        """
        asked = as_tensor(call.q_positions).cpu()
        column = self._columns_of(at, asked)  # [b,s], -1 = empty
        k, v = call.k.detach(), call.v.detach()
        by_slot = speaks_of_slots(mask, bias)
        used = (column >= 0).any(0)
        if bool(((column == column[:1]) | ~used).all()):  # one order for all rows
            which = used.nonzero()[:, 0]
            if by_slot:
                mask, bias = written_out(call, mask, bias, which[None, None, None])
            here = which.to(k.device)
            positions = at[:, which]
            return Slots(
                column[0, which],
                k[:, :, here],
                v[:, :, here],
                positions,
                mask,
                bias,
                None,
                which[None],
            )
        columns = torch.unique(column[column >= 0])
        match = column[:, :, None] == columns  # [b,s,n]
        there, slot = match.any(1), match.to(torch.uint8).argmax(1)
        positions = at.gather(1, slot).masked_fill(~there, -1)
        if by_slot:
            mask, bias = written_out(call, mask, bias, slot[:, None, None])
        k, v = (
            x.gather(2, slot.to(x.device)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
            for x in (k, v)
        )
        return Slots(columns, k, v, positions, mask, bias, there, slot)

    def _columns_of(self, at: Tensor, asked: Tensor) -> Tensor:
        """The columns [b,s] of keys at positions [b,s], -1 for -1; new positions get new columns at
        the end.

        Where the new keys are those of the queries, their columns stand as the queries do; else
        they end together.
        """
        rows = max(at.shape[0], self._at.shape[0], asked.shape[0])
        known, at, asked = (x.expand(rows, -1) for x in (self._at, at, asked))
        column, N = torch.full(at.shape, -1), known.shape[1]
        for b in range(rows if N else 0):
            own, order = known[b].sort()
            place = torch.searchsorted(own, at[b]).clamp(max=N - 1)
            column[b] = torch.where((own[place] == at[b]) & (at[b] >= 0), order[place], -1)
        new = (column < 0) & (at >= 0)
        slots = [_slots_of(at[b, new[b]], asked[b]) for b in range(rows)]
        if any(x is None for x in slots):
            most = int(new.sum(1).max())
            slots = [most - n + at[b, new[b]].argsort().argsort() for b, n in enumerate(new.sum(1))]
        found = [x for x in slots if x is not None]
        used = torch.unique(torch.cat(found))
        added = torch.full((rows, len(used)), -1)
        for b, x in enumerate(found):
            where = torch.searchsorted(used, x)
            added[b, where], column[b, new[b]] = at[b, new[b]], N + where
        self._at = torch.cat([known, added], 1)
        return column

    def _original(self, rule: Any) -> Any:
        """A mask or bias of which the tensors are copies, made once however many calls share it."""
        if rule is None:
            return None
        if id(rule) not in self._originals:
            self._originals[id(rule)] = (rule, copied(rule))
        return self._originals[id(rule)][1]


def _slots_of(positions: Tensor, asked: Tensor) -> Tensor | None:
    """Which queries stand at these positions; None if one has no query."""
    match = positions[:, None] == asked
    return match.to(torch.uint8).argmax(1) if bool(match.any(1).all()) else None


def _moved(at: Tensor, asked: Tensor) -> bool:
    """Whether the keys of a first call are its queries' tokens, but in other slots: a cache that
    leaves padding out.
    """
    rows = max(at.shape[0], asked.shape[0])
    at, asked = at.expand(rows, -1), asked.expand(rows, -1)
    if torch.equal(at, asked):
        return False
    same = (
        torch.equal(a[a >= 0].sort().values, b[b >= 0].sort().values)
        for a, b in zip(at, asked, strict=True)
    )
    return all(same)


def _kept(positions: Positions) -> Positions:
    return positions if isinstance(positions, Span) else positions.detach().to("cpu", copy=True)
