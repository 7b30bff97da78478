"""Registries: classes of one kind that are found by a short name, entered when they are defined.

Masks, biases and caches enter themselves, those of this package and those that a user defines. So a
new one is known to everything that looks a name up, and no list has to be changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.untrusted_text import error_text

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name, in the order in which they were defined.

    A name of a class of this package belongs to that class. Any other name belongs to whoever
    defined it last, so that a notebook may run a cell again.

    Args:
        what: what the classes are, for messages: "mask".

    >>> numbers: Registry[int] = Registry("number")
    >>> numbers.enter("small", int)
    >>> numbers.find("small")
    <class 'int'>
    >>> numbers.find("smal")
    Traceback (most recent call last):
    regard.errors.ArgumentError: unknown number "smal"; did you mean 'small'? known: small
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, type[T]] = {}

    def enter(self, name: str, kind: type[T]) -> None:
        """Enter a class under a name.

        Raises:
            ArgumentError: the name belongs to a class of this package.
        """
        old = self._classes.get(name)
        if old is not None and is_builtin(old) and not is_builtin(kind):
            raise ArgumentError(
                f"{kind.__module__}.{kind.__qualname__} would be the {self.what} {name!r}, which "
                f"{old.__module__}.{old.__qualname__} is already; give it another name by "
                f'`kind = "..."` in the class, or rename it'
            )
        self._classes[name] = kind

    def remove(self, kind: type[T]) -> None:
        """Forget a class, under all its names; nothing happens if it was not entered."""
        for name in [name for name, x in self._classes.items() if x is kind]:
            del self._classes[name]

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Forget behind the block what was entered in it."""
        before = dict(self._classes)
        try:
            yield
        finally:
            self._classes = before

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        """The names and classes, without classes that are abstract or private."""
        for name, kind in list(self._classes.items()):
            if not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
                yield name, kind

    def get(self, name: str) -> type[T] | None:
        """The class of a name, or None."""
        return dict(self).get(name)

    def find(self, name: str, among: Sequence[str] | None = None) -> type[T]:
        """The class of a name.

        Args:
            name: as it was entered.
            among: the names that are allowed; None is all.

        Raises:
            ArgumentError: the name is not known; the message lists those that are.
        """
        known = {n: x for n, x in self if among is None or n in among}
        if name not in known:
            hint = suggest(name, known, most=2, cutoff=0.5, otherwise=";")
            raise ArgumentError(
                f'unknown {self.what} "{error_text(str(name), 60)}"{hint} known: {", ".join(known)}'
            )
        return known[name]


def is_builtin(kind: type) -> bool:
    """Whether a class belongs to this package."""
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def import_all(package: str, path: Sequence[str]) -> None:
    """Import every module of a package, so that what they define is entered.

    Args:
        package: its name, `__name__`.
        path: its folders, `__path__`.
    """
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")
