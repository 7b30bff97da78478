"""Caches: they store what a projection remembers, together with its positions, and give both
back.
"""

from regard.caches.base import CACHES, Cache, Contents, LayerSize, Parts, kept, that_keeps_all
from regard.caches.contiguous import Fixed, Growing
from regard.caches.cross import Cross
from regard.caches.files import load, save
from regard.caches.latent import Latent
from regard.caches.paged import Paged, Pool
from regard.caches.quantised import Quantised
from regard.caches.ring import Ring, Streaming, for_reach
from regard.caches.state import Memory, State
from regard.registry import import_all

__all__ = [
    "CACHES",
    "Cache",
    "Contents",
    "Cross",
    "Fixed",
    "Growing",
    "Latent",
    "LayerSize",
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

# a cache in a file of its own is found without a line here
import_all(__name__, __path__)
