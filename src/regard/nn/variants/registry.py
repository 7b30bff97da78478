"""The registry `VARIANTS` of mechanisms, `variant`, which makes a constructor of an entry, and the
meanings of symbols in equations.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn

from regard.argument_checks import check_keyword_names
from regard.configs.catalogue import GROUPS, Group, VariantFamily
from regard.configs.suggested_sizes import (
    ALIASES,
    MECHANISM_CHOICES,
    DecoderSizes,
    Suggestion,
    split_mechanism,
    suggested_groups,
)
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.variants.options import (
    Option,
    described_options,
    find_option,
    help_text,
    shared_options,
)

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Variant:
    """One mechanism of the catalogue.

    Args:
        name: the constructor's name.
        group: the mechanisms with which it has an idea in common.
        equation: the equation of the mechanism, as text.
        source: the paper, with section or equation.
        users: public models that use it.
        choose: when it is a good choice.
        avoid: when it is not.
        symbols: symbols of the equation that have another meaning in other equations.
        causal: whether the result at a position is independent of later positions.
        summary: the mechanism in one sentence.
        build: the constructor, build(dim, heads, **options) -> a module.
        option_meanings: what each option of the constructor means.
        example_options: options of a small example with dim 32 and 4 heads, for tests and drawings.
        published_options: sizes of a published model, for the options that have no default.

    >>> VARIANTS["gqa"].summary
    'Grouped-query attention: H/G query heads share each key/value head.'
    >>> VARIANTS["mqa"].users
    'PaLM, StarCoder, Falcon 7B, Gemma 2B'
    >>> VARIANTS["gqa"].option_meanings["groups"]
    'the key/value heads G, which divide H.'
    """

    name: str
    group: Group
    equation: str
    source: str
    users: str
    choose: str
    avoid: str
    symbols: Mapping[str, str]
    causal: bool
    summary: str
    build: Callable[..., nn.Module]
    option_meanings: Mapping[str, str]
    example_options: Mapping[str, object]
    published_options: Mapping[str, object]

    @property
    def family(self) -> VariantFamily:
        """The kind of the mechanism."""
        return self.group.family

    def example(self, **options: object) -> nn.Module:
        """Build a small example: dim 32, 4 heads, and the example options.

        Args:
            **options: options that replace those of the example.

        Returns:
            The module.
        """
        return self.build(32, 4, **{**self.example_options, **options})

    def relatives(self) -> list[Variant]:
        """Return the other mechanisms of its group.

        Returns:
            The entries in the order of their definition.

        >>> [entry.name for entry in VARIANTS["infini"].relatives()]
        ['infini_delta']
        """
        return [x for x in VARIANTS.values() if x.group is self.group and x is not self]

    def papers(self) -> list[str]:
        """Return the numbers on arXiv that the source names.

        Returns:
            The numbers in the order of the source; an empty list without any.

        >>> VARIANTS["gqa"].papers()
        ['2305.13245']
        """
        return re.findall(r"\b\d{4}\.\d{4,5}\b", self.source)

    def code(self) -> str:
        """Return lines that build the small example, run it, and decode with a cache where it can.

        The last lines compare both results, so that the code fails where they differ.

        Returns:
            The lines of a Python program.

        >>> VARIANTS["gqa"].code().splitlines()[4]
        'layer = gqa(32, 4, groups=2).double()'
        """
        options = "".join(f", {name}={value!r}" for name, value in self.example_options.items())
        layer = f"layer = {self.name}(32, 4{options}).double()"
        if len(layer) > 58:
            arguments = [f"    {line}" for line in textwrap.wrap(f"32, 4{options}", 54)]
            layer = "\n".join([f"layer = {self.name}(", *arguments, ").double()"])
        memory = self.family in ("cross", "additive")
        keyword = ", memory=memory" if memory else ""
        lines = [
            "import torch",
            "",
            f"from regard.nn.variants import {self.name}",
            "",
            layer,
            "x = torch.randn(1, 9, 32, dtype=torch.float64)",
        ]
        if memory:
            lines.append("memory = torch.randn(1, 7, 32, dtype=torch.float64)")
        lines.append(f"whole = layer(x{keyword})  # all tokens in one pass")
        if not self.causal:
            return "\n".join([*lines, "# It sees later tokens, so that it cannot decode."])
        lines += [
            "cache, steps = layer.new_cache(), []",
            "for t in range(9):  # one token after another",
            "    token = x[:, t : t + 1]",
            f"    steps.append(layer(token, None, cache{keyword}))",
        ]
        if memory:
            lines.append("    memory = None  # the cache keeps it")
        lines.append("assert torch.allclose(torch.cat(steps, dim=1), whole)")
        return "\n".join(lines)


VARIANTS: dict[str, Variant] = {}
"""Every mechanism by name, in the order of definition."""


SIZES = {"dim": "the model dim M.", "heads": "the query heads H."}
"""The meanings of the sizes that every constructor takes."""


def variant(
    group: str,
    equation: str,
    source: str,
    *,
    users: str,
    choose: str,
    avoid: str,
    where: str = "",
    example: Mapping[str, object] | None = None,
    published: Mapping[str, object] | None = None,
    causal: bool = True,
    shapes: str = "x [B,T,M] -> [B,T,M]",
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Register an entry of the catalogue, and make the constructor that users call.

    An entry takes `**options: Unpack[...]` of a set, and own options with meanings below `Args:`,
    which replace the set's. `where` has symbols with another meaning, as "s: score; p: weight";
    `example` and `published` have values beside those of the set.
    """
    (own_group,) = (each for each in GROUPS if each.name == group)

    def register(entry: Callable[P, M]) -> Callable[P, M]:
        name = entry.__name__
        signature = _signature(entry)
        options = {n: find_option(p.annotation) for n, p in signature.parameters.items()}
        text = inspect.getdoc(entry) or ""
        meanings = {n: x.meaning for n, x in options.items()} | SIZES | described_options(text)
        names = list(signature.parameters)
        small = _values(options, "example") | dict(example or {})
        plain = {
            n: p.replace(annotation=_plain(p.annotation)) for n, p in signature.parameters.items()
        }
        shown = signature.replace(parameters=list(plain.values()))

        @functools.wraps(entry)
        def construct(*args: P.args, **keywords: P.kwargs) -> M:
            arguments = _bind(name, shown, args, keywords)
            return cast("Callable[..., M]", entry)(*arguments.args, **arguments.kwargs)

        construct.__doc__ = help_text(
            text,
            name,
            shown,
            meanings,
            equation=equation,
            source=source,
            shapes=shapes,
            example=small,
        )
        construct.__dict__["__signature__"] = shown
        construct.__annotations__ = {n: p.annotation for n, p in plain.items()}
        construct.__annotations__["return"] = signature.return_annotation
        VARIANTS[name] = Variant(
            name,
            own_group,
            equation,
            source,
            users,
            choose,
            avoid,
            _symbols(where),
            causal,
            text.split("\n\n")[0].replace("\n", " "),
            construct,
            {n: meanings[n] for n in names[2:]},
            small,
            _values(options, "published") | dict(published or {}),
        )
        return construct

    return register


