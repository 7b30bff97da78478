"""Recognition of the rule behind a dense mask, such as `causal & window(4)`.

Models often pass a tensor of booleans, or of 0 and -inf; a kernel can skip what a rule hides. A
recognized rule equals the mask in every element: candidates come from the last query, and from the
first and the last visible keys, and are then compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks.base import Mask
from regard.masks.batched import Document, Padding, Prefix
from regard.masks.block_diffusion import BlockCausal
from regard.masks.custom import Dense, Heads
from regard.masks.patterns import Causal, Full, Sinks, Window
from regard.span import Span

COMPARED_ROWS = 64
"""The number of rows of a mask that are read at once: they fit into the caches of a processor."""


@dataclass(frozen=True)
class VisibleRows:
    """A dense mask that is read some rows at a time, so that it need not fit into memory."""

    read: Callable[[slice], Tensor]
    B: int
    H: int
    T: int
    S: int
    device: torch.device

    @classmethod
    def of(cls, table: Tensor) -> VisibleRows:
        """Return the rows of a bool tensor `[B or 1, H or 1, T, S]`."""
        B, H = (1 if table.stride(i) == 0 else table.shape[i] for i in range(2))
        T, S = table.shape[2:]
        return cls(lambda rows: table[:B, :H, rows], B, H, T, S, table.device)

    @property
    def default_start(self) -> int:
        """The default position of the first query: the queries are the last T of the keys."""
        return self.S - self.T

    def queries(self, start: int) -> Span:
        """Return the positions of the queries from that of the first one."""
        return Span(start, self.T, tokens=start < 0)

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the queries, the last ones first, and their masks."""
        for i in reversed(range(0, self.T, COMPARED_ROWS)):
            rows = slice(i, min(i + COMPARED_ROWS, self.T))
            yield rows, self.read(rows)

    def equals(self, rule: Mask, start: int) -> bool:
        """Return whether a rule is this mask from the position `start` on; last rows come first."""
        queries, keys = self.queries(start), Span(0, self.S)
        for rows, visible in self.slices():
            block = rule.block(queries, keys, rows, device=self.device)
            if not torch.equal(*torch.broadcast_tensors(block, visible)):
                return False
        return True

    def shared(self) -> VisibleRows:
        """Return the same mask without a dimension for the batch, or the heads, where all agree."""
        one = self
        if one.B > 1 and all(x.equal(x[:1].expand_as(x)) for _, x in one.slices()):
            one = replace(one, read=lambda rows: self.read(rows)[:1], B=1)
        if one.H > 1 and all(x.equal(x[:, :1].expand_as(x)) for _, x in one.slices()):
            one = one.head(0)
        return one

    def head(self, h: int) -> VisibleRows:
        """Return the mask of one head."""
        return replace(self, read=lambda rows: self.read(rows)[:, h : h + 1], H=1)


class RecognizedRule(NamedTuple):
    """A rule that equals a mask of T queries and S keys."""

    mask: Mask
    q_positions: Span


def recognize(rows: VisibleRows, *, any_start: bool = False) -> RecognizedRule | None:
    """Return a rule that equals a mask, or None if no known rule does."""
    if rows.T == 0 or rows.S == 0:
        return None
    rows = rows.shared()
    if rows.T == rows.B == rows.H == 1 and (one := _one_query(rows, any_start=any_start)):
        return one
    if rows.H == 1:
        for rule, start in _candidates(_Outline(rows), any_start=any_start):
            if rows.equals(rule, start):
                return RecognizedRule(rule, rows.queries(start))
        return None
    heads: list[RecognizedRule] = []
    for h in range(rows.H):
        recognized = recognize(rows.head(h), any_start=any_start)
        if recognized is None or (heads and heads[0].q_positions != recognized.q_positions):
            return None
        heads.append(recognized)
    return RecognizedRule(Heads(tuple(x.mask for x in heads)), heads[0].q_positions)


def _one_query(rows: VisibleRows, *, any_start: bool) -> RecognizedRule | None:
    """Return the rule of a single query of decoding that sees a range of keys, or None."""
    visible = rows.read(slice(0, 1)).reshape(rows.S)
    count = int(visible.count_nonzero())
    if count == rows.S:
        return RecognizedRule(Full(), rows.queries(rows.default_start))
    if count == 0:
        return None
    as_bytes = visible.view(torch.uint8)
    first, last = int(as_bytes.argmax()), rows.S - 1 - int(as_bytes.flip(0).argmax())
    if count != last + 1 - first or not (any_start or last == rows.default_start):
        return None
    rule = Causal() if first == 0 else Causal() & Window(count)
    return RecognizedRule(rule, rows.queries(last))


@dataclass(frozen=True, eq=False)
class RecognizedMask:
    """The meaning of a dense mask in a call with T queries and S keys.

    `uniform_rows`: whether it hides a whole row by a finite number; torch then returns the mean of
    all values, which no rule expresses.
    """

    mask: Mask | None
    q_positions: Span
    bias: Tensor | None = None
    uniform_rows: bool = False


def recognize_mask(mask: Tensor, T: int, S: int) -> RecognizedMask:
    """Find the rule behind a mask in the convention of `F.scaled_dot_product_attention`."""
    mask = unexpanded(mask.detach())
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask.expand(*mask.shape[:2], T, S)
    if mask.dtype == torch.bool:
        return _recognize_table(mask)
    lowest = mask <= torch.finfo(mask.dtype).min / 2
    recognized = _recognize_table(~lowest)
    bias = None if bool((lowest | (mask == 0)).all()) else mask.masked_fill(lowest, 0)
    finite = (lowest & (mask > -torch.inf)).any(-1)
    return replace(recognized, bias=bias, uniform_rows=bool((lowest.all(-1) & finite).any()))


