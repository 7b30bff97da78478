"""Caches: they store what a projection remembers, together with its positions, and give both back."""

from regard.caches.base import Cache, Contents, Memory, kept
from regard.caches.growing import Growing
from regard.caches.state import State
from regard.masks.reach import Reach


def for_reach(reach: Reach) -> Cache:
    """An empty cache that holds the old tokens within reach of a mask."""
    return Growing()


__all__ = ["Cache", "Contents", "Growing", "Memory", "State", "for_reach", "kept"]
