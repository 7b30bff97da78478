"""The options that several constructors of the catalogue have in common: what each means, its type
and its default stand here once.

A constructor takes such a set as `**options: Unpack[Rotated]`, so that type checkers and editors
know its names and types; `variant` reads the defaults and the meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter
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
    """What a user should know of one option.

    Args:
        meaning: what it is, with the letter of the equation.
        default: its default; without one (...), the option must be given.
        example: its value in the small example of a mechanism, where a value is needed.
        published: its value in a published model, where a value is needed.
    """

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
    """Return the options of a set such as `Rotated` as keyword parameters, whose annotations have
    the `Option`.

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
    """Return the annotations of a set of options, with those that it inherits, without
    `Required`.
    """
    hints = get_type_hints(options, include_extras=True)
    return {
        name: get_args(kind)[0] if get_origin(kind) is Required else kind
        for name, kind in hints.items()
    }
