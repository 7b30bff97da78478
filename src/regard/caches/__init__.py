"""Caches store keys and values (or other memory) of earlier tokens, together with positions.

A cache stores the tensors that a projection returns from `remember`, and returns all that are
visible with their positions; a recurrence stores a `State`. A cache that `generate(cache=)` offers
has a `kind`. A cache belongs to one thread at a time; forks may be used by several.

A static form (`to_static`) keeps its memory for a step captured as a CUDA graph. Layers that share
memory get what the other layer's cache returned in the same call (`shared`). When an eviction rule
(`eviction`) evicts depends on the tokens read, not on the calls. Codes and pages are a
`LazyTensor`: a kernel may read the stored form, and any other operation computes the values.
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
from regard.caches.compressed import Compressed
from regard.caches.contiguous import Cross, Fixed, Growing, Latent
from regard.caches.cross_layer import CrossLayer
from regard.caches.eviction import Evicting
from regard.caches.float8 import Float8
from regard.caches.paged import Paged, PagePool
from regard.caches.quantized import Quantized
from regard.caches.ring import Ring, Streaming, for_reach
from regard.caches.save_load import load, save
from regard.caches.state import Memory, State
from regard.registry import import_all

__all__ = [
    "CACHES",
    "BoundedPages",
    "Cache",
    "Compressed",
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
    "Quantized",
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
