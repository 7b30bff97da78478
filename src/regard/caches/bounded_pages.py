"""`BoundedPages`, which keeps all tokens and the bounds of the keys of each page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.caches.base import OpenSlot, bytes_of
from regard.caches.contiguous import Growing
from regard.errors import ArgumentError
from regard.span import Positions, Span

PAGE_SIZE = 16
"""The number of positions per page of "quest", as in arXiv 2406.10774, section 4.1."""


class BoundedPages(Growing):
    """A cache of all tokens with the bounds of each page of keys (Quest).

    Page i has the positions i size to (i + 1) size - 1. While the positions of all rows are one
    run, only the bounds of pages with new tokens are computed again. Which pages a query reads is
    decided by the layer, such as the mechanism "quest"; for generation, `kind` "quest" gives such
    layers.

    Args:
        size: the number of positions per page.

    Raises:
        ArgumentError: size is less than 1; an update does not fit the contents.

    >>> cache = BoundedPages(2)
    >>> k = torch.tensor([[1.0, 5.0], [3.0, -2.0], [0.0, 1.0]])[None, None]
    >>> _ = cache.update((k, k), Span(0, 3))
    >>> low, high = cache.bounds()
    >>> low.tolist(), cache.bytes
    ([[[[1.0, -2.0], [0.0, 1.0]]]], 80)

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3.
    """

    kind: ClassVar[str | None] = "quest"
    evicts: ClassVar[bool] = True
    min_context: ClassVar[int] = 2 * PAGE_SIZE
    static_step_refusal: ClassVar[str | None] = (
        "the bounds of its pages are tables that grow with the number of tokens"
    )

    def __init__(self, size: int = PAGE_SIZE) -> None:
        if size < 1:
            raise ArgumentError(f"BoundedPages size is {size}; it must be at least 1")
        super().__init__()
        self.size = size
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._counted = 0  # how many slots the bounds cover

    @property
    def bytes(self) -> int:
        """Bytes of the memory and of the bounds that are held."""
        return super().bytes + bytes_of(self._bounds or ())

    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Return the bounds of all pages, of the first part of the memory.

        Returns:
            The smallest and largest numbers, each `[B, n, N, d]`, from the first position's page
            on; None if the positions are no `Span`, or the cache is empty.
        """
        positions = self._positions
        if not self._memory or not isinstance(positions, Span) or positions.start < 0:
            self._bounds = None
            return None
        if not positions.length:
            return None
        keys = self._memory[0].detach()
        old, page = self._bounds, 0
        if old is not None and self._counted <= positions.length:
            # the page of the next token may have been incomplete
            page = (positions.start + self._counted) // self.size - positions.start // self.size
        first = max(0, (positions.start // self.size + page) * self.size - positions.start)
        new = _page_bounds(keys[:, :, first:], (positions.start + first) % self.size, self.size)
        if old is not None and page:
            low, high = (torch.cat([x[:, :, :page], y], 2) for x, y in zip(old, new, strict=True))
            new = low, high
        self._bounds, self._counted = new, positions.length
        return new

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the parts and their positions; the bounds are computed again."""
        self._bounds = None
        super().fill(contents)

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later; the bounds are computed again."""
        self._bounds = None
        super().crop(length)

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return None, because a compiled step would not know the bounds."""
        return None


def _page_bounds(keys: Tensor, before: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of consecutive keys [B,n,S,d], the first at `before` of its page."""
    S = keys.shape[2]
    after = -(before + S) % size

    def filled(value: float) -> Tensor:
        padded = F.pad(keys, (0, 0, before, after), value=value)
        return torch.unflatten(padded, 2, (-1, size))

    return filled(torch.inf).amin(3), filled(-torch.inf).amax(3)
