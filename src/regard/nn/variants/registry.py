"""The registry of the catalogue: `VARIANTS` has the constructor of each mechanism by name, with its
summary, equation, source and options.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from torch import nn

from regard.configs.suggested_sizes import ALIASES
from regard.did_you_mean import suggest
from regard.errors import ArgumentError

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

VariantFamily: TypeAlias = Literal[
    "softmax", "latent", "linear", "memory", "selected", "cross", "additive"
]
"""The kind of a mechanism, which depends on the operation that it calls and on the content of its
cache."""


@dataclass(frozen=True)
class Variant:
    """One mechanism of the catalogue.

    Args:
        name: the constructor's name.
        family: the kind of mechanism.
        equation: the equation of the mechanism, as text.
        source: the paper, with section or equation.
        causal: whether the result at a position is independent of later positions.
        build: the constructor, build(dim, heads, **options) -> a module.
        example_options: options of a small example with dim 32 and 4 heads, for tests and drawings.

    >>> from regard.nn.variants import VARIANTS
    >>> VARIANTS["gqa"].summary
    'Grouped-query attention: H/G query heads share each key/value head.'
    """

    name: str
    family: VariantFamily
    equation: str
    source: str
    causal: bool
    build: Callable[..., nn.Module]
    example_options: dict[str, object]

    @property
    def summary(self) -> str:
        """The description of the mechanism in one sentence."""
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def example(self, **options: object) -> nn.Module:
        """Build a small example: dim 32, 4 heads, and the example options.

        Args:
            **options: options that replace those of the example.

        Returns:
            The module.
        """
        return self.build(32, 4, **{**self.example_options, **options})


VARIANTS: dict[str, Variant] = {}
"""Every mechanism by name, in the order of definition."""


def variant(
    *,
    family: VariantFamily,
    equation: str,
    source: str,
    causal: bool = True,
    **example_options: object,
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Register a constructor in the catalogue.

    Args:
        family: the kind of mechanism.
        equation: the equation of the mechanism, as text.
        source: the paper, with section or equation.
        causal: whether the result at a position is independent of later positions.
        **example_options: the options of the small example that `Variant.example` builds.

    Returns:
        A decorator that returns the constructor unchanged.
    """

    def register(build: Callable[P, M]) -> Callable[P, M]:
        name = build.__name__
        VARIANTS[name] = Variant(name, family, equation, source, causal, build, example_options)
        return build

    return register


def find_variant(name: str) -> Variant:
    """Return the mechanism of this name, or of a short name such as `linear`.

    Args:
        name: in upper or lower case, with - or _ between words.

    Raises:
        ArgumentError: no mechanism has this name.

    >>> find_variant("MQA").family, find_variant("Gated-Delta").name
    ('softmax', 'gated_delta_net')
    """
    name = name.lower().replace("-", "_")
    name = ALIASES.get(name, name)
    if name not in VARIANTS:
        hint = suggest(name, [*ALIASES, *VARIANTS], otherwise=".")
        raise ArgumentError(
            f"no mechanism is named {name!r}{hint} `regard describe` lists all {len(VARIANTS)}",
            argument="name",
            value=name,
        )
    return VARIANTS[name]


def build(name: str, dim: int, heads: int, **options: object) -> nn.Module:
    """Build a mechanism of the catalogue by name.

    Args:
        name: its name in `VARIANTS`.
        dim: the model dim M.
        heads: the query heads H.
        **options: the options of its constructor.

    Returns:
        The module.

    Raises:
        ArgumentError: no mechanism has this name, or its constructor refuses the options.

    >>> build("mqa", 32, 4).project.shape.G
    1
    """
    return find_variant(name).build(dim, heads, **options)


def option_names(entry: Variant) -> tuple[str, ...]:
    """Return the names of the options of a constructor, without dim and heads.

    >>> from regard.nn.variants import VARIANTS
    >>> option_names(VARIANTS["gqa"])
    ('groups', 'head_dim', 'base', 'layout')
    """
    return tuple(inspect.signature(entry.build).parameters)[2:]


