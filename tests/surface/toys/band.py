"""A mask in one file: a query sees keys at some distances."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.argument_checks import check_int
from regard.masks import Intervals, Mask, Reach


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """A query sees the keys that are at least `near` and less than `far` positions back."""

    near: int
    far: int

    def __post_init__(self) -> None:
        check_int("Band near", self.near, 0)
        check_int("Band far", self.far, 1)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """near <= q - k < far."""
        return (q - k >= self.near) & (q - k < self.far)

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(q - self.far + 1, q - self.near + 1)

    def reach(self) -> Reach:
        """The last `far` keys."""
        return Reach(self.far)
