"""Caches of fixed size: `State` for recurrences, `Memory` for compressive memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    StaticSize,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.caches.static import StaticForm
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_compiling
from regard.span import (
    EMPTY,
    Positions,
    Span,
    as_tensor,
    concat_positions,
    follow_by_construction,
    next_positions,
    slot_count,
)
from regard.units import plural


class State(Cache):
    """A cache for the state of a recurrence: tensors of a fixed size, independent of the length.

    A module reads `state`, computes, and calls `store(state, positions)`, which replaces it; no
    given tensor is changed. `crop` raises unless it removes everything or nothing: to go back, keep
    a `fork`.

    Raises:
        ArgumentError: a new state has other shapes, or a crop would remove some tokens.

    >>> cache = State()
    >>> cache.store((torch.zeros(1, 2, 4, 4),), Span(0, 7))
    >>> cache.bytes, cache.next(1)
    (128, Span(start=7, length=1))
    """

    crop_is_exact: ClassVar[bool] = False
    static_step_refusal: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._state: Parts | None = None
        self._positions: Positions | None = None  # last position of each row, [B or 1, 1]

    @property
    def state(self) -> Parts | None:
        """The state, each part `[B, ...]`; None before the first token."""
        return self._state

    def store(self, state: Parts, positions: Positions) -> None:
        """Replace the state.

        Args:
            state: the new state, each part `[B, ...]`.
            positions: the positions of the tokens that were added to it.
        """
        self._check_sizes(state)
        self._positions = self._last(positions)
        self._state = tuple(state)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Raise, because a state does not store tokens."""
        raise ArgumentError(
            "a State cache keeps a recurrence's state, not tokens; give softmax attention a "
            "Growing, Fixed or Ring cache"
        )

    def crop(self, length: int) -> None:
        """Remove everything or nothing; a sum over tokens cannot be undone in part."""
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        last = self._positions
        stop = last.stop if isinstance(last, Span) else int(last.max()) + 1
        if length < stop:
            raise ArgumentError(
                f"crop to {length}, but the state sums over {plural(stop, 'position')}, and a part "
                "of the sum cannot be removed; keep an earlier fork(), or run the prompt again"
            )
        return None

    def contents(self) -> Contents:
        """Return the parts of the state, and the last position of each row."""
        if self._state is None or self._positions is None:
            return {}
        return {**named_parts(self._state, "state"), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the state and the last position of each row."""
        positions = contents.get("positions")
        self._state = parts_of(contents, "state") if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def _to_static(self, size: StaticSize) -> Cache:
        static = StaticState(size)
        static.fill(self.contents())
        return static

    def __len__(self) -> int:
        """Return 1 if there is a state, else 0, whatever the number of tokens."""
        return int(self._state is not None)

    def _check_sizes(self, state: Parts) -> None:
        """Raise unless a state has the shapes and dtypes of the one that is stored, if any is."""
        stored = state if self._state is None else self._state
        old, new = ([(tuple(x.shape), x.dtype) for x in xs] for xs in (stored, state))
        if old != new:
            raise ArgumentError(
                f"state {new} does not fit the contents of the cache, {old}; start a "
                "new cache for another batch or model"
            )

    def _last(self, positions: Positions) -> Positions:
        """Return the last position of each row, over the old and the new positions."""
        stored = self._positions
        if isinstance(positions, Span) and (stored is None or isinstance(stored, Span)):
            if not positions.length:
                return stored if stored is not None else Span(-1, 0)
            return Span(positions.stop - 1, 1)
        new = as_tensor(positions)
        if stored is not None:
            old = as_tensor(stored, new.device)
            rows = max(old.shape[0], new.shape[0])
            new = torch.cat([old.expand(rows, -1), new.expand(rows, -1)], 1)
        return new.amax(1, keepdim=True) if slot_count(new) else new.new_full((new.shape[0], 1), -1)


class StaticState(StaticForm, State):
    """The static form of a `State`: the state and the last positions are overwritten in place."""

    def __init__(self, size: StaticSize) -> None:
        StaticForm.__init__(self)
        State.__init__(self)
        self.size = size
        self._last_position = torch.full(
            (size.rows, 1), EMPTY, dtype=torch.int64, device=size.device
        )
        self._positions = self._last_position

    def next(self, length: int) -> Positions:
        """Return the positions after the last token of each row, computed on the device."""
        return next_positions(self._last_position, length)

    def store(self, state: Parts, positions: Positions) -> None:
        """Overwrite the state with the state after one more token per row."""
        p = self._check_step(positions)
        self._write(state)
        self._last_position.copy_(p)

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the state and the last positions, in the same memory."""
        positions = contents.get("positions")
        if positions is None or isinstance(positions, int):
            for x in self._state or ():
                x.zero_()
            self._last_position.fill_(EMPTY)
        else:
            self._write(parts_of(contents, "state"))
            self._last_position.copy_(as_tensor(positions)[:, -1:])
        self._is_broken = False

    def _write(self, state: Parts) -> None:
        if self._state is None:
            self._state = tuple(x.clone(memory_format=torch.contiguous_format) for x in state)
            return
        self._check_sizes(state)
        for x, y in zip(self._state, state, strict=True):
            if x is not y:
                x.copy_(y)


STORED_POSITIONS = "held.positions"
"""The name in `contents` of the stored tokens' positions, beside each row's last one."""


class Memory(State):
    """A cache of the memory of all closed segments, and of the tokens of each row's open segment.

    A module calls `update(memory, positions)`, which returns all stored tokens; reads `state`; and
    calls `store(state, positions)` with the state after the segments that are closed now, whose
    tokens are dropped. Segment s has the positions s N to (s + 1) N - 1, and is closed once its
    last position was passed. `crop` can go back to the start of the open segment.

    Args:
        segment: N, the number of positions per segment.
        overlap: how many closed segments before the open one keep their tokens.

    Raises:
        ArgumentError, ArgumentTypeError: segment is not an int of at least 1; an update does not
            fit, or goes back; a crop would remove part of a closed segment.

    >>> cache = Memory(4)
    >>> _ = cache.update((torch.zeros(1, 2, 6, 8),), Span(0, 6))
    >>> cache.store((torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8)), Span(0, 6))
    >>> len(cache), cache.next(1), cache.bytes  # 2 tokens of 16 values, and a state of 2 x 8 x 9
    (2, Span(start=6, length=1), 704)
    """

    static_step_refusal: ClassVar[str | None] = (
        "a step that fills a segment drops its tokens, and Python has to know when"
    )

    def __init__(self, segment: int, overlap: int = 0) -> None:
        super().__init__()
        if isinstance(segment, bool) or not isinstance(segment, int):
            raise ArgumentTypeError(f"segment is {type(segment).__name__}; it must be an int")
        if segment < 1:
            raise ArgumentError(f"segment is {segment}; it must be at least 1")
        self.segment, self.overlap = segment, overlap
        self._tokens: Parts | None = None
        self._token_positions: Positions | None = None

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append tokens to the stored ones; return all tokens and their positions."""
        check_update(memory, positions)
        self._check_follows(positions)
        if self._tokens is not None and self._token_positions is not None:
            check_same_layout(self._tokens, memory)
            joined = zip(self._tokens, memory, strict=True)
            memory = tuple(torch.cat([old, new], dim=2) for old, new in joined)
            positions = concat_positions(self._token_positions, positions)
        self._tokens, self._token_positions = memory, positions
        return memory, positions

    def store(self, state: Parts, positions: Positions) -> None:
        """Replace the state by that of all closed segments, and drop their tokens."""
        super().store(state, positions)
        if self._tokens is not None and self._token_positions is not None:
            first = self._open_start() - self.overlap * self.segment
            compiling = is_compiling()  # changing lengths would cause recompilation
            if isinstance(self._token_positions, Span) and isinstance(first, int) and not compiling:
                start = min(
                    max(first - self._token_positions.start, 0), self._token_positions.length
                )
                self._tokens = tuple(m[:, :, start:] for m in self._tokens)
                self._token_positions = self._token_positions[start:]
            else:
                where = as_tensor(self._token_positions, self._tokens[0].device)
                self._tokens, self._token_positions = compact_slots(
                    self._tokens, where, where >= first, self._most_tokens
                )

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later, if all of them are in open segments."""
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        first, last = self._open_start(), _last_position(self._positions)
        if isinstance(first, int) and isinstance(last, int):
            need = first if last >= length else 0
        else:
            need = int(torch.where(torch.as_tensor(last >= length, device="cpu"), first, 0).max())
        if length < need:
            raise ArgumentError(
                f"crop to {length}, but the tokens before position {need} are in the memory and "
                "cannot be removed one by one; keep an earlier fork(), or run the prompt again"
            )
        if self._tokens is not None and self._token_positions is not None:
            remaining = positions_before(self._token_positions, length)
            if isinstance(remaining, Span):
                self._tokens = tuple(m[:, :, : remaining.length] for m in self._tokens)
                self._token_positions = remaining
            else:
                self._tokens, self._token_positions = compact_slots(
                    self._tokens, remaining, remaining >= 0, self._most_tokens
                )
        if isinstance(last, int):
            self._positions = Span(min(last, length - 1), 1)
        else:
            self._positions = last.clamp(max=length - 1)
        return None

    def contents(self) -> Contents:
        """Return the state, each row's last position, and the tokens of the open segments."""
        contents = super().contents()
        if self._tokens is not None and self._token_positions is not None:
            contents |= {**named_parts(self._tokens), STORED_POSITIONS: self._token_positions}
        return contents

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the state and the tokens."""
        super().fill(contents)
        positions = contents.get(STORED_POSITIONS)
        self._token_positions = None if isinstance(positions, int) else positions
        self._tokens = None if self._token_positions is None else parts_of(contents)

    @property
    def bytes(self) -> int:
        """Bytes of the state and of the stored tokens, without positions."""
        positions = self._token_positions
        position_bytes = (
            positions.numel() * positions.element_size() if isinstance(positions, Tensor) else 0
        )
        return super().bytes - position_bytes

    def __len__(self) -> int:
        return 0 if self._token_positions is None else slot_count(self._token_positions)

    @property
    def _most_tokens(self) -> int:
        """The largest number of tokens that a row keeps."""
        return (self.overlap + 1) * self.segment - 1

    @property
    def closed(self) -> int | Tensor:
        """The number of closed segments, of all rows or of each `[B or 1, 1]`."""
        if self._positions is None:
            return 0
        start = self._open_start()
        return start // self.segment

    def _open_start(self) -> int | Tensor:
        """Return the first position of each row's open segment."""
        assert self._positions is not None, "must be called after the first tokens"
        last = _last_position(self._positions)
        if isinstance(last, int):
            return (last + 1) // self.segment * self.segment
        return (last + 1).div(self.segment, rounding_mode="floor") * self.segment

    def _check_follows(self, positions: Positions) -> None:
        """Raise unless new positions come after the last one of each row."""
        if self._positions is None or not slot_count(positions):
            return
        last = _last_position(self._positions)
        costs_no_wait = isinstance(last, Tensor) and last.is_cpu
        if isinstance(positions, Span) and isinstance(last, int):
            back = positions.start <= last
        elif is_compiling() or (not costs_no_wait and follow_by_construction(positions)):
            return
        else:
            new = as_tensor(positions)
            back = bool(((new >= 0) & (new <= last)).any())
        if back:
            raise ArgumentError(
                f"positions {positions} include one that is not after the last position, {last}; a "
                "memory is written in the order of positions: give later ones, or start a new cache"
            )


def _last_position(positions: Positions) -> int | Tensor:
    """Return the last position of each row, -1 where there is none."""
    return max(positions.stop - 1, -1) if isinstance(positions, Span) else positions


def compact_slots(
    memory: Parts, positions: Tensor, keep: Tensor, most: int
) -> tuple[Parts, Tensor]:
    """Move the slots to keep, at most `most` per row, to the front, without reading in graphs."""
    keep, n = keep & (positions >= 0), most
    if not is_compiling() and keep.is_cpu:
        n = int(keep.sum(1).max()) if keep.numel() else 0
    order = keep.int().argsort(dim=1, descending=True, stable=True)[:, :n]
    where = positions.masked_fill(~keep, -1).gather(1, order)
    missing = (0, n - order.shape[1])

    def pick(m: Tensor) -> Tensor:
        index = order.to(m.device)[:, None, :, None].expand(m.shape[0], m.shape[1], -1, m.shape[3])
        return F.pad(m.gather(2, index), (0, 0, *missing))

    return tuple(pick(m) for m in memory), F.pad(where, missing, value=-1)
