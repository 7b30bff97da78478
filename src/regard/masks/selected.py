"""A mask that a selection makes: which blocks of positions each query of one call may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask, Part, Slot, check_rows, whole
from regard.masks.tiling import PARTIAL, held, state_of


@dataclass(frozen=True, eq=False)
class Selected(Mask):
    """Query row i of the call sees key position p if table[b, h, i, p // size - first[b]]; outside
    the table nothing.

    A row of the table belongs to a query slot, as in `Dense`; a column to a block of key positions,
    as in `Blocks`.

    table: bool [B or 1, H or 1, T, N].
    size: positions per block.
    first: the number of the block that column 0 stands for, int64 [B or 1]; None is 0.

    Raises:
        ArgumentError, ArgumentTypeError: a table or first of another shape or dtype, or a size
            below 1; at a call, another number of rows, heads or queries; from `allows`, which knows
            no query slots.

    >>> from regard.span import Span
    >>> table = torch.tensor([[True, False], [False, True]])[None, None]
    >>> Selected(table, 3).block(Span(4, 2), Span(0, 5)).int().tolist()
    [[[[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]]
    """

    table: Tensor
    size: int
    first: Tensor | None = None

    def __post_init__(self) -> None:
        whole("Selected size", self.size, 1)
        if not isinstance(self.table, Tensor) or self.table.dtype != torch.bool:
            got = self.table.dtype if isinstance(self.table, Tensor) else type(self.table).__name__
            raise ArgumentTypeError(
                f"Selected table is {got}; it must be a bool tensor: use table.bool()"
            )
        if self.table.ndim != 4 or 0 in (*self.table.shape[:2], self.table.shape[3]):
            raise ArgumentError(
                f"Selected table is {tuple(self.table.shape)}; it must be [batch or 1, heads or "
                "1, queries, key blocks], "
                "with at least one row, head and block"
            )
        first = self.first
        if first is not None and (
            first.dtype != torch.int64 or first.shape not in ((1,), self.table.shape[:1])
        ):
            raise ArgumentError(
                f"Selected first is {first.dtype} {tuple(first.shape)}; it must be int64 "
                f"({self.table.shape[0]},) or (1,): "
                "the number of the first block of each row"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Refused: its rows are slots of one call, not positions."""
        raise ArgumentError(
            "a Selected mask has a row for each query slot of one call: ask "
            "mask.block(q_positions, k_positions), "
            "or give Blocks for a rule on positions"
        )

    def _block(self, where: Part) -> Tensor:
        return self._spread(self.table[:, :, where.rows].to(where.device), where.k)

    def _spread(self, lines: Tensor, k: Tensor) -> Tensor:
        """Rows [B,H,t,N] of the table at the keys' positions k [B or 1, s]: [B,H,t,s]."""
        column = self._column(k)
        N = lines.shape[3]
        inside = (k >= 0) & (column >= 0) & (column < N)
        B = max(lines.shape[0], column.shape[0])
        at = column.clamp(0, N - 1)[:, None, None].expand(B, *lines.shape[1:3], -1)
        return lines.expand(B, -1, -1, -1).gather(3, at) & inside[:, None, None]

    def _column(self, k: Tensor) -> Tensor:
        """The column of key positions [b, s]; also for one of -1."""
        first = 0 if self.first is None else self.first.to(k.device)[:, None]
        return k.long() // self.size - first

    def _undecided(self, where: Part, bk: int) -> Tensor:
        # Decided from the rows of the table joined: t x S scores are never looked at.
        lines, k = self.table[:, :, where.rows].to(where.device), where.k
        some, each = (
            self._spread(x[:, :, None], k) for x in (lines.any(2), lines.all(2))
        )  # [B,H,1,s]
        empty = (k < 0)[:, None, None]  # a slot that holds nothing speaks neither for nor against
        full = state_of(each | empty, bk) == state_of(torch.ones_like(each), bk)
        states = state_of(some, bk).clamp(max=PARTIAL)
        n_held = held(where.k_positions, bk).to(where.device)[:, None]
        return (states + (full & (states > 0)).to(torch.int8)).masked_fill(n_held == 0, 0)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """One table row per query, for all batch rows and heads or for each."""
        rows, heads, queries, _ = self.table.shape
        check_rows("Selected", rows, B)
        if heads not in (1, H):
            raise ArgumentError(
                f"Selected holds {heads} heads, but the call has {H}; give one table per head, or "
                "one for all"
            )
        if queries != T:
            raise ArgumentError(
                f"Selected holds {queries} queries, but the call has {T}; a selection serves the "
                "call it was made for"
            )

    def _at(self, slot: Slot) -> Tensor:
        b, h = (i * (n > 1) for i, n in zip((slot.b, slot.h), self.table.shape, strict=False))
        row = 0 if self.first is None else self.first[slot.b * (self.first.shape[0] > 1)]
        column, N = slot.k.long() // self.size - row, self.table.shape[3]
        inside = (slot.k >= 0) & (column >= 0) & (column < N)
        return self.table[b, h, slot.q_idx, column.clamp(0, N - 1)] & inside

    def __str__(self) -> str:
        return f"selected({'x'.join(map(str, self.table.shape))}, {self.size})"

    def __repr__(self) -> str:
        return f"Selected(bool{list(self.table.shape)}, {self.size})"
