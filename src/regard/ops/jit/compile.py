"""How loops are compiled and kept on disk: the decorator of every compiled function, the
stamp under which its code is kept, and the processor features that it may use.

Numba keeps compiled code in `__pycache__` (or in NUMBA_CACHE_DIR) and compiles a function again
when the file that it stands in changes. It does not notice a change in another file whose functions
were compiled in. So each compiled function here is kept under a stamp of our own, `source_stamp`:
a hash of the source of its module and of every module of this package that it is built upon. A
changed loop is always compiled again, whichever file it stands in; and as long as no source
changes, nothing is, also where files were copied or checked out anew.
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


class SourceStamps:
    """Hashes of the modules of one package, each with all that it is built upon.

    A module is built upon every module of the package whose full name stands somewhere in its
    text, and upon what those are built upon. That finds every form of import; a name that only a
    comment mentions costs a compilation now and then, and can never leave old code in use.
    """

    def __init__(self, package: str, folder: Path) -> None:
        name = re.escape(package.encode())
        self._named = re.compile(name + rb"(?:\.(?P<one>\w+)| import \(?(?P<several>[\w\s,]+))")
        self._folder = folder
        self._sources: dict[str, bytes] = {}

    def source(self, name: str) -> bytes:
        """The text of a module of the package, read once; empty if there is none of that name."""
        if name not in self._sources:
            file = self._folder / f"{name}.py"
            self._sources[name] = file.read_bytes() if file.is_file() else b""
        return self._sources[name]

    def built_upon(self, name: str) -> set[str]:
        """The module and all modules of the package that it is built upon."""
        known, waiting = set[str](), [name]
        while waiting:
            module = waiting.pop()
            if module not in known and (text := self.source(module)):
                known.add(module)
                for found in self._named.finditer(text):
                    waiting += re.findall(r"\w+", (found["one"] or found["several"]).decode())
        return known

    def stamp(self, name: str) -> str:
        """SHA-256 over the names and sources of all of them."""
        found = hashlib.sha256()
        for module in sorted(self.built_upon(name)):
            found.update(module.encode() + b"\0" + self.source(module) + b"\0")
        return found.hexdigest()


_stamps = SourceStamps(JIT_PACKAGE, JIT_FOLDER)


@cache
def source_stamp(module: str) -> str:
    """The stamp of a module of this package, by its full name; computed once in a process."""
    return _stamps.stamp(module.removeprefix(f"{JIT_PACKAGE}."))


class _StampedCache(FunctionCache):  # type: ignore[misc, unused-ignore]
    """Numba's cache of a function, valid as long as its stamp is the same."""

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        base: str = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)


def disk_cache(function: Callable[..., Any], stamp: str) -> Any:
    """Where a function's compiled code is kept; a cache that keeps nothing where no folder can be
    written.
    """
    try:
        return _StampedCache(function, stamp)
    except RuntimeError:  # Numba: "no locator available"
        return NullCache()


def njit_cached(
    *, fastmath: Collection[str] = (), makes_arrays: bool = True
) -> Callable[[Any], Any]:
    """Decorate a function that Numba compiles: it lets go of the interpreter while it runs, divides
    as numpy does, and is kept on disk under the stamp of its module.

    Args:
        fastmath: the liberties that LLVM may take with floating-point numbers. `reassoc` lets it
            add in another order, which a sum over a vector needs.
        makes_arrays: False for a loop that makes no array: it then counts no references to the
            arrays that it is given, which took a tenth of its time.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {} if makes_arrays else {"_nrt": False}
        if fastmath:
            options["fastmath"] = set(fastmath)
        made = njit(nogil=True, error_model="numpy", **options)(function)
        made._cache = disk_cache(function, source_stamp(function.__module__))
        return made

    return decorate


njit_strict = njit_cached()
"""For loops over whole numbers and positions, and for floating-point numbers in their order."""

FASTMATH_FLAGS = ("contract", "reassoc", "nsz")
"""The liberties of most loops: products and sums in one rounding, and sums in any order."""

njit_fastmath = njit_cached(fastmath=FASTMATH_FLAGS)
"""For loops over floating-point numbers."""


def has_cpu_feature(feature: str) -> bool:
    """Whether loops may name instructions of a processor feature: LLVM knows this processor to have
    it, and Numba was not told to compile for another. Naming one that is missing ends the process.

    >>> has("no such feature")
    False
    """
    given: Any = config
    if {given.CPU_NAME, given.CPU_FEATURES} - {None, "", "host"} or not given.ENABLE_AVX:
        return False
    return bool(binding.get_host_cpu_features().get(feature))