def required_options(entry: Variant) -> tuple[str, ...]:
    """Return the names of the options without a default.

    >>> from regard.nn.variants import VARIANTS
    >>> required_options(VARIANTS["sliding_window"])
    ('groups', 'window')
    """
    parameters = inspect.signature(entry.build).parameters
    return tuple(
        name for name in option_names(entry) if parameters[name].default is inspect.Parameter.empty
    )


def option_meanings(entry: Variant) -> dict[str, str]:
    """Return what each option of a constructor means, from its docstring.

    >>> from regard.nn.variants import VARIANTS
    >>> option_meanings(VARIANTS["gqa"])["groups"]
    'the key/value heads G, which divide H.'
    """
    text = inspect.getdoc(entry.build) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in arguments.splitlines():
        if not line.startswith("     "):  # a new argument; its later lines are indented further
            head, _, meaning = line.strip().partition(": ")
            names = [name.strip() for name in head.split(",")]
            meanings |= dict.fromkeys(names, meaning)
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    named = {name: meanings[name] for name in option_names(entry)}
    for name, meaning in named.items():
        if meaning.startswith("as for `"):  # the meaning stands at another mechanism
            named[name] = option_meanings(VARIANTS[meaning.split("`")[1]])[name]
    return named


def parse_options(settings: Sequence[str], entry: Variant) -> dict[str, object]:
    """Parse options written as name=value. A value is a Python literal, or else a string.

    Args:
        settings: the texts.
        entry: the mechanism whose options they are.

    Returns:
        Option name to value.

    Raises:
        ArgumentError: an entry is not name=value, or the constructor has no such option.

    >>> from regard.nn.variants import VARIANTS
    >>> parse_options(["window=512", "base=1e6"], VARIANTS["sliding_window"])
    {'window': 512, 'base': 1000000.0}
    """
    options: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        known = ", ".join(option_names(entry)) or "none"
        if equals and name not in option_names(entry):
            hint = suggest(name, option_names(entry), otherwise=".")
            raise ArgumentError(
                f"--set {setting}: {entry.name} has no option {name}{hint} Its options are {known}",
                argument="option",
            )
        if not equals:
            raise ArgumentError(
                f"--set {setting}: give name=value; the options of {entry.name} are {known}",
                argument="option",
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def check_options(entry: Variant, options: Mapping[str, object]) -> dict[str, object]:
    """Check the names and types of options, and convert lists to tuples. The constructor itself
    checks their values.

    Args:
        entry: the mechanism.
        options: option name to value, for example from a config file.

    Returns:
        The options.

    Raises:
        ArgumentError: an option is unknown, missing, or of another type than the constructor's
            signature says.

    >>> from regard.nn.variants import VARIANTS
    >>> check_options(VARIANTS["packed"], {"groups": 2, "bounds": [0, 5]})
    {'groups': 2, 'bounds': (0, 5)}
    """
    for name in options:
        if name not in option_names(entry):
            raise ArgumentError(
                f"{entry.name} has no option {name!r}"
                f"{suggest(name, option_names(entry), otherwise='.')} Its options are "
                f"{', '.join(option_names(entry)) or 'none'}",
                argument="option",
            )
    if missing := [name for name in required_options(entry) if name not in options]:
        raise ArgumentError(f"{entry.name} needs a value for {', '.join(missing)}")
    hints, parameters = (
        typing.get_type_hints(entry.build),
        inspect.signature(entry.build).parameters,
    )
    for name, value in options.items():
        if not _fits(value, hints[name]):
            raise ArgumentError(
                f"{name} of {entry.name} is {value!r}; it must be {parameters[name].annotation}"
            )
    return {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}


def _fits(value: object, expected: object) -> bool:
    """Return whether a plain value is of the expected type. An int is accepted as a float, and a
    list as a tuple or a sequence.
    """
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if isinstance(value, (list, tuple)):
        listed = isinstance(origin, type) and issubclass(origin, Sequence)
        return listed and all(_fits(x, inner[0]) for x in value)
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected
