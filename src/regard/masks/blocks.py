"""Masks given by blocks of positions: `Blocks`, `BigBird`, `Selected`, and block diffusion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.argument_checks import check_int
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask
from regard.masks.tiling import (
    PARTIAL,
    UNBOUNDED,
    CallSlice,
    Intervals,
    SlotPair,
    block_states,
    check_batch_rows,
    count_filled_slots,
    intersect,
    normalize_intervals,
    to_4d,
)
from regard.units import plural


def look_up_blocks(table: Tensor, size: int, q: Tensor, k: Tensor) -> Tensor:
    """Return table[b, h, q // size, k // size], of `[B or 1, H or 1, nQ, nK]`, or False."""
    q, k = (to_4d(x) // size for x in (q, k))
    B, H, nQ, nK = table.shape
    table = table.to(q.device)
    b = torch.arange(B, device=q.device)[:, None, None, None]
    h = torch.arange(H, device=q.device)[:, None, None]
    inside = (q >= 0) & (q < nQ) & (k >= 0) & (k < nK)
    return table[b, h, q.clamp(0, nQ - 1), k.clamp(0, nK - 1)] & inside


def visible_block_ranges(table: Tensor, size: int, q: Tensor) -> Intervals:
    """Return the runs of visible blocks of each query as ranges of positions."""
    B, H, nQ, nK = table.shape
    q = q[:, 0, :, 0] // size  # [b,t]
    b = torch.arange(B, device=q.device)[:, None, None]
    h = torch.arange(H, device=q.device)[:, None]
    line = table.to(q.device)[b, h, q.clamp(0, nQ - 1)[:, None]]  # [B,H,t,nK]
    line = line & ((q >= 0) & (q < nQ))[:, None, :, None]
    steps = torch.nn.functional.pad(
        line.to(torch.int8), (1, 1)
    ).diff()  # 1 starts a run, -1 ends it
    block_starts = torch.arange(nK + 1, device=q.device) * size
    starts, stops = (
        torch.where(steps == x, block_starts, UNBOUNDED).sort(-1).values for x in (1, -1)
    )
    n = max(int((starts < UNBOUNDED).sum(-1).max()), 1) if starts.numel() else 1
    return Intervals(starts[..., :n], stops[..., :n])


def _check_bool(name: str, table: object) -> None:
    """Raise unless the table of a mask is a bool tensor."""
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        got = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ArgumentTypeError(
            f"{name} table is {got}; it must be a bool tensor: use table.bool()"
        )


def _check_heads(name: str, heads: int, H: int) -> None:
    """Raise unless there is one table for all H query heads, or one for each."""
    if heads != 1 and heads != H:
        raise ArgumentError(
            f"{name} holds {plural(heads, 'head')}, but the call has {H}; give one table per "
            "head, or one for all"
        )


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Blocks of queries see blocks of keys: table[b, h, q // size, k // size], or False outside.

    Args:
        table: bool `[B or 1, H or 1, nQ, nK]`, or `[nQ, nK]`.
        size: positions per block.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid, or does not fit a call.

    >>> from regard.span import Span
    >>> mask = Blocks(torch.tensor([[True, False], [True, True]]), 2)
    >>> mask.visible(Span(0, 4), Span(0, 4)).tolist()
    [[[2, 2, 4, 4]]]
    """

    has_text: ClassVar[bool] = False

    table: Tensor
    size: int

    def __post_init__(self) -> None:
        check_int("Blocks size", self.size, 1)
        _check_bool("Blocks", self.table)
        if self.table.ndim not in (2, 4) or self.table.numel() == 0:
            raise ArgumentError(
                f"Blocks table is {tuple(self.table.shape)}; it must be [query blocks, key blocks] "
                "or [batch or 1, heads or 1, query blocks, key blocks], and not empty"
            )

    @property
    def _table(self) -> Tensor:
        return self.table if self.table.ndim == 4 else self.table[None, None]

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the entry of the table for the blocks of q and k."""
        return look_up_blocks(self._table, self.size, q, k)

    def _intervals(self, q: Tensor) -> Intervals:
        return visible_block_ranges(self._table, self.size, q)

    def select_heads(self, heads: slice) -> Mask:
        """Return the table of these heads if there is one per head."""
        one = self.table.ndim == 2 or self.table.shape[1] == 1
        return self if one else replace(self, table=self.table[:, heads])

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check the number of batch rows and heads, and that the table covers all keys."""
        rows, heads, _, nK = self._table.shape
        check_batch_rows("Blocks", rows, B)
        _check_heads("Blocks", heads, H)
        check_coverage("Blocks", nK, self.size, S)

    def __str__(self) -> str:
        return f"blocks({'x'.join(map(str, self.table.shape))}, {self.size})"


@dataclass(frozen=True, eq=False)
class BigBird(Mask):
    """The BigBird mask: neighbouring blocks, the first and the last, and random ones.

    The first and the last block see everything.

    Args:
        block_size: positions per block.
        blocks: the number of blocks.
        window: how many neighbouring blocks are visible, its own included; an odd number.
        random: how many random blocks are visible besides, or all that are left.
        seed: the seed of the random blocks.
        causal: whether k <= q is required too; random blocks are then drawn from the past.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is out of range or no int, or there are too
            many keys in a call.

    >>> from regard.span import Span
    >>> int(BigBird(64, 32).visible(Span(64 * 16, 1), Span(0, 64 * 32)))
    512

    Source: Zaheer et al. 2020 (arXiv 2007.14062).
    """

    block_size: int
    blocks: int
    window: int = 3
    random: int = 3
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        check_int("BigBird block size", self.block_size, 1)
        check_int("BigBird blocks", self.blocks, 1)
        check_int("BigBird random", self.random, 0)
        check_int("BigBird seed", self.seed, 0)
        if check_int("BigBird window", self.window, 1) % 2 == 0:
            raise ArgumentError(
                f"BigBird window is {self.window}; it must be odd, so that the block itself is in "
                f"the middle: {self.window - 1} or {self.window + 1}"
            )
        # drawn here, because a compiled graph cannot create a generator
        drawn = _bigbird_table(self.blocks, self.window, self.random, self.seed, self.causal)
        object.__setattr__(self, "_table", drawn.clone())  # a copy of the cached table

    @property
    def table(self) -> Tensor:
        """Which block sees which, bool `[blocks, blocks]`."""
        table: Tensor = self.__dict__["_table"]
        return table

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return whether the block of q sees the block of k."""
        visible = look_up_blocks(self.table[None, None], self.block_size, q, k)
        return visible & (k <= q) if self.causal else visible

    def _intervals(self, q: Tensor) -> Intervals:
        ranges = visible_block_ranges(self.table[None, None], self.block_size, q)
        past = Intervals(torch.zeros_like(q), q + 1)
        return intersect(normalize_intervals(ranges), past) if self.causal else ranges

    def causal_from(self) -> int | None:
        """Return 0 for the causal form."""
        return 0 if self.causal else None

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the blocks cover all keys of the call."""
        check_coverage("BigBird", self.blocks, self.block_size, S)


def check_coverage(name: str, blocks: int, size: int, S: int) -> None:
    """Raise unless a number of blocks of `size` positions covers S keys."""
    if blocks * size < S:
        raise ArgumentError(
            f"{name} covers {plural(blocks, 'block')} of {size} = "
            f"{plural(blocks * size, 'position')}, but there are {plural(S, 'key')}; give "
            f"{plural(-(-S // size), 'block')}"
        )


@lru_cache(maxsize=64)
def _bigbird_table(n: int, window: int, random: int, seed: int, causal: bool) -> Tensor:  # noqa: FBT001
    blocks = torch.arange(n, device="cpu")  # cached, so always on the CPU
    table = (blocks[:, None] - blocks).abs() <= window // 2
    table[[0, -1]] = True
    table[:, [0, -1]] = True
    generator = torch.Generator(device="cpu").manual_seed(
        seed
    )  # does not change the global random state
    for i in range(1, n - 1):
        free = (~table[i, : i if causal else n]).nonzero()[:, 0]
        table[i, free[torch.randperm(len(free), generator=generator, device="cpu")[:random]]] = True
    return table.tril() if causal else table


@dataclass(frozen=True, eq=False)
class Selected(Mask):
    """Each query of the call sees a selection of key blocks: table[b, h, i, p // size - first[b]].

    i is the index of the query in the call, and p the position of the key; False outside.

    Args:
        table: bool `[B or 1, H or 1, T, N]`.
        size: positions per block.
        first: the number of the block of column 0, int64 `[B]` or `[1]`; None is 0.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid, does not fit a call, or `allows`
            is called, which has no query indices.

    >>> from regard.span import Span
    >>> table = torch.tensor([[True, False], [False, True]])[None, None]
    >>> Selected(table, 3).block(Span(4, 2), Span(0, 5)).int().tolist()
    [[[[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]]
    """

    has_text: ClassVar[bool] = False
    why_hidden = ("not selected", "selected")

    table: Tensor
    size: int
    first: Tensor | None = None

    def __post_init__(self) -> None:
        check_int("Selected size", self.size, 1)
        _check_bool("Selected", self.table)
        if self.table.ndim != 4 or 0 in (*self.table.shape[:2], self.table.shape[3]):
            raise ArgumentError(
                f"Selected table is {tuple(self.table.shape)}; it must be [batch or 1, heads or 1, "
                "queries, key blocks], with at least one row, head and block"
            )
        first = self.first
        if first is not None and (
            first.dtype != torch.int64 or first.shape not in ((1,), self.table.shape[:1])
        ):
            raise ArgumentError(
                f"Selected first is {first.dtype} {tuple(first.shape)}; it must be int64 "
                f"({self.table.shape[0]},) or (1,): the number of the first block of each row"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Raise, because the rows of the table are query indices of one call, not positions."""
        raise ArgumentError(
            "a Selected mask has a row for each query slot of one call: call "
            "mask.block(q_positions, k_positions), or use Blocks for a rule on positions"
        )

    def _block(self, part: CallSlice) -> Tensor:
        return self._expand_columns(self.table[:, :, part.rows].to(part.device), part.k)

    def _expand_columns(self, lines: Tensor, k: Tensor) -> Tensor:
        """Expand table rows `[B, H, t, N]` to key positions `[B or 1, s]`: `[B, H, t, s]`."""
        column = self._column(k)
        N = lines.shape[3]
        inside = (k >= 0) & (column >= 0) & (column < N)
        B = max(lines.shape[0], column.shape[0])
        index = column.clamp(0, N - 1)[:, None, None].expand(B, *lines.shape[1:3], -1)
        return lines.expand(B, -1, -1, -1).gather(3, index) & inside[:, None, None]

    def _column(self, k: Tensor) -> Tensor:
        """Return the table column of each key position `[b, s]`, any for position -1."""
        first = 0 if self.first is None else self.first.to(k.device)[:, None]
        return k.long() // self.size - first

    def _states_without_intervals(self, part: CallSlice, bk: int) -> Tensor:
        # reducing the table over its queries first avoids a t x S mask
        lines, k = self.table[:, :, part.rows].to(part.device), part.k
        some, each = (
            self._expand_columns(x[:, :, None], k) for x in (lines.any(2), lines.all(2))
        )  # [B,H,1,s]
        empty = (k < 0)[:, None, None]  # empty slots do not influence the state
        full = block_states(each | empty, bk) == block_states(torch.ones_like(each), bk)
        states = block_states(some, bk).clamp(max=PARTIAL)
        n_filled = count_filled_slots(part.k_positions, bk).to(part.device)[:, None]
        return (states + (full & (states > 0)).to(torch.int8)).masked_fill(n_filled == 0, 0)

    def select_heads(self, heads: slice) -> Mask:
        """Return the table of these heads if there is one per head."""
        one = self.table.shape[1] == 1
        return self if one else replace(self, table=self.table[:, heads])

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that there is one table row per query, for all batch rows and heads or for each."""
        rows, heads, queries, _ = self.table.shape
        check_batch_rows("Selected", rows, B)
        _check_heads("Selected", heads, H)
        if queries != T:
            raise ArgumentError(
                f"Selected holds {plural(queries, 'query')}, but the call has {T}; compute a "
                "new selection for each call"
            )

    def _allows_pair(self, slot: SlotPair) -> Tensor:
        b, h = (i * (n > 1) for i, n in zip((slot.b, slot.h), self.table.shape, strict=False))
        row = 0 if self.first is None else self.first[slot.b * (self.first.shape[0] > 1)]
        column, N = slot.k.long() // self.size - row, self.table.shape[3]
        inside = (slot.k >= 0) & (column >= 0) & (column < N)
        return self.table[b, h, slot.q_idx, column.clamp(0, N - 1)] & inside

    def __str__(self) -> str:
        return f"selected({'x'.join(map(str, self.table.shape))}, {self.size})"

    def __repr__(self) -> str:
        return f"Selected(bool{list(self.table.shape)}, {self.size})"


@dataclass(frozen=True, eq=False)
class BlockCausal(Mask):
    """A query sees its own block of positions and all earlier ones: k // size <= q // size.

    Within a block, queries see later keys. With size 1 this is the causal mask.

    Args:
        size: positions per block.

    Raises:
        ArgumentError, ArgumentTypeError: size below 1 or not an int.

    >>> from regard.span import Span
    >>> BlockCausal(2).block(Span(0, 4), Span(0, 4)).int().tolist()
    [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]]

    Source: Arriola et al. 2025 (arXiv 2503.09573), appendix B.6, the mask M_BC.
    """

    why_hidden = ("later block of {size}", "future")

    size: int

    def __post_init__(self) -> None:
        check_int("BlockCausal size", self.size, 1, "1 is the causal mask")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return k // size <= q // size for each pair."""
        return k // self.size <= q // self.size

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), (q // self.size + 1) * self.size)


@dataclass(frozen=True, eq=False)
class BlockDiffusion(Mask):
    """The mask for training a block diffusion model, on a noisy and a clean copy of each text.

    A text takes 2 * length positions: the noisy copy x_t, then the clean copy x_0. A noisy query
    sees its own noisy block, and the clean blocks before it; a clean query sees the clean blocks up
    to its own. One pass computes the loss of every block.

    A rotary embedding needs the position in the text instead, `position % length`.

    Args:
        size: positions per block.
        length: the number of tokens of the text, n; it need not be a multiple of size.

    Raises:
        ArgumentError, ArgumentTypeError: a size is no positive int, or there are too many keys.

    >>> from regard.span import Span
    >>> rows = BlockDiffusion(2, 4).block(Span(0, 8), Span(0, 8))[0, 0].int()
    >>> for row in rows[[0, 2, 4, 6]].tolist():  # the first token of each block
    ...     print(row)
    [1, 1, 0, 0, 0, 0, 0, 0]
    [0, 0, 1, 1, 1, 1, 0, 0]
    [0, 0, 0, 0, 1, 1, 0, 0]
    [0, 0, 0, 0, 1, 1, 1, 1]

    Source: Arriola et al. 2025 (arXiv 2503.09573), section 3.2 and appendix B.6.
    """

    why_hidden = ("outside the blocks of {}", "outside")

    size: int
    length: int

    def __post_init__(self) -> None:
        check_int("BlockDiffusion size", self.size, 1)
        check_int("BlockDiffusion length", self.length, 1, "the number of tokens of the text")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the union of the masks M_BD, M_OBC and M_BC of the paper."""
        n = self.length
        q_clean, k_clean = q >= n, k >= n
        q_block, k_block = (
            torch.where(clean, x - n, x) // self.size for x, clean in ((q, q_clean), (k, k_clean))
        )
        own_block = (q_block == k_block) & (q_clean == k_clean)
        finished_blocks = (k_block < q_block) & k_clean
        inside = (q >= 0) & (q < 2 * n) & (k >= 0) & (k < 2 * n)
        return (own_block | finished_blocks) & inside

    def _intervals(self, q: Tensor) -> Intervals:
        n = self.length
        clean = q >= n
        start = torch.where(clean, q - n, q) // self.size * self.size
        stop = (start + self.size).clamp(max=n)
        empty = torch.full_like(q, n)
        outside = (q < 0) | (q >= 2 * n)
        finished = torch.where(clean, stop, start).masked_fill(outside, 0)
        starts = torch.cat([torch.where(clean | outside, empty, start), empty], -1)
        stops = torch.cat([torch.where(clean | outside, empty, stop), n + finished], -1)
        return Intervals(starts, stops)

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the two copies cover all keys of the call."""
        if 2 * self.length < S:
            raise ArgumentError(
                f"BlockDiffusion covers two copies of {plural(self.length, 'token')}, but there "
                f"are {plural(S, 'key')}; give length={-(-S // 2)}, the number of tokens of the "
                "text without its copy"
            )
