"""Registries of classes by name, in which masks, biases and caches enter when defined; names of a
package that are imported when they are first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.untrusted_text import error_text

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name, in order of definition; a name of this package cannot be replaced, any other
    is that of the last class, so that a notebook cell can run again.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, kind: type[T]) -> None:
        """Register a class under a name."""
        old = self._classes.get(name)
        if old is not None and is_builtin(old) and not is_builtin(kind):
            raise ArgumentError(
                f"{kind.__module__}.{kind.__qualname__} cannot be the {self.what} {name!r}, "
                f"because {old.__module__}.{old.__qualname__} has this name; set "
                f'`kind = "..."` in the class, or rename the class'
            )
        self._classes[name] = kind

    def remove(self, kind: type[T]) -> None:
        """Remove a class under all its names; nothing happens if it is not registered."""
        for name in [name for name, x in self._classes.items() if x is kind]:
            del self._classes[name]

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Return a context manager that removes, at its end, classes registered in its block."""
        before = dict(self._classes)
        try:
            yield
        finally:
            self._classes = before

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        """Iterate over names and classes, without abstract or private classes."""
        for name, kind in list(self._classes.items()):
            if not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
                yield name, kind

    def get(self, name: str) -> type[T] | None:
        """Return the class with a name, or None."""
        return dict(self).get(name)

    def find(self, name: str, among: Sequence[str] | None = None) -> type[T]:
        """Return the class with a name."""
        known = {n: x for n, x in self if among is None or n in among}
        if name not in known:
            hint = suggest(name, known, most=2, cutoff=0.5, otherwise=";")
            raise ArgumentError(
                f'unknown {self.what} "{error_text(str(name), 60)}"{hint} known: {", ".join(known)}'
            )
        return known[name]


def is_builtin(kind: type) -> bool:
    """Return whether a class belongs to this package."""
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def import_all(package: str, path: Sequence[str]) -> None:
    """Import every module of a package, so that the classes in them are registered."""
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")


def import_when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported when they are first used.

    `modules` has the names, separated by spaces, of each module.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
