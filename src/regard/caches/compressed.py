"""`Compressed`, the cache of entries that stand for closed blocks of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from regard.caches.contiguous import Growing
from regard.caches.joined import Joined
from regard.caches.ring import Ring
from regard.caches.state import Memory


class Compressed(Joined):
    """A cache of one entry for each closed block of tokens, of the tokens of the open block, and of
    the last tokens of a window.

    Block i has the positions i m to (i + 1) m - 1 of every row, and is closed once its last
    position was passed. A module updates the three parts. `crop` can go back to the start of the
    open block; earlier tokens are in the entries only.

    Args:
        block: m, the number of positions per block.
        window: how many last tokens `recent` keeps.
        overlap: how many closed blocks before the open one keep their tokens, for entries that
            overlap.

    Attributes:
        recent: a `Ring` of the keys and values of the window.
        open: a `Memory` of what entries are computed from.
        entries: a `Growing` cache, in which the position of an entry is the number of its block.

    Raises:
        ArgumentError, ArgumentTypeError: a size is out of range, or a crop is refused.

    >>> import torch
    >>> from regard import Span
    >>> cache = Compressed(4, 8)
    >>> _ = cache.open.update((torch.zeros(1, 1, 6, 2),), Span(0, 6))
    >>> cache.open.store((), Span(0, 6))
    >>> cache.open.closed, len(cache.open)
    (1, 2)
    """

    parts: tuple[Ring, Memory, Growing]

    savable: ClassVar[bool] = True
    static_step_refusal: ClassVar[str | None] = (
        "a step that closes a block adds an entry, and Python has to know when"
    )

    def __init__(self, block: int, window: int, overlap: int = 0) -> None:
        super().__init__((Ring(window), Memory(block, overlap), Growing()))
        self.block, self.window, self.overlap = block, window, overlap

    @property
    def recent(self) -> Ring:
        """The keys and values of the window."""
        return self.parts[0]

    @property
    def open(self) -> Memory:
        """What the entries of blocks that are not closed yet will be computed from."""
        return self.parts[1]

    @property
    def entries(self) -> Growing:
        """The entries of all closed blocks."""
        return self.parts[2]

    @property
    def settings(self) -> Mapping[str, object]:
        """The sizes of the blocks and of the window."""
        return {"block": self.block, "window": self.window, "overlap": self.overlap}

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later, if all of them are in the open
        block.
        """
        self.open.fork().crop(length)  # raises what it would raise
        self.recent.crop(length)
        self.open.crop(length)
        self.entries.crop(length // self.block)
