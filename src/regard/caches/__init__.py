"""Caches: they store what a projection remembers, together with its positions, and give both
back.
"""

from typing import Any

from regard.caches.base import (
    CACHES,
    Cache,
    Contents,
    LayerSize,
    Parts,
    rollback_on_error,
    that_keeps_all,
)
from regard.caches.contiguous import Fixed, Growing
from regard.caches.cross import Cross
from regard.caches.latent import Latent
from regard.caches.paged import Paged, Pool
from regard.caches.quantized import Quantised
from regard.caches.ring import Ring, Streaming, for_reach
from regard.caches.save_load import load, save
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
    "load",
    "rollback_on_error",
    "save",
    "that_keeps_all",
]

# a cache in a file of its own is found without a line here
import_all(__name__, __path__)


def __getattr__(name: str) -> Any:
    """Old names, for one release."""
    if name == "kept":
        from warnings import warn

        warn("regard.caches.kept is now rollback_on_error", DeprecationWarning, stacklevel=2)
        return rollback_on_error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
