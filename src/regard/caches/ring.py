"""The cache of a windowed mask: the last tokens of each row, in a ring of slots."""

from __future__ import annotations

from typing import Any

from regard.caches.rolling import Rolling
from regard.errors import ArgumentError


class Ring(Rolling):
    """Hold the last `window + rewind` positions of each row: slot = position % (window + rewind).

    It is exact for masks that let a query see at most `window` keys looking back, its own included, such as
    `masks.Causal() & masks.Window(window)`. During an update everything that a query of the chunk may see is visible,
    however long the chunk is; after it no more than the ring is held. A slot at position -1 is not stored, so that rows
    may have any padding and any length. A step of at most rewind + 1 tokens is written into the ring and answered by it
    without a copy: what was given out is valid until the next update.

    Args:
        window: how many keys a query may see.
        rewind: how many tokens more are held, so that a crop may take back rewind + 1 tokens, and a step of as many
            (speculative decoding) is written without a copy.

    Raises:
        ArgumentError: window is less than 1 or rewind less than 0; an update does not fit what is held, or its positions do
            not lie behind those held; a crop needs tokens that are lost. The cache is left as it was.

    >>> import torch
    >>> from regard.span import Span
    >>> cache = Ring(4)
    >>> (memory,), positions = cache.update((torch.zeros(1, 2, 9, 8),), Span(0, 9))
    >>> memory.shape, positions  # a chunk is visible as a whole
    (torch.Size([1, 2, 9, 8]), Span(start=0, length=9))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 8),), Span(9, 1))
    >>> positions.tolist(), cache.bytes
    ([[8, 9, 6, 7]], 256)

    Source: the rolling buffer cache of Jiang et al. 2023 (arXiv 2310.06825), section 2.
    """

    def __init__(self, window: int, *, rewind: int = 0) -> None:
        if window < 1 or rewind < 0:
            raise ArgumentError(
                f"Ring(window={window}, rewind={rewind}): window must be at least 1 and rewind at least 0"
            )
        super().__init__(0, window, rewind)

    @property
    def settings(self) -> dict[str, Any]:
        """Window and rewind."""
        return {"window": self.window, "rewind": self.rewind}
