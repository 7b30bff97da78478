"""Which cache suits a mask: one that forgets what no later query can see."""

from __future__ import annotations

from regard.caches.base import Cache
from regard.caches.growing import Growing
from regard.masks import Reach


def for_reach(reach: Reach) -> Cache:
    """An empty cache that holds the old tokens within reach of a mask."""
    if reach.window is None:
        return Growing()
    return Growing()
