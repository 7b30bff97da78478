"""Which cache suits a mask: one that forgets what no later query can see."""

from __future__ import annotations

from regard.caches.base import Cache
from regard.caches.growing import Growing
from regard.caches.ring import Ring
from regard.caches.streaming import Streaming
from regard.masks import Reach


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
