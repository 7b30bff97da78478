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
        ours: the parameters, with {} for the numbers in the stored name, and * for every number there is.
        take: (stored, sizes of the parameters) -> the parameters; views will do.
        give: the parameters -> what is stored. Its shape, made of the model's parameters, is what a file must have.
    """

    ours: tuple[str, ...]
    take: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]
    give: Callable[[Sequence[Tensor]], Tensor]


Names: TypeAlias = Mapping[str, "str | Rule"]
"""Stored name -> parameter, or a rule."""


def same(ours: str) -> Rule:
    """One parameter, as it is stored."""
    return Rule((ours,), lambda stored, _: (stored,), lambda parts: parts[0])


def transposed(ours: str) -> Rule:
    """A matrix stored as [in, out].

    >>> transposed("w").take(torch.zeros(2, 3), [torch.Size([3, 2])])[0].shape
    torch.Size([3, 2])
    """
    return Rule((ours,), lambda stored, _: (stored.T,), lambda parts: parts[0].T)


def rows(*ours: str) -> Rule:
    """Parameters that are stored below one another, in this order.

    >>> [x.tolist() for x in rows("a", "b").take(torch.arange(3), [torch.Size([1]), torch.Size([2])])]
    [[0], [1, 2]]
    """
    return Rule(
        ours,
        lambda stored, sizes: stored.split([size[0] for size in sizes]),
        lambda parts: torch.cat(list(parts)),
    )


@dataclass(frozen=True)
class Binding:
    """One line of a table with its numbers filled in: the parameters that a stored tensor holds."""

    rule: Rule
    ours: tuple[str, ...]


def bind(model: nn.Module, names: Names) -> dict[str, Binding]:
    """Stored name -> what it holds, for the layers that a model has; parts that it does not have drop out.

    >>> stacked = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> list(bind(stacked, {"h.{}.w": "{}.weight", "h.{}.b": "{}.bias", "lm_head": "head.weight"}))
    ['h.0.w', 'h.1.w', 'h.0.b', 'h.1.b']
    """
    by_pattern: dict[str, list[tuple[str, ...]]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        numbers = tuple(part for part in name.split(".") if part.isdigit())
        by_pattern.setdefault(_pattern(name), []).append(numbers)
    found: dict[str, Binding] = {}
    bound: set[str] = set()
    for theirs, entry in names.items():
        rule = same(entry) if isinstance(entry, str) else entry
        for numbers in _layers(rule.ours[0], by_pattern):
            ours = tuple(n for name in rule.ours for n in _expand(name, numbers, by_pattern))
            found[theirs.format(*numbers)] = Binding(rule, ours)
            bound.update(ours)
    unnamed = {name for name, _ in model.named_parameters(remove_duplicate=False)} - bound
    assert not unnamed, f"the name table lacks {sorted(unnamed)[:5]}"
    return found


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)


def _layers(ours: str, known: Mapping[str, list[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """The numbers that stand for {} in one of our names, each once."""
    marks = re.findall(r"\{\}|\*", ours)
    kept = [i for i, mark in enumerate(marks) if mark == "{}"]
    all_numbers = known.get(ours.replace("*", "{}"), [])
    return list(dict.fromkeys(tuple(numbers[i] for i in kept) for numbers in all_numbers))


def _expand(
    ours: str, numbers: tuple[str, ...], known: Mapping[str, list[tuple[str, ...]]]
) -> Iterator[str]:
    """Our name with its numbers; with * as many names as there are."""
    marks = re.findall(r"\{\}|\*", ours)
    kept = [i for i, mark in enumerate(marks) if mark == "{}"]
    pattern = ours.replace("*", "{}")
    if "*" not in marks:
        yield pattern.format(*numbers)
        return
    for found in known.get(pattern, []):
        if tuple(found[i] for i in kept) == numbers:
            yield pattern.format(*found)