def _signature(entry: Callable[..., object]) -> inspect.Signature:
    """Return the signature of an entry with all options, those without a default first."""
    hints = typing.get_type_hints(entry, include_extras=True)
    signature = inspect.signature(entry)
    sizes: list[Parameter] = []
    own: list[Parameter] = []
    shared: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            shared += shared_options(typing.get_args(hints[name])[0]).values()
        else:
            part = own if parameter.kind is Parameter.KEYWORD_ONLY else sizes
            part.append(parameter.replace(annotation=hints[name]))
    options = sorted(
        [*shared, *own],
        key=lambda each: (each.default is not Parameter.empty, each.name != "groups"),
    )
    return signature.replace(parameters=[*sizes, *options], return_annotation=hints["return"])


def _bind(
    name: str, signature: inspect.Signature, args: Sequence[object], keywords: Mapping[str, object]
) -> inspect.BoundArguments:
    """Return the arguments of a constructor with its defaults, or raise about an option."""
    check_keyword_names(name, keywords, list(signature.parameters))
    try:
        arguments = signature.bind_partial(*args, **keywords)
    except TypeError as error:
        raise ArgumentTypeError(f"{name}(): {error}") from None
    arguments.apply_defaults()
    missing = [n for n in signature.parameters if n not in arguments.arguments]
    if missing:
        raise ArgumentTypeError(f"{name}() needs a value for {', '.join(missing)}")
    for option, value in arguments.arguments.items():
        expected = signature.parameters[option].annotation
        if value is None and not _fits(None, expected):
            raise ArgumentTypeError(
                f"{option} of {name} is None; it must be {_type_name(expected)}", argument=option
            )
    return arguments


