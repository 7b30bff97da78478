"""The decorators that compile a function with Numba, the on-disk cache of compiled code, and the
processor features that loops may use.

Numba stores compiled code in `__pycache__` (or in NUMBA_CACHE_DIR). Here each compiled function is
stored with the stamp of its module (`source_stamps`), so that a changed loop is always compiled
again, together with every function that uses it. The code of an entry is stored in a file of its
own (`code_files`), which a process loads without Numba.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

from regard.ops.jit.code_files import is_ours
from regard.ops.jit.linked_functions import LinkedFunction
from regard.ops.jit.source_stamps import source_stamp


class _StampedCache(FunctionCache):  # type: ignore[misc, unused-ignore]
    """Numba's on-disk cache of a function, which is valid as long as the function's source stamp is
    unchanged.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        base: str = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)


def disk_cache(function: Callable[..., Any], stamp: str) -> Any:
    """Return the on-disk cache for the compiled code of a function, or a cache that stores
    nothing if no folder is writable, or if others may write it.
    """
    try:
        stamped = _StampedCache(function, stamp)
    except RuntimeError:  # Numba: "no locator available"
        return NullCache()
    return stamped if is_ours(Path(stamped.cache_path)) else NullCache()


def _options(fastmath: Collection[str], makes_arrays: bool) -> dict[str, Any]:  # noqa: FBT001
    """Return the options of `numba.njit` for all loops: without the interpreter lock, with numpy's
    rules of division.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if not makes_arrays:
        options["_nrt"] = False
    if fastmath:
        options["fastmath"] = set(fastmath)
    return options


def njit_cached(
    *, fastmath: Collection[str] = (), makes_arrays: bool = True
) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function with Numba: without the interpreter lock, with
    numpy's rules of division, and cached on disk under the stamp of its module.

    Args:
        fastmath: the LLVM fast-math flags. `reassoc` allows reordering additions, which a
            vectorized sum needs.
        makes_arrays: whether the function allocates arrays. With False Numba omits the reference
            counts of arrays: otherwise each slice that is passed on is counted by two atomic
            instructions, which took a quarter of the time of prefill. Such a function returns no
            slices either.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**_options(fastmath, makes_arrays))(function)
        dispatcher._cache = disk_cache(function, source_stamp(function.__module__))
        return dispatcher

    return decorate


def njit_linked(
    *, fastmath: Collection[str] = (), makes_arrays: bool = True
) -> Callable[[Any], Any]:
    """Return a decorator for a function that other compiled functions call, as a part of which it
    is compiled (`linked_functions`). It has the arguments of `njit_cached`, which also compiles it
    where Python calls it.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        ordinary = njit_cached(fastmath=fastmath, makes_arrays=makes_arrays)
        return LinkedFunction(
            function, _options(fastmath, makes_arrays), partial(ordinary, function)
        )

    return decorate


njit_strict = njit_linked()
"""Decorator: compile a function without fast-math flags, for integers and positions, and for
floating-point sums whose order matters.
"""

FASTMATH_FLAGS = ("contract", "reassoc", "nsz")
"""The LLVM fast-math flags of most loops: they allow fused multiply-add and sums in any order, and
do not distinguish -0 from 0.
"""

njit_fastmath = njit_linked(fastmath=FASTMATH_FLAGS)
"""Decorator: compile a loop over floating-point numbers with `FASTMATH_FLAGS`."""

njit_strict_no_arrays = njit_linked(makes_arrays=False)
njit_fastmath_no_arrays = njit_linked(fastmath=FASTMATH_FLAGS, makes_arrays=False)
"""The same decorators for functions that work in arrays of their callers and make none."""


def has_cpu_feature(feature: str) -> bool:
    """Return whether loops may use the instructions of a processor feature: LLVM reports it for
    this processor, and Numba is not configured to compile for another one. An instruction that
    the processor lacks would end the process.

    >>> has_cpu_feature("no such feature")
    False
    """
    settings: Any = config
    if {settings.CPU_NAME, settings.CPU_FEATURES} - {None, "", "host"} or not settings.ENABLE_AVX:
        return False
    return bool(binding.get_host_cpu_features().get(feature))
