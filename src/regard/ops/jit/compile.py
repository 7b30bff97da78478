"""The decorators that compile a function with Numba, the on-disk cache of compiled code, and the
processor features that loops may use.

Numba stores compiled code in `__pycache__` (or in NUMBA_CACHE_DIR). It compiles a function again
when the file of the function changes, but not when another file changes whose functions were
inlined into it. Here each compiled function is stored with a stamp, `source_stamp`: a SHA-256 hash
of the sources of its module and of every module of this package that the module uses. A changed
loop is therefore always compiled again, together with every function that uses it, while a file
that is only copied or checked out again is not compiled again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

JIT_PACKAGE, JIT_FOLDER = __package__ or "", Path(__file__).parent
"""The full name of this package and the folder of its files."""


class SourceStamps:
    """Computes a hash for each module of a package from its source and the sources of the modules
    that it uses.

    A module is taken to use every module of the package whose full name occurs in its text, and the
    modules that those use. This finds every form of import, so that outdated code is never used. A
    full name in a comment counts as well, which at worst causes an unnecessary compilation.

    Args:
        package: the full name of the package.
        folder: the folder of its files.
    """

    def __init__(self, package: str, folder: Path) -> None:
        name = re.escape(package.encode())
        self._named = re.compile(name + rb"(?:\.(?P<one>\w+)| import \(?(?P<several>[\w\s,]+))")
        self._folder = folder
        self._sources: dict[str, bytes] = {}

    def source(self, name: str) -> bytes:
        """Return the source of a module, read once; empty if there is no module of that name."""
        if name not in self._sources:
            file = self._folder / f"{name}.py"
            self._sources[name] = file.read_bytes() if file.is_file() else b""
        return self._sources[name]

    def built_upon(self, name: str) -> set[str]:
        """Return the names of the module and of all modules of the package that it uses."""
        known, waiting = set[str](), [name]
        while waiting:
            module = waiting.pop()
            if module not in known and (text := self.source(module)):
                known.add(module)
                for match in self._named.finditer(text):
                    waiting += re.findall(r"\w+", (match["one"] or match["several"]).decode())
        return known

    def stamp(self, name: str) -> str:
        """Return the SHA-256 hash of the names and sources of the modules in `built_upon(name)`."""
        digest = hashlib.sha256()
        for module in sorted(self.built_upon(name)):
            digest.update(module.encode() + b"\0" + self.source(module) + b"\0")
        return digest.hexdigest()


_stamps = SourceStamps(JIT_PACKAGE, JIT_FOLDER)


@cache
def source_stamp(module: str) -> str:
    """Return the stamp of a module of this package, given its full name; computed once per
    process.
    """
    return _stamps.stamp(module.removeprefix(f"{JIT_PACKAGE}."))


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
    nothing if no folder is writable.
    """
    try:
        return _StampedCache(function, stamp)
    except RuntimeError:  # Numba: "no locator available"
        return NullCache()


def njit_cached(
    *, fastmath: Collection[str] = (), makes_arrays: bool = True
) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function with Numba: without the interpreter lock, with
    numpy's rules of division, and cached on disk under the stamp of its module.

    Args:
        fastmath: the LLVM fast-math flags. `reassoc` allows reordering additions, which a
            vectorised sum needs.
        makes_arrays: whether the function allocates arrays. With False Numba omits the reference
            counts of arrays: otherwise each slice that is passed on is counted by two atomic
            instructions, which took a quarter of the time of prefill. Such a function returns no
            slices either.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {} if makes_arrays else {"_nrt": False}
        if fastmath:
            options["fastmath"] = set(fastmath)
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
        dispatcher._cache = disk_cache(function, source_stamp(function.__module__))
        return dispatcher

    return decorate


njit_strict = njit_cached()
"""Decorator: compile a function without fast-math flags, for integers and positions, and for
floating-point sums whose order matters.
"""

FASTMATH_FLAGS = ("contract", "reassoc", "nsz")
"""The LLVM fast-math flags of most loops: they allow fused multiply-add and sums in any order, and
do not distinguish -0 from 0.
"""

njit_fastmath = njit_cached(fastmath=FASTMATH_FLAGS)
"""Decorator: compile a loop over floating-point numbers with `FASTMATH_FLAGS`."""

njit_strict_no_arrays = njit_cached(makes_arrays=False)
njit_fastmath_no_arrays = njit_cached(fastmath=FASTMATH_FLAGS, makes_arrays=False)
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
