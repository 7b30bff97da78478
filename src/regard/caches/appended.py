"""Memory that grows at its end: written in place while there is room."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from regard.caches.buffers import put
from regard.pages import empty_like


class Appended:
    """Slots [B,n,L,...] that were appended one after another, with room behind them.

    Appending copies what is new; where the room is used up, all of it once, into memory with more. So a step copies O(1)
    slots. What was given out keeps its values until an `Appended` that is shorter is appended to.

    Args:
        memory: the first slots; they are held, not copied.
        length: how many of them count; None is all.
        inner: whether the numbers of one line lie side by side over the slots [B,n,L,lines,1]: loops over slots are faster.

    >>> held = Appended(torch.zeros(1, 1, 2, 1)).append(torch.ones(1, 1, 1, 1), room=5)
    >>> held.view.flatten().tolist(), held.append(held.view).view.flatten().tolist()
    ([0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    """

    def __init__(self, memory: Tensor, length: int | None = None, *, inner: bool = False) -> None:
        if inner and length is None:
            memory = memory.transpose(2, 3).contiguous().transpose(2, 3)
        self._memory, self._inner = memory, inner
        self.length = memory.shape[2] if length is None else length

    @property
    def view(self) -> Tensor:
        """The slots, without the room behind them."""
        return self._memory[:, :, : self.length]

    def append(self, new: Shaped[Tensor, "B n T ..."], *, room: int | None = None) -> Appended:
        """These slots, and new ones behind them.

        Args:
            new: of the same sizes, but for the length.
            room: slots to make room for beyond the new ones, when there is none left; None is a quarter of those held.
        """
        start, stop = self.length, self.length + new.shape[2]
        if start == stop:
            return self
        if torch.is_grad_enabled() and (new.requires_grad or self._memory.requires_grad):
            return Appended(torch.cat([self.view, new], dim=2))
        memory = self._memory
        if stop > memory.shape[2]:
            room = stop // 4 if room is None else room
            memory = self._empty(stop + room)
            memory[:, :, :start] = self.view
        (memory,) = put((memory,), (new,), start)
        return Appended(memory, stop, inner=self._inner)

    def cut(self, length: int) -> Appended:
        """The first slots."""
        return Appended(self._memory, length, inner=self._inner)

    def _empty(self, slots: int) -> Tensor:
        B, n, _, *rest = self._memory.shape
        if self._inner:
            return empty_like(self._memory, (B, n, rest[0], slots, *rest[1:])).transpose(2, 3)
        return empty_like(self._memory, (B, n, slots, *rest))
