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


def with_shared_arguments(
    meanings: Mapping[str, str], options: type | None = None, **defaults: object
) -> Callable[[Function], Function]:
    """Return a decorator that completes a docstring: parameters that it does not explain get the
    line of their name in `meanings`, in the order of the signature, and so do Returns and Raises.
    The keys of `options`, a TypedDict, take the place of **options in the signature, with these
    defaults.

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
        if options is not None:
            _show_options(function, options, defaults)
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


def meanings_of(options: type) -> dict[str, str]:
    """Return what the docstring of a class says of each of its arguments."""
    text = inspect.cleandoc(options.__doc__ or "")
    return dict(_ENTRY.findall(textwrap.dedent(text.partition("Args:\n")[2])))


def _show_options(
    function: Callable[..., object], options: type, defaults: Mapping[str, object]
) -> None:
    """Show in the signature of a function which options it accepts, with defaults."""
    defaults = {"form": "auto", "chunk": 64, "dropout": 0.0, **defaults}
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in options.__annotations__.items()
    ]
    positional = [x for x in parameters if x.kind is not x.KEYWORD_ONLY]
    own = [x for x in parameters if x.kind is x.KEYWORD_ONLY]
    vars(function)["__signature__"] = signature.replace(parameters=[*positional, *shown, *own])


def _wrap(entry: str) -> str:
    """Return the entry of an argument in lines of 92 characters, the later ones indented."""
    return textwrap.fill(" ".join(entry.split()), 92, subsequent_indent=" " * 4)
