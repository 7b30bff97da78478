"""The catalogue: every mechanism by name, with the sentence, the equation and the source that define it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from torch import nn

from regard.errors import ArgumentError

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

Family: TypeAlias = Literal[
    "softmax", "latent", "linear", "memory", "selected", "cross", "additive"
]
"""What a mechanism computes: which op it calls, and what its cache keeps."""


@dataclass(frozen=True)
class Variant:
    """One mechanism of the catalogue.

    Attributes:
        name: the constructor's name.
        family: what kind of mechanism it is.
        equation: what it computes.
        source: paper and place.
        causal: whether position t is independent of positions behind it.
        build: the constructor: build(dim, heads, **options) -> a module.
        sizes: options for a small example, of `dim` 32 and 4 heads, that tests and drawings use.

    >>> from regard.nn.variants import VARIANTS
    >>> VARIANTS["gqa"].sentence
    'Grouped-query attention: H/G query heads share each key/value head.'
    """

    name: str
    family: Family
    equation: str
    source: str
    causal: bool
    build: Callable[..., nn.Module]
    sizes: dict[str, Any]

    @property
    def sentence(self) -> str:
        """What it is, in one sentence."""
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def example(self, **options: Any) -> nn.Module:
        """A small one: dim 32, 4 heads, and the sizes of the entry."""
        return self.build(32, 4, **{**self.sizes, **options})


VARIANTS: dict[str, Variant] = {}
"""Name -> mechanism, in the order of the files."""


def variant(
    *,
    family: Family,
    equation: str,
    source: str,
    causal: bool = True,
    **sizes: Any,
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Enter a constructor into the catalogue; `sizes` are the options of its small example."""

    def enter(build: Callable[P, M]) -> Callable[P, M]:
        name = build.__name__
        VARIANTS[name] = Variant(name, family, equation, source, causal, build, sizes)
        return build

    return enter


def find(name: str) -> Variant:
    """An entry of the catalogue by name.

    Raises:
        ArgumentError: no mechanism has this name.

    >>> find("mqa").family
    'softmax'
    """
    if name not in VARIANTS:
        import difflib

        near = difflib.get_close_matches(name, VARIANTS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ArgumentError(
            f"no mechanism is named {name!r}; {hint}the catalogue has {', '.join(VARIANTS)}"
        )
    return VARIANTS[name]


def build(name: str, dim: int, heads: int, **options: Any) -> nn.Module:
    """A module of the catalogue by name.

    Raises:
        ArgumentError: no mechanism has this name; or what its constructor refuses.

    >>> build("mqa", 32, 4).project.shape.G
    1
    """
    return find(name).build(dim, heads, **options)
