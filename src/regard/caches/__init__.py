"""Caches: they store what a projection remembers, together with its positions, and give both
back.
"""

from regard.caches.base import Cache, Contents, Parts, kept
from regard.caches.choose import for_reach, that_keeps_all
from regard.caches.cross import Cross
from regard.caches.files import load, save
from regard.caches.fixed import Fixed
from regard.caches.growing import Growing
from regard.caches.latent import Latent
from regard.caches.paged import Paged, Pool
from regard.caches.quantised import Quantised
from regard.caches.ring import Ring, Streaming
from regard.caches.state import Memory, State

__all__ = [
    "Cache",
    "Contents",
    "Cross",
    "Fixed",
    "Growing",
    "Latent",
    "Memory",
    "Paged",
    "Parts",
    "Pool",
    "Quantised",
    "Ring",
    "State",
    "Streaming",
    "for_reach",
    "kept",
    "load",
    "save",
    "that_keeps_all",
]
