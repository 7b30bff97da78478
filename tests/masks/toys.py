"""Toy masks: two that are right, and for each promise of a mask one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import masks
from regard.masks import Intervals, Mask, Reach
from tests.masks.brute import Case


@dataclass(frozen=True, eq=False)
class Stripes(Mask):
    """Every n-th key: a right mask, whose wrong versions follow."""

    n: int

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k % self.n == 0


@dataclass(frozen=True, eq=False)
class First(Mask):
    """The first n keys: a right mask with intervals and a reach."""

    n: int

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k < self.n

    def _intervals(self, q: Tensor) -> Intervals | None:
        return Intervals(torch.zeros_like(q), torch.full_like(q, self.n))

    def reach(self) -> Reach:
        return Reach(0, self.n)


@dataclass(frozen=True, eq=False)
class Picky(Stripes):
    """Raises an error of Python's own."""

    def __post_init__(self) -> None:
        if self.n % 2 == 0:
            raise ValueError("only odd numbers")


@dataclass(frozen=True, eq=False)
class WrongRule(Stripes):
    """The keys between."""

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k % self.n == 1


@dataclass(frozen=True, eq=False)
class WrongIntervals(First):
    """One key too many."""

    def _intervals(self, q: Tensor) -> Intervals | None:
        return Intervals(torch.zeros_like(q), torch.full_like(q, self.n + 1))


@dataclass(frozen=True, eq=False)
class WrongTiles(Stripes):
    """Says that it decided, where it did not look."""

    def _states_without_intervals(self, where: Any, bk: int) -> Tensor:
        return torch.full_like(super()._states_without_intervals(where, bk), masks.FULL)


@dataclass(frozen=True, eq=False)
class WrongReach(First):
    """One key too few."""

    def reach(self) -> Reach:
        return Reach(0, self.n - 1)


@dataclass(frozen=True, eq=False)
class WrongData(First):
    """Forgets a field in files."""

    other: int = 0

    def plain_fields(self) -> dict[str, object]:
        return {"n": self.n}


@dataclass(frozen=True, eq=False)
class WrongStatic(First):
    """Says that a tensor cannot change."""

    has_text: ClassVar[bool] = False
    table: Tensor
    is_static: ClassVar[bool] = True  # type: ignore[misc,assignment]


@dataclass(frozen=True, eq=False)
class WrongCopies(First):
    """Keeps the caller's tensor."""

    has_text: ClassVar[bool] = False
    table: Tensor

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Mask:
        return WrongCopies(self.n, self.table)


@dataclass(frozen=True, eq=False)
class WrongText(Mask):
    """Prints another number than it holds."""

    kind: ClassVar[str] = "wrongtext"
    n: int

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k < self.n

    def __str__(self) -> str:
        return f"wrongtext({self.n + 1})"


@dataclass(frozen=True, eq=False)
class WrongMiss(First):
    """Offers itself as what it may be mistaken for."""

    def near_misses(self) -> tuple[Mask, ...]:
        return (self,)


@dataclass(frozen=True, eq=False)
class WrongHeads(Mask):
    """Says nothing of its heads when it is cut by them."""

    ns: tuple[int, ...]

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k < torch.tensor(self.ns)[:, None, None]


@dataclass(frozen=True, eq=False)
class WrongWords(First):
    """Has a sentence that no page has."""

    def refusal(self) -> masks.Refusal:
        return masks.Refusal("no", "never", "it")  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class WrongCausal(First):
    """Says that no later key is visible."""

    def causal_from(self) -> int:
        return 0


def _stripes(q: int, k: int, b: int, h: int) -> bool:
    return k % 3 == 0


def _first(q: int, k: int, b: int, h: int) -> bool:
    return k < 4


RIGHT = {"stripes": Case(Stripes(3), _stripes), "first": Case(First(4), _first)}
TABLE = torch.ones(2)
WRONG = {
    "rule": Case(WrongRule(3), _stripes),
    "intervals": Case(WrongIntervals(4), _first),
    "tiles": Case(WrongTiles(3), _stripes),
    "reach": Case(WrongReach(4), _first),
    "causal from": Case(WrongCausal(4), _first),
    "data": Case(WrongData(4, 1), _first),
    "static": Case(WrongStatic(4, TABLE), _first),
    "copies": Case(WrongCopies(4, TABLE), _first),
    "text": Case(WrongText(4), _first),
    "near misses": Case(WrongMiss(4), _first),
    "heads": Case(WrongHeads((4, 2)), lambda q, k, b, h: k < (4, 2)[h]),
    "words": Case(WrongWords(4), _first),
}
