"""What CPU kernels are compiled from: Numba, pure Python source, no thread of Numba's own."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_numba() -> bool:
    """Whether Numba can be imported; nothing is imported to know it."""
    return importlib.util.find_spec("numba") is not None
