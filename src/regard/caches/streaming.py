"""The cache of attention sinks: the first tokens for ever, and the last ones."""

from __future__ import annotations

from typing import Any

from regard.caches.rolling import Rolling
from regard.errors import ArgumentError


class Streaming(Rolling):
    """Hold the first `sinks` positions of each row, and the last `recent + rewind` ones in a ring.

    It is exact for `masks.Causal() & (masks.Window(recent) | masks.Sinks(sinks))`. Positions stay what they were: a module
    that renumbers tokens by their place in the cache, as StreamingLLM does, does so when it recalls them. Chunks, padding
    and steps are as in `Ring`.

    Args:
        sinks: how many first positions are never forgotten.
        recent: how many keys a query may see looking back, its own included.
        rewind: as in `Ring`.

    Raises:
        ArgumentError: sinks or rewind is less than 0 or recent less than 1; or as `Ring`.

    >>> import torch
    >>> from regard.span import Span
    >>> cache = Streaming(sinks=2, recent=3)
    >>> _ = cache.update((torch.zeros(1, 2, 9, 8),), Span(0, 9))
    >>> (memory,), positions = cache.update((torch.ones(1, 2, 1, 8),), Span(9, 1))
    >>> positions.tolist()
    [[0, 1, 8, 9, 7]]

    Source: Xiao et al. 2024 (arXiv 2309.17453), section 3.2.
    """

    def __init__(self, sinks: int, recent: int, *, rewind: int = 0) -> None:
        if sinks < 0 or recent < 1 or rewind < 0:
            raise ArgumentError(
                f"Streaming(sinks={sinks}, recent={recent}, rewind={rewind}): "
                "sinks and rewind must be at least 0 and recent at least 1"
            )
        super().__init__(sinks, recent, rewind)

    @property
    def settings(self) -> dict[str, Any]:
        """Sinks, recent and rewind."""
        return {"sinks": self._slots.sinks, "recent": self.window, "rewind": self.rewind}
