"""Stamps of compiled code: a SHA-256 hash of the sources of a module and of every module of this
package that it uses. Compiled code on disk is valid as long as the stamp of its module is the same.

Numba compiles a function again when the file of the function changes, but not when another file
changes whose functions were inlined into it. With these stamps a changed loop is always compiled
again, together with every function that uses it, while a file that is only copied or checked out
again is not.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

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
        # the names of an import end with its line, unless they stand in parentheses
        several = rb" import (?P<several>\([\w\s,]+|[\w ,]+)"
        self._named = re.compile(name + rb"(?:\.(?P<one>\w+)|" + several + rb")")
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
