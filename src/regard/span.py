"""Positions of queries and keys, absolute indices: an integer tensor, with `EMPTY` (-1) for a slot
without a token, or a contiguous `Span`, which says without reading how they are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from regard.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMPTY = -1
"""The position of a slot without a token."""


@dataclass(frozen=True)
class Span:
    """The positions start, start + 1, ..., start + length - 1, the same for every batch row.

    A position below 0 is a slot without a token, unless `tokens` is True, as where no positions are
    given and there are more queries than keys: the first queries are tokens before every key, which
    see nothing under a causal mask, and everything without one.

    Args:
        start: the first position; it may be negative.
        length: the number of positions.
        tokens: whether negative positions are tokens.

    Raises:
        ArgumentError: `length` is negative.

    >>> Span(3, 4).stop
    7
    >>> Span(3, 4).tensor().tolist()
    [[3, 4, 5, 6]]
    """

    start: int
    length: int
    tokens: bool = False

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ArgumentError(f"Span length is {self.length}; it must be 0 or more")

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.length

    @property
    def all_tokens(self) -> bool:
        """Whether every position is a token, and none an empty slot."""
        return self.tokens or self.start >= 0

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Span(start={self.start}, length={self.length}{', tokens=True' * self.tokens})"

    def __getitem__(self, part: slice) -> Span:
        if part.step not in (None, 1):
            raise ArgumentError(f"a Span takes slices of step 1, not {part.step}")
        # slice.indices would make a compiled graph specialize on the length
        start = 0 if part.start is None else _index(part.start, self.length)
        stop = self.length if part.stop is None else _index(part.stop, self.length)
        return Span(self.start + start, max(0, stop - start), self.tokens)

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions as a tensor.

        Args:
            device: the device of the tensor; None is the CPU.

        Returns:
            An int64 tensor `[1, length]`.
        """
        import torch

        # without a device torch would take its default one
        return torch.arange(self.start, self.stop, device=device or "cpu")[None]


Positions: TypeAlias = "Span | Tensor"
"""A `Span`, or an integer tensor `[B or 1, L]` of positions, `EMPTY` without a token."""


def _index(i: int, length: int) -> int:
    """Convert one end of a slice to an index from 0 to length, as Python does."""
    return min(i, length) if i >= 0 else max(i + length, 0)


def as_tensor(positions: Positions, device: torch.device | str | None = None) -> Tensor:
    """Return positions as an integer tensor `[B or 1, L]`."""
    return positions.tensor(device) if isinstance(positions, Span) else positions


def slice_positions(positions: Positions, where: slice) -> Positions:
    """Return the positions of a slice of the slots."""
    return positions[where] if isinstance(positions, Span) else positions[:, where]


def find_empty_slots(
    positions: Positions, device: torch.device | str | None = None
) -> Tensor | None:
    """Return which slots hold no token, bool `[B or 1, L]`; None, known unread, is no such."""
    if isinstance(positions, Span) and (positions.all_tokens or not positions.length):
        return None
    tensor = as_tensor(positions, device)
    return (tensor if device is None else tensor.to(device)) <= EMPTY


def slot_count(positions: Positions) -> int:
    """Return the number of slots."""
    return positions.length if isinstance(positions, Span) else positions.shape[-1]


def concat_positions(old: Positions, new: Positions) -> Positions:
    """Return the positions of two groups of slots: a `Span` if both are and join, else a tensor.

    >>> concat_positions(Span(0, 3), Span(3, 2))
    Span(start=0, length=5)
    """
    if isinstance(old, Span) and isinstance(new, Span) and old.stop == new.start:
        return Span(old.start, old.length + new.length)
    import torch

    device = next((p.device for p in (old, new) if not isinstance(p, Span)), None)
    first, second = as_tensor(old, device), as_tensor(new, device)
    rows = second.shape[0] if first.shape[0] == 1 else first.shape[0]
    return torch.cat([first.expand(rows, -1), second.expand(rows, -1)], dim=1)


def next_positions(positions: Positions, length: int) -> Positions:
    """Return the `length` positions after the last token of each row; slots at -1 are ignored."""
    if isinstance(positions, Span):
        return Span(positions.stop if positions.length else max(0, positions.start), length)
    import torch

    steps = torch.arange(length, device=positions.device)
    if not positions.shape[1]:
        return Span(0, length)
    following = positions.amax(1, keepdim=True).clamp(min=-1) + 1 + steps
    if not torch.compiler.is_dynamo_compiling():
        setattr(following, _FOLLOWS, True)
    return following


_FOLLOWS = "_regard_follows"
"""The attribute of a tensor that `next_positions` made."""


def follow_by_construction(positions: Positions) -> bool:
    """Return whether it is known without reading a tensor that every slot holds a token, at a
    position behind those that a cache holds: `next_positions` computed them from the cache.

    >>> import torch
    >>> stored = torch.tensor([[-1, 0], [0, 1]])
    >>> follow_by_construction(next_positions(stored, 1)), follow_by_construction(stored)
    (True, False)
    """
    return getattr(positions, _FOLLOWS, False) is True
