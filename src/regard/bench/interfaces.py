"""What is measured: a case has sizes, sizes make a problem, and a peer is one way to solve it."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

Outputs: TypeAlias = Mapping[str, Tensor]
"""Name -> tensor, in the layout of the problem."""


class Work(NamedTuple):
    """What solving a problem takes at least: floating-point operations, and bytes read and
    written.
    """

    flops: int
    bytes: int


class Problem(ABC):
    """Inputs in memory, and the right answer.

    train: the gradient is part of the answer.
    dtype, device: of the inputs.
    """

    train: bool = False
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def work(self) -> Work:
        """What it takes at least."""

    @abstractmethod
    def reference(self) -> Outputs:
        """The answer in a wider dtype, by the definition."""

    @abstractmethod
    def plain(self) -> Outputs:
        """The answer by straightforward computation in the problem's own dtype."""

    def checked(self, found: Outputs) -> Outputs:
        """The part of a peer's outputs that the reference speaks of."""
        return found


class Sizes(ABC):
    """How large a problem is; a frozen dataclass."""

    @abstractmethod
    def resized(self, *, length: int | None = None, batch: int | None = None) -> Sizes:
        """The same with another number of tokens, or of batch rows."""

    @abstractmethod
    def bytes(self, dtype: torch.dtype) -> int:
        """Memory that the problem and its reference take."""

    @abstractmethod
    def problem(self, dtype: torch.dtype, device: torch.device) -> Problem:
        """The problem with random numbers, the same each time."""


P = TypeVar("P", bound=Problem)


class Way(NamedTuple):
    """A problem made ready for a peer: what is timed, how its result is read, and the kernel's name
    where it is known.
    """

    step: Callable[[], Any]
    read: Callable[[Any], Outputs]
    kernel: str = ""


def can_solve(_: Any) -> str | None:
    """No reason against any problem."""
    return None


def few_bytes(_: Any) -> int:
    """No memory worth speaking of."""
    return 0


@dataclass(frozen=True)
class Peer(Generic[P]):
    """One way to solve problems.

    Attributes:
        name: in tables.
        about: a sentence.
        prepare: the problem -> what is timed; conversions to a peer's layout happen here.
        needs: modules that it imports.
        why_not: the problem -> why it cannot solve it, or None.
        bytes: the problem -> memory that it takes beyond the problem.

    >>> Peer("x", "Nothing.", lambda problem: Way(int, dict), needs=("no_such_module",)).missing()
    'no module no_such_module'
    """

    name: str
    about: str
    prepare: Callable[[P], Way]
    needs: tuple[str, ...] = ()
    why_not: Callable[[P], str | None] = can_solve
    bytes: Callable[[P], int] = few_bytes

    def missing(self) -> str | None:
        """The modules that are not installed, in words; None if all are."""
        absent = [name for name in self.needs if not _installed(name)]
        return f"no module {', '.join(absent)}" if absent else None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was put into sys.modules by hand
        return True


@dataclass(frozen=True)
class Case:
    """A named comparison.

    Attributes:
        name, about: in tables.
        sizes: "small", "default" and "paper" -> sizes.
        dtypes: those that are measured if none is asked for.
        peers: ours comes first: ratios are to it.
    """

    name: str
    about: str
    sizes: Mapping[str, Sizes]
    dtypes: tuple[torch.dtype, ...]
    peers: tuple[Peer[Any], ...]
