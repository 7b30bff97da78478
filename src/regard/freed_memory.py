"""Memory that the process has freed and the C library keeps: it is given back to the system."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """Return the function of the C library, or None where it has none (all but glibc)."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def give_back_freed_memory() -> None:
    """Give freed memory back to the system (glibc): freed tensors leave holes in the heap."""
    trim = _trim()
    if trim is not None:
        trim(0)
