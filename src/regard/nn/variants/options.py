"""The options that several constructors of the catalogue have in common.

A constructor takes such a set as `**options: Unpack[Rotated]`; `variant` reads defaults and
meanings, which stand here once, and composes docstrings of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from textwrap import wrap
from typing import (
    Annotated,
    Any,
    Required,
    TypeAlias,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)


@dataclass(frozen=True)
class Option:
    """What a user should know of one option."""

    meaning: str
    default: object = ...
    example: object = ...
    published: object = ...


HeadDim: TypeAlias = Annotated[int | None, Option("the head dim D; None is M / H.", None)]
Base: TypeAlias = Annotated[float, Option("the base of the rotary positions.", 10000.0)]
ValueDim: TypeAlias = Annotated[int | None, Option("the value dim E; None is D.", None)]
Bias: TypeAlias = Annotated[bool, Option("whether the linear maps have a bias.", False)]
Dropout: TypeAlias = Annotated[
    float, Option("the probability of dropping an attention weight, in training only.", 0.0)
]
OptionalGroups: TypeAlias = Annotated[
    int | None, Option("the key/value heads G, which divide H; None is H.", None)
]


class HeadSize(TypedDict, total=False):
    """Heads of a size of their own."""

    head_dim: HeadDim


class Biased(HeadSize, total=False):
    """Heads whose maps may have a bias."""

    bias: Bias


class Grouped(HeadSize, total=False):
    """Query heads that share key/value heads."""

    groups: Required[
        Annotated[int, Option("the key/value heads G, which divide H.", example=2, published=8)]
    ]


class Rotated(Grouped, total=False):
    """Query heads that share key/value heads, with rotary positions."""

    base: Base


class SharedHeads(HeadSize, total=False):
    """Query heads that may share key/value heads."""

    groups: OptionalGroups


class RotatedShared(SharedHeads, total=False):
    """Query heads that may share key/value heads, with rotary positions."""

    base: Base


class Valued(HeadSize, total=False):
    """Heads whose values have a size of their own."""

    value_dim: ValueDim


class SharedValued(Valued, total=False):
    """Query heads that may share key/value heads, with values of a size of their own."""

    groups: OptionalGroups


def shared_options(options: Any) -> dict[str, Parameter]:
    """Return the options of a set such as `Rotated` as keyword parameters.

    >>> [str(each.replace(annotation=int)) for each in shared_options(HeadSize).values()]
    ['head_dim: int = None']
    """
    parameters = {}
    for name, kind in _annotations(options).items():
        default = find_option(kind).default
        default = Parameter.empty if default is ... else default
        parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    return parameters


def find_option(annotation: Any) -> Option:
    """Return the `Option` of an annotation; one without a meaning if it has none."""
    parts = (annotation, *get_args(annotation))  # Required[...] has it one level deeper
    metadata = (x for part in parts for x in getattr(part, "__metadata__", ()))
    return next((x for x in metadata if isinstance(x, Option)), Option(""))


def _annotations(options: Any) -> dict[str, Any]:
    """Return the annotations of a set of options and its bases, without `Required`."""
    hints = get_type_hints(options, include_extras=True)
    return {
        name: get_args(kind)[0] if get_origin(kind) is Required else kind
        for name, kind in hints.items()
    }


WIDTH = 84
"""Columns of a composed docstring, as `help` shows it behind its indentation."""


def described_options(docstring: str) -> dict[str, str]:
    """Return the meanings of the arguments that stand below `Args:`.

    >>> described_options("One.\\n\\nArgs:\\n    a: the first\\n        size.\\n    b: a name.")
    {'a': 'the first size.', 'b': 'a name.'}
    """
    arguments = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    one_line = re.sub(r"\n {8,}", " ", arguments)  # later lines of a meaning are indented further
    pairs = (line.strip().partition(": ") for line in one_line.splitlines())
    return {name: meaning for name, _, meaning in pairs}


def help_text(
    docstring: str,
    name: str,
    signature: inspect.Signature,
    meanings: Mapping[str, str],
    *,
    equation: str,
    source: str,
    shapes: str,
    example: Mapping[str, object],
) -> str:
    """Return the docstring of a constructor: its entry's, with equation, shapes and arguments."""
    prose, _, runnable = re.sub(r"Args:\n( +.*\n?)+\n*", "", docstring).partition(">>>")
    summary, *remarks = prose.strip().split("\n\n")
    arguments = [_filled(f"{n}: {meanings[n]}") for n in signature.parameters]
    errors = _filled(f"ArgumentError, ArgumentTypeError: {_errors(signature.parameters)}")
    return "\n\n".join(
        [
            summary,
            _filled(equation),
            shapes,
            *remarks,
            "\n".join(["Args:", *arguments]),
            "Returns:\n    The module.",
            f"Raises:\n{errors}",
            f">>>{runnable}".strip() if runnable else _example(name, shapes, example),
            "\n".join(wrap(f"Source: {source.rstrip('.')}.", WIDTH)),
        ]
    )


def _filled(text: str) -> str:
    """Return a text in indented lines, of which the later ones are indented further."""
    lines = wrap(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join([f"    {lines[0]}", *lines[1:]])


def _errors(parameters: Mapping[str, Parameter]) -> str:
    """Return when a constructor refuses its arguments."""
    cases = ["an option is unknown or missing", "a size is less than 1 or not what its line says"]
    if "groups" in parameters:
        cases.append("groups does not divide heads")
    if "head_dim" in parameters and parameters["head_dim"].default is None:
        cases.append("head_dim is None and not a whole number")
    return f"{', '.join(cases[:-1])}, or {cases[-1]}."


def _example(name: str, shapes: str, options: Mapping[str, object]) -> str:
    """Return an example that builds the small module of the catalogue and calls it."""
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    memory = ", memory=torch.zeros(1, 6, 32)" if "memory" in shapes else ""
    return (
        f">>> import torch\n>>> layer = {name}(32, 4{arguments})\n"
        f">>> layer(torch.zeros(1, 5, 32){memory}).shape\ntorch.Size([1, 5, 32])"
    )
