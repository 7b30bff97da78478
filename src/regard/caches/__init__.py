"""Caches: they store keys and values (or other memory) of earlier tokens, together with
positions.
"""

from regard.caches.base import (
    CACHES,
    Cache,
    Contents,
    LayerSize,
    Parts,
    make_full_cache,
    rollback_on_error,
)
from regard.caches.bounded_pages import BoundedPages
from regard.caches.contiguous import Cross, Fixed, Growing, Latent
from regard.caches.cross_layer import CrossLayer
from regard.caches.eviction import Evicting
from regard.caches.float8 import Float8
from regard.caches.paged import Paged, PagePool
from regard.caches.quantized import Quantised
from regard.caches.ring import Ring, Streaming, for_reach
from regard.caches.save_load import load, save
from regard.caches.state import Memory, State
from regard.registry import import_all

__all__ = [
    "CACHES",
    "BoundedPages",
    "Cache",
    "Contents",
    "Cross",
    "CrossLayer",
    "Evicting",
    "Fixed",
    "Float8",
    "Growing",
    "Latent",
    "LayerSize",
    "Memory",
    "PagePool",
    "Paged",
    "Parts",
    "Quantised",
    "Ring",
    "State",
    "Streaming",
    "for_reach",
    "load",
    "make_full_cache",
    "rollback_on_error",
    "save",
]

# Caches in other files of this folder register without an entry here.
import_all(__name__, __path__)
