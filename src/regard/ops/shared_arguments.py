"""Meanings of arguments that several functions share: said once, and shown by `help` of each."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)
_REST = re.compile(r"^(>>>|Source:)", re.MULTILINE)


def with_shared_arguments(meanings: Mapping[str, str]) -> Callable[[Function], Function]:
    """Return a decorator that completes a docstring: parameters that it does not explain get the
    line of their name in `meanings`, in the order of the signature, and so do Returns and Raises.

    >>> @with_shared_arguments({"x": "a number.", "Returns": "The sum."})
    ... def add(x, y):
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         y: another one.
    ...     '''
    >>> print(add.__doc__.strip())
    Add two numbers.
    <BLANKLINE>
    Args:
        x: a number.
        y: another one.
    <BLANKLINE>
    Returns:
        The sum.
    """

    def complete(function: Function) -> Function:
        if function.__doc__ is None:  # python -OO
            return function
        text = inspect.cleandoc(function.__doc__)
        end = _REST.search(text)
        head, rest = (text, "") if end is None else (text[: end.start()], text[end.start() :])
        summary, *parts = _SECTION.split(head)
        sections = {
            name: textwrap.dedent(x).strip()
            for name, x in zip(parts[::2], parts[1::2], strict=True)
        }
        own = dict(_ENTRY.findall(sections.get("Args", "")))
        known = {**meanings, **own}
        lines = [
            _wrap(f"{name}: {known[name]}")
            for name in inspect.signature(function).parameters
            if name in known
        ]
        completed = {"Args": "\n".join(lines)}
        completed["Returns"] = sections.get("Returns") or textwrap.fill(
            meanings.get("Returns", ""), 92
        )
        entries = meanings.get("Raises", "").splitlines()
        completed["Raises"] = sections.get("Raises") or "\n".join(map(_wrap, entries))
        blocks = [f"{name}:\n{textwrap.indent(x, '    ')}" for name, x in completed.items() if x]
        function.__doc__ = "\n\n".join([summary.strip(), *blocks, rest])
        return function

    return complete


def _wrap(entry: str) -> str:
    """Return the entry of an argument in lines of 92 characters, the later ones indented."""
    return textwrap.fill(" ".join(entry.split()), 92, subsequent_indent=" " * 4)