def unexpanded(mask: Tensor) -> Tensor:
    """Return a mask with size 1 in the dimensions along which it is one expanded element."""
    return mask[tuple(slice(0, 1 if step == 0 else None) for step in mask.stride())]


def _recognize_table(visible: Tensor) -> RecognizedMask:
    """Return the rule of a bool mask `[B or 1, H or 1, T, S]`, or the mask itself."""
    rows = VisibleRows.of(visible)
    recognized = recognize(rows, any_start=True)
    if recognized is None:
        return RecognizedMask(Dense(visible), rows.queries(rows.default_start))
    return RecognizedMask(
        None if recognized.mask == Full() else recognized.mask, recognized.q_positions
    )


class _Outline:
    """What the candidates are derived from, each part read when it is asked for."""

    def __init__(self, rows: VisibleRows) -> None:
        self.rows = rows
        self.last_row = rows.read(slice(rows.T - 1, rows.T))[:, 0, 0]

    @cached_property
    def keys(self) -> Tensor:
        """Which keys at least one query sees, bool `[B, S]`."""
        keys = self.last_row.clone()
        for _, visible in self.rows.slices():
            if bool(keys.all()):
                break
            keys |= visible[:, 0].any(1)
        return keys

    @cached_property
    def row_ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last visible key of each query, `[B, T]`; S and -1 without any."""
        S, parts = self.rows.S, []
        for _, visible in self.rows.slices():
            row = visible[:, 0].to(torch.uint8)  # [B,t,S]
            some = row.amax(-1) > 0
            first, last = row.argmax(-1), S - 1 - row.flip(-1).argmax(-1)
            parts.append((torch.where(some, first, S), torch.where(some, last, -1)))
        firsts, lasts = zip(*reversed(parts), strict=True)
        return torch.cat(firsts, 1), torch.cat(lasts, 1)


def _candidates(outline: _Outline, *, any_start: bool) -> Iterator[tuple[Mask, int]]:
    """Yield the rules that a mask may be, simplest first, with the first query's position."""
    rows = outline.rows
    yield Full(), rows.default_start
    visible = outline.last_row.any(0).nonzero()
    if not len(visible) and not bool(outline.keys.any()):
        return
    starts = [rows.default_start]
    if any_start:
        last = outline.last_row[0].nonzero()
        starts.append(0)
        starts += [int(last[-1]) - (rows.T - 1)] if len(last) else []
    first = int(visible[0]) if len(visible) else rows.S
    padding = None
    for start in dict.fromkeys(starts):
        rules: list[Mask] = [Causal()]
        # the last query has the longest past: the first key that it sees in any row of the batch
        # bounds a window
        if 1 <= (size := start + rows.T - first) < rows.S:
            rules.append(Causal() & Window(size))
        yield from ((rule, start) for rule in rules)
        if not bool(outline.keys.all()):
            if padding is None:
                padding = Padding.from_keep(outline.keys)
                yield padding, rows.default_start
            yield from ((rule & padding, start) for rule in rules)
    yield from ((rule, rows.default_start) for rule in _other_candidates(outline))


def _other_candidates(outline: _Outline) -> Iterator[Mask]:
    """Yield the rules that depend on the visible keys of all queries."""
    rows, hides_keys = outline.rows, not bool(outline.keys.all())
    runs = (outline.last_row[:, 1:] & ~outline.last_row[:, :-1]).sum(-1)
    if not hides_keys and int(runs.max()) > 2:
        return  # without padding a query sees at most a beginning and a window
    first, last = outline.row_ends
    q = torch.arange(rows.default_start, rows.S, device=rows.device)
    sees, causal = last >= 0, Causal()
    size = int((q - first)[sees].max()) + 1
    ahead = int((last - q)[sees].max())
    local: list[Mask] = [causal]
    if size >= 1 and ahead >= 0:
        local.append(causal & Window(size))
        yield local[-1]
        yield Window(size, ahead=ahead)
    if q[0] >= 0 and int(last[0, 0]) >= 0:
        yield BlockCausal(int(last[0, 0]) + 1 - int(first[0, 0]))
    yield from _documents(q, first, last, local)
    lengths = tuple((last[:, 0] + 1).tolist())
    yield causal | Prefix(lengths if len(lengths) > 1 else lengths[0])
    hidden = (~outline.last_row[0]).nonzero()
    if len(hidden) and int(last[0, -1]) == int(q[-1]):
        sinks, window = int(hidden[0]), int(q[-1]) - int(hidden[-1])
        if window >= 1:
            yield causal & (Window(window) | Sinks(sinks))
    if hides_keys:
        padding = Padding.from_keep(outline.keys)
        yield from (rule & padding for rule in local)


def _documents(q: Tensor, first: Tensor, last: Tensor, local: list[Mask]) -> Iterator[Mask]:
    """Yield packed documents, which start where a query is its own first visible key."""
    bounds = []
    for firsts, lasts in zip(first, last, strict=True):
        starts = {int(x) for x in q[firsts == q]}
        sees = lasts >= 0
        if not bool(sees.any()):
            return
        bounds.append((*sorted(starts | {int(firsts[sees].min())}), int(lasts.max()) + 1))
    document = Document(tuple(bounds) if len(bounds) > 1 else bounds[0])
    yield document
    for rule in local:
        yield rule & document
