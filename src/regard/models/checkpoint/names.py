"""Name tables: which parameters a stored tensor holds, and how they lie in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rule:
    """How a stored tensor becomes parameters, and back.

    Attributes:
        ours: the parameters, with {} for the numbers in the stored name, and * for every number
            there is.
        take: (stored, sizes of the parameters) -> the parameters; views will do.
        give: the parameters -> what is stored. Its shape, made of the model's parameters, is what a
            file must have.
        beside: a parameter without which there is no such tensor: a part may have another name
            where it has a neighbour.
    """

    ours: tuple[str, ...]
    take: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]
    give: Callable[[Sequence[Tensor]], Tensor]
    beside: str | None = None


Names: TypeAlias = Mapping[str, str | Rule]
"""Stored name -> parameter, or a rule."""
OWN: Names = {}
"""The table of a family of our own: every parameter is stored under the name that it has here."""


def same(ours: str, *, beside: str | None = None) -> Rule:
    """One parameter, as it is stored."""
    return Rule((ours,), lambda stored, _: (stored,), lambda parts: parts[0], beside)


def transposed(ours: str) -> Rule:
    """A matrix stored as [in, out].

    >>> transposed("w").take(torch.zeros(2, 3), [torch.Size([3, 2])])[0].shape
    torch.Size([3, 2])
    """
    return Rule((ours,), lambda stored, _: (stored.T,), lambda parts: parts[0].T)


def rows(*ours: str) -> Rule:
    """Parameters that are stored below one another, in this order.

    >>> sizes = [torch.Size([1]), torch.Size([2])]
    >>> [x.tolist() for x in rows("a", "b").take(torch.arange(3), sizes)]
    [[0], [1, 2]]
    """
    return Rule(
        ours,
        lambda stored, sizes: stored.split_with_sizes([size[0] for size in sizes]),
        lambda parts: torch.cat(list(parts)),
    )


def both(theirs: str, ours: str) -> dict[str, str]:
    """The lines of a table for a module's weight and bias.

    >>> both("ln_f", "norm")
    {'ln_f.weight': 'norm.weight', 'ln_f.bias': 'norm.bias'}
    """
    return {f"{theirs}.{end}": f"{ours}.{end}" for end in ("weight", "bias")}


@dataclass(frozen=True)
class Binding:
    """One line of a table with its numbers filled in: the parameters that a stored tensor holds."""

    rule: Rule
    ours: tuple[str, ...]


def bind(model: nn.Module, names: Names) -> dict[str, Binding]:
    """Stored name -> what it holds, for the layers that a model has; parts that it does not have
    drop out.

    >>> stacked = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> list(bind(stacked, {"h.{}.w": "{}.weight", "h.{}.b": "{}.bias", "lm_head": "head.weight"}))
    ['h.0.w', 'h.1.w', 'h.0.b', 'h.1.b']
    """
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if names is OWN:
        return {name: Binding(same(name), (name,)) for name in every}
    by_pattern: dict[str, list[tuple[str, ...]]] = {}
    for name in every:
        numbers = tuple(part for part in name.split(".") if part.isdigit())
        by_pattern.setdefault(pattern(name), []).append(numbers)
    found: dict[str, Binding] = {}
    bound: set[str] = set()
    for theirs, entry in names.items():
        rule = same(entry) if isinstance(entry, str) else entry
        for numbers in _layers(rule.beside or rule.ours[0], by_pattern):
            ours = tuple(n for name in rule.ours for n in _expand(name, numbers, by_pattern))
            found[theirs.format(*numbers)] = Binding(rule, ours)
            bound.update(ours)
    unnamed = set(every) - bound
    assert not unnamed, f"the name table lacks {sorted(unnamed)[:5]}"
    return found


_MARK = re.compile(r"\{\}|\*|(?<![^.])\d+(?![^.])")
"""What stands for a number in one of our names, or is one: "layers.{}.q.steps.0.weight" has two."""


def pattern(name: str) -> str:
    """A name with {} for each of its numbers.

    >>> pattern("layers.12.q.weight")
    'layers.{}.q.weight'
    """
    return _MARK.sub("{}", name)


def _fitting(
    ours: str, known: Mapping[str, list[tuple[str, ...]]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Numbers of the parameters that one of our names may mean: all of them, and those that stand
    for {}.
    """
    marks = _MARK.findall(ours)
    for numbers in known.get(pattern(ours), []):
        pairs = list(zip(marks, numbers, strict=True))
        if all(mark in ("{}", "*", number) for mark, number in pairs):
            yield numbers, tuple(number for mark, number in pairs if mark == "{}")


def _layers(ours: str, known: Mapping[str, list[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """The numbers that stand for {} in one of our names, each once."""
    return list(dict.fromkeys(kept for _, kept in _fitting(ours, known)))


def _expand(
    ours: str, numbers: tuple[str, ...], known: Mapping[str, list[tuple[str, ...]]]
) -> Iterator[str]:
    """Our name with its numbers; with * as many names as there are."""
    if "*" not in ours:
        yield ours.format(*numbers)
        return
    for found, kept in _fitting(ours, known):
        if kept == numbers:
            yield pattern(ours).format(*found)
