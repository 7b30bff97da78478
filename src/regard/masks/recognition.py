"""Recognition of the rule behind a dense mask, such as `causal & window(4)`.

Other libraries give a mask as a tensor or as a function of indices. A kernel skips what a rule
hides, whereas it would have to read every element of a tensor. A recognized rule equals the mask in
every element: candidates are derived from the first and the last visible key of each query, then
evaluated and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.masks.base import ROWS_AT_ONCE, Mask
from regard.masks.batched import Document, Padding, Prefix
from regard.masks.block_diffusion import BlockCausal
from regard.masks.custom import Heads
from regard.masks.patterns import Causal, Full, Sinks, Window
from regard.span import Span


@dataclass(frozen=True)
class VisibleRows:
    """A dense mask that is read some rows at a time, so that it need not fit into memory.

    Args:
        read: a function from a slice of the queries to their mask, bool `[B or 1, H or 1, t, S]`.
        B: the number of batch rows, 1 if all share the mask.
        H: the number of heads, 1 if all share the mask.
        T: the number of queries.
        S: the number of keys.
        device: where the mask is computed.
    """

    read: Callable[[slice], Tensor]
    B: int
    H: int
    T: int
    S: int
    device: torch.device

    @property
    def queries(self) -> Span:
        """The default positions of the queries: the last T of the keys 0 to S - 1."""
        return Span(self.S - self.T, self.T, tokens=self.S < self.T)

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the queries, and their masks."""
        for i in range(0, self.T, ROWS_AT_ONCE):
            rows = slice(i, min(i + ROWS_AT_ONCE, self.T))
            yield rows, self.read(rows)

    def equals(self, rule: Mask) -> bool:
        """Return whether a rule is this mask."""
        for rows, visible in self.slices():
            block = rule.block(self.queries, Span(0, self.S), rows, device=self.device)
            if not block.expand_as(visible).equal(visible):
                return False
        return True


def recognize(rows: VisibleRows) -> Mask | None:
    """Return a rule that equals a mask for default positions, or None if no known rule does.

    Args:
        rows: the mask.

    Returns:
        `Full`, `Causal`, `Window`, `BlockCausal`, `Document`, `Prefix`, `Padding` or `Sinks`, the
        usual combinations of these, or `Heads` of such rules.

    >>> table = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    >>> read = lambda part: table[:, :, part]
    >>> print(recognize(VisibleRows(read, 1, 1, 4, 4, device=torch.device("cpu"))))
    causal
    """
    if rows.T == 0 or rows.S == 0:
        return None
    if rows.H > 1:
        heads = []
        for h in range(rows.H):
            rule = recognize(_select_head(rows, h))
            if rule is None:
                return None
            heads.append(rule)
        return heads[0] if len(set(heads)) == 1 else Heads(tuple(heads))
    return next((rule for rule in _candidates(_outline(rows)) if rows.equals(rule)), None)


def _select_head(rows: VisibleRows, h: int) -> VisibleRows:
    """Return the mask of one head."""
    return replace(rows, read=lambda part: rows.read(part)[:, h : h + 1], H=1)


@dataclass(frozen=True)
class _Outline:
    """What the candidates are derived from.

    Attributes:
        q: the position of each query, `[T]`.
        first: the first visible key of each query, `[B, T]`; S for a query that sees nothing.
        last: the last visible key of each query, `[B, T]`; -1 for a query that sees nothing.
        keys: which keys at least one query sees, bool `[B, S]`.
        last_row: the mask of the last query in the first batch row, bool `[S]`.
    """

    q: Tensor
    first: Tensor
    last: Tensor
    keys: Tensor
    last_row: Tensor


def _outline(rows: VisibleRows) -> _Outline:
    """Read the outline of a mask without heads."""
    S = rows.S
    key = torch.arange(S, device=rows.device)
    keys = torch.zeros(rows.B, S, dtype=torch.bool, device=rows.device)
    first, last, visible = [], [], keys[:, None, None]
    for _, visible in rows.slices():
        row = visible[:, 0]  # [B,t,S]
        keys |= row.any(1)
        first.append(torch.where(row, key, S).amin(-1))
        last.append(torch.where(row, key, -1).amax(-1))
    q = torch.arange(rows.queries.start, rows.queries.stop, device=rows.device)
    return _Outline(q, torch.cat(first, 1), torch.cat(last, 1), keys, visible[0, 0, -1])


def _candidates(outline: _Outline) -> Iterator[Mask]:
    """Yield the rules that a mask may be, the simplest first."""
    q, first, last, sees = outline.q, outline.first, outline.last, outline.last >= 0
    if not bool(sees.any()):
        return
    causal = Causal()
    yield Full()
    yield causal
    size = int((q - first)[sees].max()) + 1
    ahead = int((last - q)[sees].max())
    local: list[Mask] = [causal]
    if size >= 1 and ahead >= 0:
        local.append(causal & Window(size))
        yield local[-1]
        yield Window(size, ahead=ahead)
    if outline.q[0] >= 0 and int(last[0, 0]) >= 0:
        yield BlockCausal(int(last[0, 0]) + 1 - int(first[0, 0]))
    yield from _documents(outline, local)
    lengths = tuple((last[:, 0] + 1).tolist())
    yield causal | Prefix(lengths if len(lengths) > 1 else lengths[0])
    hidden = (~outline.last_row).nonzero()
    if len(hidden) and int(last[0, -1]) == int(q[-1]):
        sinks, window = int(hidden[0]), int(q[-1]) - int(hidden[-1])
        if window >= 1:
            yield causal & (Window(window) | Sinks(sinks))
    padding = Padding.from_keep(outline.keys)
    yield padding
    for rule in local:
        yield rule & padding


def _documents(outline: _Outline, local: list[Mask]) -> Iterator[Mask]:
    """Yield packed documents alone, and with the rules that limit attention within a document.

    A document starts where a query is its own first visible key.
    """
    bounds = []
    for first, last in zip(outline.first, outline.last, strict=True):
        starts = {int(x) for x in outline.q[first == outline.q]}
        sees = last >= 0
        if not bool(sees.any()):
            return
        bounds.append((*sorted(starts | {int(first[sees].min())}), int(last.max()) + 1))
    document = Document(tuple(bounds) if len(bounds) > 1 else bounds[0])
    yield document
    for rule in local:
        yield rule & document
