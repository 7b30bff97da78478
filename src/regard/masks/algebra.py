"""Masks of masks: all of them, any of them, not this one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks.base import Mask, Part, Slot
from regard.masks.tiling import Intervals, both, either, gaps, intersect, opposite, unite


@dataclass(frozen=True, eq=False)
class _Several(Mask):
    """Masks of one operation, flat: (a & b) & c holds a, b and c."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        flat: list[Mask] = []
        for mask in self.masks:
            if not isinstance(mask, Mask):
                raise ArgumentTypeError(
                    f"{name} got {type(mask).__name__}; it takes masks of regard.masks"
                )
            flat += mask.masks if isinstance(mask, type(self)) else [mask]
        if not flat:
            raise ArgumentError(f"{name} of no masks; give it at least one")
        object.__setattr__(self, "masks", tuple(flat))

    def select_heads(self, heads: slice) -> Mask:
        """Every member's."""
        return type(self)(tuple(mask.select_heads(heads) for mask in self.masks))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """As every member's."""
        for mask in self.masks:
            mask.require(B, H, T, S)

    def _found(self, q: Tensor) -> list[Intervals] | None:
        """Every member's intervals, or None where one has none."""
        found = []
        for mask in self.masks:
            x = mask._ranges(q[:, 0, :, 0])
            if x is None:
                return None
            found.append(x)
        return found


@dataclass(frozen=True, eq=False)
class All(_Several):
    """What every member allows: a & b & c.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & (Window(4) | Sinks(1)))
    causal & (window(4) | sinks(1))
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Every member's rule."""
        return reduce(torch.logical_and, (mask.allows(q, k) for mask in self.masks))

    def _block(self, where: Part) -> Tensor:
        return reduce(torch.logical_and, (mask._block(where) for mask in self.masks))

    def _at(self, slot: Slot) -> Tensor:
        return reduce(torch.logical_and, (mask._at(slot) for mask in self.masks))

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self._found(q)
        return None if found is None else reduce(intersect, found)

    def _undecided(self, where: Part, bk: int) -> Tensor:
        return reduce(both, (mask._states(where, bk) for mask in self.masks))

    def terms(self) -> tuple[Mask, ...]:
        """The members."""
        return self.masks

    def __str__(self) -> str:
        return " & ".join(
            f"({mask})" if isinstance(mask, Any) else str(mask) for mask in self.masks
        )


@dataclass(frozen=True, eq=False)
class Any(_Several):
    """What at least one member allows: a | b | c.

    Raises:
        ArgumentError, ArgumentTypeError: no members, or members that are not masks.

    >>> from regard.masks import Causal, Sinks, Window
    >>> print(Causal() & Window(4) | Sinks(1))
    causal & window(4) | sinks(1)
    """

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Some member's rule."""
        return reduce(torch.logical_or, (mask.allows(q, k) for mask in self.masks))

    def _block(self, where: Part) -> Tensor:
        return reduce(torch.logical_or, (mask._block(where) for mask in self.masks))

    def _at(self, slot: Slot) -> Tensor:
        return reduce(torch.logical_or, (mask._at(slot) for mask in self.masks))

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self._found(q)
        return None if found is None else reduce(unite, found)

    def _undecided(self, where: Part, bk: int) -> Tensor:
        return reduce(either, (mask._states(where, bk) for mask in self.masks))

    def __str__(self) -> str:
        return " | ".join(map(str, self.masks))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """What a mask forbids: ~a. A slot without a key stays invisible.

    Raises:
        ArgumentTypeError: what is negated is not a mask.

    >>> from regard.masks import Causal, Window
    >>> print(Causal() & ~Window(4))
    causal & ~window(4)
    """

    mask: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ArgumentTypeError(
                f"Not got {type(self.mask).__name__}; it takes a mask of regard.masks"
            )

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """The opposite of the rule."""
        return ~self.mask.allows(q, k)

    def select_heads(self, heads: slice) -> Mask:
        """What the mask of these heads forbids."""
        return Not(self.mask.select_heads(heads))

    def _block(self, where: Part) -> Tensor:
        return ~self.mask._block(where)

    def _at(self, slot: Slot) -> Tensor:
        return ~self.mask._at(slot)

    def _intervals(self, q: Tensor) -> Intervals | None:
        found = self.mask._ranges(q[:, 0, :, 0])
        return None if found is None else gaps(found)

    def _undecided(self, where: Part, bk: int) -> Tensor:
        return opposite(self.mask._states(where, bk))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """As the mask's."""
        self.mask.require(B, H, T, S)

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Several) else f"~{self.mask}"
