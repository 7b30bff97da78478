"""Caches: they store keys and values (or other memory) of earlier tokens, together with positions.

A cache stores the tensors that a projection returns from `remember`, and returns all that are
visible with their positions. A recurrence stores a `State`: it reads the state, computes, and
stores the next one. A cache that `generate(cache=)` offers has a `kind` and creates itself for a
layer (`for_layer`). A cache belongs to one thread at a time; forks may be used by several.

A static form (`to_static`) is for a step that is captured as a CUDA graph: memory that stays where
it is, a position for each slot, and no number of Python that changes; what has none says why
(`static_step_refusal`). Layers that share memory, or the values of the first layer, get what that
layer's cache returned in the same call (`shared`), never the cache itself. An eviction rule
(`eviction`) scores the tokens of a full cache by keys, by the weights of all queries so far, or by
those of the last ones; when it evicts depends on the tokens read, not on the calls. Memory in
another form than `[B, G, S, d]` (codes, pages) is a `LazyTensor`: a kernel may read it as it is
stored, and any other operation computes the values, once.
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
from regard.caches.quantized import Quantized
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