def _plain(annotation: Any) -> Any:
    """Return an annotation without what `Option` says of it."""
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _symbols(where: str) -> dict[str, str]:
    """Return the symbols of a text such as "s: score; p: weight" with their meanings."""
    parts = re.split(r"; (?=[^\s:]+: )", where) if where else []
    return {symbol: meaning for symbol, _, meaning in (part.partition(": ") for part in parts)}


def _values(options: Mapping[str, Option], use: str) -> dict[str, object]:
    """Return the values for the example, or of a published model, that options have."""
    values = {name: getattr(option, use) for name, option in options.items()}
    return {name: value for name, value in values.items() if value is not ...}


def in_teaching_order() -> list[Variant]:
    """Return every mechanism of the catalogue in the order in which it is taught."""
    return [entry for group in GROUPS for entry in VARIANTS.values() if entry.group is group]


def find_variant(name: str) -> Variant:
    """Return the mechanism of this name, whatever its case, with - or _, or of a short name such as
    `linear`.
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
    """Return the names of the options of a constructor, without dim and heads."""
    return tuple(inspect.signature(entry.build).parameters)[2:]


def required_options(entry: Variant) -> tuple[str, ...]:
    """Return the names of the options without a default."""
    parameters = inspect.signature(entry.build).parameters
    return tuple(
        name for name in option_names(entry) if parameters[name].default is inspect.Parameter.empty
    )


def parse_options(settings: Sequence[str], entry: Variant) -> dict[str, object]:
    """Return the values of options written as name=value, each a Python literal or a string."""
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
    _check_types(entry, options)
    return options


def suggested_options(entry: Variant, sizes: DecoderSizes) -> Suggestion:
    """Return the options that `regard cost --mechanisms` suggests for a mechanism, with sources."""
    if entry.name in MECHANISM_CHOICES:
        return sizes.suggest(entry.name)
    known = suggested_groups(sizes) if "groups" in entry.example_options else {}
    published = entry.published_options.items()
    own = {k: (v, f"regard describe {entry.name}") for k, v in published if isinstance(v, int)}
    return sizes.suggest(entry.name, {**own, **known})


def named_options(
    text: str, settings: Sequence[str] = (), find: Callable[[str], Variant] | None = None
) -> tuple[Variant, dict[str, object]]:
    """Return the mechanism that a text such as "mla:kv_rank=64" names, and the options of the text
    and of settings as name=value.
    """
    name, values = split_mechanism(text)
    entry = (find or find_variant)(name)
    return entry, parse_options([*values, *settings], entry)


def sized_options(
    entry: Variant, options: Mapping[str, object], sizes: DecoderSizes
) -> dict[str, object]:
    """Return the options of a mechanism, those that are not given as suggested."""
    suggested = suggested_options(entry, sizes)
    return {**{name: value for name, (value, _) in suggested.items()}, **options}


def written(name: str, options: Mapping[str, object]) -> str:
    """Return a mechanism with its options as commands read it, such as "mla:kv_rank=64"."""
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])


def check_options(entry: Variant, options: Mapping[str, object]) -> dict[str, object]:
    """Check the names and types of options, and convert lists to tuples."""
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
    _check_types(entry, options)
    return {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}


def _check_types(entry: Variant, options: Mapping[str, object]) -> None:
    """Raise unless each option has a value of the type that its mechanism takes."""
    parameters = inspect.signature(entry.build).parameters
    for name, value in options.items():
        expected = parameters[name].annotation
        if not _fits(value, expected):
            raise ArgumentError(
                f"{name} of {entry.name} is {value!r}; it must be {_type_name(expected)}",
                argument=name,
                value=value,
                allowed=_type_name(expected),
            )


def _type_name(annotation: object) -> str:
    """Return how a person writes a type."""
    return inspect.formatannotation(annotation).replace("collections.abc.", "")


def _fits(value: object, expected: object) -> bool:
    """Return whether a plain value is of the expected type, an int also of float."""
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


SYMBOLS: dict[str, str] = {
    "x": "hidden states, one row a token",
    "q": "queries of a head",
    "k": "keys of a head",
    "v": "values of a head",
    "z": "result of a head",
    "out": "result of the layer",
    "i": "position of the query",
    "j": "position of the key",
    "t": "position of the token",
    "h": "index of a query head",
    "g": "index of a key/value head",
    "H": "number of query heads",
    "G": "number of key/value heads",
    "D": "width of a query and key head",
    "W": "a learned matrix",
    "W_q": "learned matrix of the queries",
    "W_k": "learned matrix of the keys",
    "W_v": "learned matrix of the values",
    "W_o": "learned matrix of the output",
    "W_g": "learned matrix of the output gate",
    "b": "a learned bias",
    "b_o": "learned bias of the output",
    "S": "state of a head, a matrix with a row for each channel of a key",
    "n": "sum of the keys in the state, by which the result is divided",
    "s_ij": "score of query i and key j",
    "p_ij": "weight of query i and key j",
    "causal": "0 where j <= i, and minus infinity where j > i",
    "norm": "RMS norm of a head",
    "rotary": "rotary position embedding",
    "phi": "feature map, which makes queries and keys positive",
    "silu": "x sigmoid(x)",
    "elu": "x for x > 0, exp(x) - 1 below",
    "beta": "share of the old value that is replaced, between 0 and 1",
    "I": "the selected keys",
    "K": "keys",
    "V": "values",
    "topk": "number of selected keys or blocks",
    "m": "the second sequence, from which keys and values come",
    "S'": "the state after its decay",
    "R_d": "rotation by the distance d",
    "s_il": "score of query i and key l",
    "W_1": "first matrix of the decay",
    "W_2": "second matrix of the decay",
    "W_kr": "learned matrix of the rotary key",
    "k_r": "rotary key of a token, shared by all heads",
    "scale": "1 / sqrt(width of a whole query)",
    "p_tj": "weight that query t gave to key j",
    "x'": "hidden states of the token before",
    "q_r": "rotary part of a query",
    "W_c": "learned matrix from hidden states to one latent",
    "sigma": "feature map elu + 1",
    "s_h": "learned factors of a query head, one for each channel",
}
"""The meaning of a symbol in the equations, unless a mechanism gives another one."""

FUNCTIONS = frozenset(
    {"softmax", "sqrt", "exp", "ln", "max", "tanh", "sigmoid", "softplus", "relu", "sum", "min"}
    | {"mod", "mean", "abs", "product", "cos", "diag", "concat", "dot", "general", "T"}
)
"""Functions and words with a common meaning; T is a transpose."""

_INDICES = "ijthg"
"""Letters that say, below another symbol, which one of several it is."""
_SYMBOL = re.compile(r"[A-Za-z]+[0-9]?(?:_[A-Za-z0-9]+)?(?:\^[QKV]\b)?'?")
_ENGLISH = frozenset(
    {"a", "after", "all", "and", "as", "block", "blocks", "by", "compressed", "document", "each"}
    | {"earlier", "every", "for", "global", "globals", "heads", "in", "infini", "keys", "largest"}
    | {"convolution", "first", "mixed"}
    | {"layer", "memory", "of", "or", "over", "query", "random", "rotated", "same", "segment"}
    | {"selected", "split", "th", "the", "then", "token", "tokens", "way", "window", "with"}
    | {"any", "head", "last", "page", "pages", "whole"}
    | {"are", "before", "bias", "blocks", "chunk", "floor", "half", "head", "number", "one"}
    | {"others", "pair", "pairs", "positions", "rotates", "without"}
)
"""Words of the equations that are no symbols."""


def equation_symbols(entry: Variant) -> dict[str, str]:
    """Return the symbols of a mechanism with their meanings, in the order of its equation.

    The index of a symbol such as q_h has a line of its own; a KeyError names what has no meaning.
    """
    known = {**SYMBOLS, **entry.symbols}
    meanings: dict[str, str] = {}
    for token in _SYMBOL.findall(entry.equation.replace("'s ", " ")):
        base, _, index = token.partition("_")
        names = [x for x in (token, token.rstrip("'"), base, base.rstrip("'")) if x in known]
        if names:
            meanings.setdefault(names[0], known[names[0]])
        elif base.rstrip("'") not in FUNCTIONS | _ENGLISH:
            raise KeyError(f"{token} in the equation of {entry.name}")
        if not names or "_" not in names[0]:
            meanings |= {x: known[x] for x in index if x in _INDICES and x not in meanings}
    return meanings
