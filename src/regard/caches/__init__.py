"""Caches: they store what a projection remembers, together with its positions, and give both back."""

from regard.caches.base import Cache, Contents, Parts, kept
from regard.caches.choose import for_reach
from regard.caches.growing import Growing
from regard.caches.state import State

__all__ = ["Cache", "Contents", "Growing", "Parts", "State", "for_reach", "kept"]
