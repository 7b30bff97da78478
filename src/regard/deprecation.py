"""Old names that keep working for one release, with a DeprecationWarning that says the new name.

A module renames what it exports with `renamed`, a function its parameters with
`renamed_parameters`, a class its methods and attributes with `renamed_attribute`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from regard.errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a name has changed, at the line of the caller that uses the old name."""
    message = f"{old} is now {new}; the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed(
    module: str, names: Mapping[str, str], otherwise: Callable[[str], object] | None = None
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module in which names have changed.

    Args:
        module: the module's `__name__`.
        names: old name to new name; a new name with a dot is an attribute of another module of
            the package, written in full: `"regard.files.safetensors_files.read_tensors"`.
        otherwise: the `__getattr__` that the module has already, for names that load lazily.

    Returns:
        A function to be assigned to `__getattr__` in the module.

    >>> import types
    >>> library = types.ModuleType("library")
    >>> library.new = 3
    >>> sys.modules["library"] = library
    >>> library.__getattr__ = renamed("library", {"old": "new"})
    >>> with warnings.catch_warnings(record=True) as messages:
    ...     warnings.simplefilter("always")
    ...     library.old
    3
    >>> str(messages[0].message)
    'library.old is now library.new; the old name goes with the next release'
    >>> del sys.modules["library"]
    """

    def get(name: str) -> Any:
        if name in names:
            home, _, new = names[name].rpartition(".")
            _warn(f"{module}.{name}", f"{home or module}.{new}")
            if home and home not in sys.modules:
                __import__(home)
            return getattr(sys.modules[home or module], new)
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def renamed_parameters(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keyword arguments under their old names.

    Args:
        names: old name to new name, as keyword arguments.

    Returns:
        A decorator for the function, or for the `__init__` of a class.

    Raises:
        ArgumentTypeError: a call of the decorated function passes both names.

    >>> @renamed_parameters(length="context")
    ... def memory(context: int) -> int:
    ...     return 2 * context
    >>> with warnings.catch_warnings(record=True) as messages:
    ...     warnings.simplefilter("always")
    ...     memory(length=4)
    8
    >>> str(messages[0].message)
    'memory(length=) is now memory(context=); the old name goes with the next release'
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new, name = names[old], function.__qualname__
                if new in kwargs:
                    raise ArgumentTypeError(f"{name} got both {new}= and its old name {old}=")
                _warn(f"{name}({old}=)", f"{name}({new}=)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


class renamed_attribute:  # noqa: N801  (lower case, as in `property`)
    """Let a method, property or attribute of a class be read under its old name.

    Args:
        new: the new name.

    >>> class Cache:
    ...     length = 7
    ...     size = renamed_attribute("length")
    >>> with warnings.catch_warnings(record=True) as messages:
    ...     warnings.simplefilter("always")
    ...     Cache().size
    7
    >>> str(messages[0].message)
    'Cache.size is now Cache.length; the old name goes with the next release'
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.old = owner.__name__, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        _warn(f"{self.owner}.{self.old}", f"{self.owner}.{self.new}")
        return getattr(owner if instance is None else instance, self.new)


def take_old_attributes(cls: type, **names: str) -> None:
    """Copy class attributes that a subclass defined under old names to their new names.

    Call it in `__init_subclass__` of a base class whose attributes are meant to be overridden.

    Args:
        cls: the new subclass.
        names: old name to new name, as keyword arguments.

    >>> class Base:
    ...     def __init_subclass__(cls) -> None:
    ...         take_old_attributes(cls, size="length")
    >>> with warnings.catch_warnings(record=True) as messages:
    ...     warnings.simplefilter("always")
    ...     class Mine(Base):
    ...         size = 3
    >>> Mine.length, str(messages[0].message)
    (3, 'Mine.size is now Mine.length; the old name goes with the next release')
    """
    for old, new in names.items():
        if old in cls.__dict__:
            _warn(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=4)
            setattr(cls, new, cls.__dict__[old])
