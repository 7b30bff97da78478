"""Which cache suits a mask: one that forgets what no later query can see. Which one a user asks
for, by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.caches.base import Cache
from regard.caches.fixed import Fixed
from regard.caches.growing import Growing
from regard.caches.paged import Paged
from regard.caches.quantised import Quantised
from regard.caches.ring import Ring, Streaming
from regard.errors import ArgumentError
from regard.masks import Reach

PAGE = 16
"""Tokens per page of a paged cache that is asked for by name."""


def for_reach(reach: Reach) -> Cache:
    """An empty cache that holds the old tokens within reach of a mask.

    >>> from regard.masks import Causal, Sinks, Window, reach
    >>> cache = for_reach(reach(Causal() & (Window(8) | Sinks(4))))
    >>> type(cache).__name__, cache.settings
    ('Streaming', {'sinks': 4, 'recent': 8, 'rewind': 0})
    """
    if reach.window is None:
        return Growing()
    # a query may see nothing but sinks: a ring of one slot still tells where the next token stands
    window = max(1, reach.window)
    return Streaming(reach.sinks, window) if reach.sinks else Ring(window)


def that_keeps_all(
    kind: str, slots: int | None = None, *, rows: int = 1, widths: Sequence[int] = ()
) -> Cache:
    """An empty cache that keeps every token, of a kind by its name.

    Args:
        kind: "growing", "fixed", "paged", or "quantised": 8 bits, but for the last 128 slots.
        slots: the most of a row, for "fixed" and "paged".
        rows: of the batch: a paged cache has pages for all of them.
        widths: for "quantised", the dims of each part of the memory. The first of several is taken
            for keys, with scales per channel; all others have scales per token, in groups of at
            most 32 channels, which must divide them.

    Raises:
        ArgumentError: the kind is unknown, or lacks its slots.

    >>> that_keeps_all("paged", 100, rows=2).settings
    {'page_size': 16, 'pages': 14}
    >>> that_keeps_all("quantised", widths=(80, 80)).settings["group"]
    20
    """
    if kind == "growing":
        return Growing()
    if kind == "quantised":
        axes = ["channel" if i == 0 and len(widths) > 1 else "token" for i in range(len(widths))]
        tokens = [width for width, axis in zip(widths, axes, strict=True) if axis == "token"]
        group = max(g for g in range(1, 33) if all(w % min(g, w) == 0 for w in tokens))
        return Quantised(8, group=group, axes=axes)
    if kind not in ("fixed", "paged"):
        raise ArgumentError(f"kind is {kind!r}; it must be growing, fixed, paged or quantised")
    if slots is None:
        raise ArgumentError(f"a {kind} cache needs slots, the most that a row holds")
    return Fixed(slots) if kind == "fixed" else Paged(PAGE, rows * -(-slots // PAGE))
