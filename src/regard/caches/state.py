"""The cache of mechanisms that keep a state in place of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from regard.caches.base import Cache, Contents, Parts, check_crop, memory_of, named
from regard.errors import ArgumentError
from regard.span import Positions, Span, as_tensor, count


class State(Cache):
    """Keep what a recurrence carries from one step to the next: tensors of a fixed size, whatever the length.

    A module reads `state`, computes, and calls `store(state, positions)` with the new one, which replaces the old: the
    cache never changes a tensor that it was given. A state cannot forget the last tokens, because it is a sum over all:
    `crop` is refused, unless it forgets everything or nothing; keep a `fork` to come back to.

    Raises:
        ArgumentError: a new state has other shapes than the old one, or a crop lies inside what was seen.

    >>> cache = State()
    >>> cache.store((torch.zeros(1, 2, 4, 4),), Span(0, 7))
    >>> cache.bytes, cache.next(1)
    (128, Span(start=7, length=1))
    """

    def __init__(self) -> None:
        self._state: Parts | None = None
        self._positions: Positions | None = None  # of the last token of each row: [B or 1, 1]

    @property
    def state(self) -> Parts | None:
        """The state, each part [B, ...]; None in front of the first token."""
        return self._state

    def store(self, state: Parts, positions: Positions) -> None:
        """Replace the state by the one behind the tokens at these positions."""
        if self._state is not None:
            old, new = ([(tuple(x.shape), x.dtype) for x in xs] for xs in (self._state, state))
            if old != new:
                raise ArgumentError(
                    f"state {new} does not fit what is held, {old}; start a new cache for another batch or model"
                )
        self._positions = self._last(positions)
        self._state = tuple(state)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Refused: a state holds no tokens."""
        raise ArgumentError(
            "a State cache keeps a recurrence's state, not tokens; give softmax attention a Growing, Fixed or Ring cache"
        )

    def crop(self, length: int) -> None:
        """Forget everything, or nothing: a sum cannot be taken back."""
        check_crop(length)
        if self._positions is None or length == 0:
            return self.reset()
        last = self._positions
        stop = last.stop if isinstance(last, Span) else int(last.max()) + 1
        if length < stop:
            raise ArgumentError(
                f"crop to {length}, but the state has seen {stop} positions and cannot forget some of them; "
                "keep a fork() from before, or run the prompt again"
            )
        return None

    def contents(self) -> Contents:
        """The parts of the state, and the last position of each row."""
        if self._state is None or self._positions is None:
            return {}
        return {**named(self._state, "state"), "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold this state."""
        positions = contents.get("positions")
        self._state = memory_of(contents, "state") if contents else None
        self._positions = None if isinstance(positions, int) else positions

    def __len__(self) -> int:
        """1 if a state is held, else 0: its size does not depend on the tokens seen."""
        return int(self._state is not None)

    def _last(self, positions: Positions) -> Positions:
        """The last position of each row, of what is held and of what is new."""
        held = self._positions
        if isinstance(positions, Span) and (held is None or isinstance(held, Span)):
            if not positions.length:
                return held if held is not None else Span(-1, 0)
            return Span(positions.stop - 1, 1)
        new = as_tensor(positions)
        if held is not None:
            old = as_tensor(held, new.device)
            rows = max(old.shape[0], new.shape[0])
            new = torch.cat([old.expand(rows, -1), new.expand(rows, -1)], 1)
        return new.amax(1, keepdim=True) if count(new) else new.new_full((new.shape[0], 1), -1)
