"""Calls of every public op, and all the ways in which one size, dtype or device of one tensor can
be wrong.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Call:
    """A call that is right.

    Attributes:
        run: the function or module.
        given: its arguments by name; tensors may stand in tuples.
        letters: the sizes of a tensor argument, by its path, where the annotation does not say
            them.
        bound: letters that the op knows from elsewhere than this call's other tensors: a module's
            sizes, a divisor.
        free: sizes that may differ though their letter says otherwise, as "path:letter".
        loose: paths whose dtype may be any floating one, or whose device does not matter
            ("path:dtype", "path:device", "path:integers").
    """

    run: Callable[..., Any]
    given: dict[str, Any]
    letters: dict[str, str] = field(default_factory=dict)
    bound: str = ""
    free: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()


class Wrong(NamedTuple):
    """What was changed, and the arguments with it."""

    what: str
    given: dict[str, Any]


def wrongs(call: Call) -> Iterator[Wrong]:
    """The call with one thing wrong, each in turn."""
    tensors = dict(_tensors(call.given, ()))
    letters = {path: _letters(call, path, x) for path, x in tensors.items()}
    for path, x in tensors.items():
        name = ".".join(map(str, path))
        for what, other in _changes(call, name, x, letters[path], letters):
            yield Wrong(f"{name}: {what}", _put(call.given, path, other))


def _changes(
    call: Call, name: str, x: Tensor, own: list[str] | None, every: dict[Path, list[str] | None]
) -> Iterator[tuple[str, Tensor]]:
    others = [letter for found in every.values() for letter in found or ()]
    for dim, letter in enumerate(own or ()):
        known = letter in call.bound.split() or others.count(letter) > 1
        if not known or f"{name}:{letter}" in call.free:
            continue
        yield f"{letter} {x.shape[dim]} + 1", torch.cat([x, x.narrow(dim, 0, 1)], dim)
        if x.shape[dim] > 2:  # one of a batch or head would be one for all
            yield f"{letter} {x.shape[dim]} - 1", x.narrow(dim, 0, x.shape[dim] - 1)
    if own is not None:
        if f"{name}:rank" not in call.free:
            yield "one dimension less", x[0]
            yield "one dimension more", x[None]
        if x.is_floating_point() and f"{name}:integers" not in call.loose:
            yield "integers", x.to(torch.int64)
        elif not x.is_floating_point():
            yield "floats", x.to(torch.float32) + 0.5
    if (
        x.is_floating_point()
        and f"{name}:dtype" not in call.loose
        and len(every) > 1 - bool(call.bound)
    ):
        yield "another dtype", x.to(torch.float64 if x.dtype != torch.float64 else torch.float32)
    if f"{name}:device" not in call.loose:
        yield "another device", x.to("meta")


def _tensors(x: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(x, Tensor):
        yield path, x
    elif isinstance(x, dict):
        for key, y in x.items():
            yield from _tensors(y, (*path, key))
    elif isinstance(x, (tuple, list)):
        for i, y in enumerate(x):
            yield from _tensors(y, (*path, i))


def _put(x: Any, path: Path, new: Tensor) -> Any:
    if not path:
        return new
    if isinstance(x, dict):
        return {**x, path[0]: _put(x[path[0]], path[1:], new)}
    made = [_put(y, path[1:], new) if i == path[0] else y for i, y in enumerate(x)]
    return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)


def _letters(call: Call, path: Path, x: Tensor) -> list[str] | None:
    """A letter for each dimension; None where the annotation leaves them open."""
    name = ".".join(map(str, path))
    said = call.letters.get(name)
    if said is None:
        function = call.run.forward if isinstance(call.run, torch.nn.Module) else call.run
        parameter = inspect.signature(function).parameters.get(str(path[0]))
        hint = "" if parameter is None else str(parameter.annotation)
        found = re.findall(r"\[Tensor, ['\"]([^'\"]*)['\"]", hint)
        at = path[1] if len(path) > 1 and isinstance(path[1], int) else 0
        said = found[at] if at < len(found) else "..."
    words = said.replace("#", "").split()
    if "..." in words:
        return None
    if words[0].startswith("*"):
        words = [f"free{i}" for i in range(x.ndim - len(words) + 1)] + words[1:]
    assert len(words) == x.ndim, (name, words, tuple(x.shape))
    return words
