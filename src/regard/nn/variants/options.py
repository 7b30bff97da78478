"""Options of the catalogue's constructors as plain values: from a command line, or from a file."""

from __future__ import annotations

import ast
import difflib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import ArgumentError
from regard.nn.variants.registry import Variant


def names(entry: Variant) -> tuple[str, ...]:
    """The options that a constructor has, behind dim and heads.

    >>> from regard.nn.variants import VARIANTS
    >>> names(VARIANTS["gqa"])
    ('groups', 'head_dim', 'base', 'layout')
    """
    return tuple(inspect.signature(entry.build).parameters)[2:]


def required(entry: Variant) -> tuple[str, ...]:
    """The options without a default.

    >>> from regard.nn.variants import VARIANTS
    >>> required(VARIANTS["sliding_window"])
    ('groups', 'window')
    """
    found = inspect.signature(entry.build).parameters
    return tuple(name for name in names(entry) if found[name].default is inspect.Parameter.empty)


def parse(settings: Sequence[str], entry: Variant) -> dict[str, Any]:
    """Options written as name=value; a value is a Python literal, or else a string.

    Raises:
        ArgumentError: an entry is not name=value, or the constructor has no such option.

    >>> from regard.nn.variants import VARIANTS
    >>> parse(["window=512", "base=1e6"], VARIANTS["sliding_window"])
    {'window': 512, 'base': 1000000.0}
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in names(entry):
            raise ArgumentError(
                f"--set {setting}: give name=value; {entry.name} has {', '.join(names(entry)) or 'no options'}"
                f"{near(name, names(entry))}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def checked(entry: Variant, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the constructor takes them, lists as tuples; what their values may be is its own matter.

    Raises:
        ArgumentError: an option is unknown, missing, or of another type than the constructor's signature says.

    >>> from regard.nn.variants import VARIANTS
    >>> checked(VARIANTS["packed"], {"groups": 2, "bounds": [0, 5]})
    {'groups': 2, 'bounds': (0, 5)}
    """
    for name in options:
        if name not in names(entry):
            raise ArgumentError(
                f"{entry.name} has no option {name!r}{near(name, names(entry))}; it has "
                f"{', '.join(names(entry)) or 'none'}"
            )
    if missing := [name for name in required(entry) if name not in options]:
        raise ArgumentError(f"{entry.name} needs {', '.join(missing)}")
    hints, written = typing.get_type_hints(entry.build), inspect.signature(entry.build).parameters
    for name, value in options.items():
        if not _fits(value, hints[name]):
            raise ArgumentError(
                f"{name} of {entry.name} is {value!r}; it must be {written[name].annotation}"
            )
    return {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}


def near(name: str, known: Sequence[str]) -> str:
    """A hint at the known name that a wrong one is meant to be, or "".

    >>> near("widow", ["window", "groups"])
    '; did you mean window?'
    """
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a plain value is of a type; an int is a float, and a list is a tuple or a sequence."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if isinstance(value, (list, tuple)):
        listed = isinstance(origin, type) and issubclass(origin, Sequence)
        return listed and all(_fits(x, inner[0]) for x in value)
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is wanted
