"""Caches: they store what a projection remembers, together with its positions, and give both back."""

from regard.caches.base import Cache
from regard.caches.growing import Growing

__all__ = ["Cache", "Growing"]
