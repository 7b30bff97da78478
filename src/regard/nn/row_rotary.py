"""Rotary positions whose frequencies follow the length of each row of a batch."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.positions import Rotary, rope_frequencies
from regard.positions.rotary import turn
from regard.positions.scalings import Scaling
from regard.span import Positions, Span, as_tensor

Lengths: TypeAlias = tuple[int, ...]
"""One past the largest position of each row; one number where all rows have the same positions."""


def lengths(positions: Positions) -> Lengths:
    """One past the largest position of each row, at least 0.

    >>> lengths(Span(3, 4)), lengths(torch.tensor([[-1, 0, 1], [4, 5, 6]]))
    ((7,), (2, 7))
    """
    if isinstance(positions, Span):
        return (max(0, positions.stop) if positions.length else 0,)
    if not positions.shape[1]:
        return (0,) * positions.shape[0]
    return tuple((positions.amax(1) + 1).clamp(min=0).tolist())


def by_row(lengths: Lengths, rows: int) -> Lengths:
    """A length for each row.

    >>> by_row((5,), 2)
    (5, 5)
    """
    return lengths * rows if len(lengths) == 1 else lengths


def changes(module: nn.Module, old: Lengths, new: Lengths) -> bool:
    """Whether a rotary of the module has other frequencies for the new lengths of the rows than for the old.

    >>> from regard.positions import LongRoPE
    >>> rotary = RowRotary(Rotary(4, scaling=LongRoPE((1.0, 2.0), (4.0, 8.0), 16, 2.0), length="current"))
    >>> [changes(rotary, (n,), (n + 1,)) for n in (8, 16, 17)]
    [False, True, False]
    """
    rows = max(len(old), len(new))
    pairs = set(zip(by_row(old, rows), by_row(new, rows), strict=True))
    rotaries = [m for m in module.modules() if isinstance(m, RowRotary)]
    return any(not rotary.same(a, b) for rotary in rotaries for a, b in pairs)


class RowRotary(nn.Module):
    """A rotary whose frequencies are those of the length of each row.

    angle = position * inv_freq_i(length of the row)

    Args:
        rotary: the scheme; its own length plays no part.

    >>> from regard.positions import DynamicNTK
    >>> turned = RowRotary(Rotary(4, scaling=DynamicNTK(2.0, 4), length="current"))
    >>> x = torch.ones(2, 1, 2, 4)
    >>> both = turned(x, torch.tensor([[2, 3], [8, 9]]))
    >>> torch.equal(both[:1], turned(x[:1], torch.tensor([[2, 3]])))
    True
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Turn x by its positions, with the frequencies of the largest position of each row."""
        inv_freq, factor = self._table(lengths(positions))
        return self._turn(x, positions, inv_freq[:, None], factor[:, None])

    def again(
        self,
        x: Float[Tensor, "B H L D"],
        positions: Positions,
        old: Int[Tensor, "b L"] | Int[Tensor, "b 1"],
        new: Lengths,
    ) -> Float[Tensor, "B H L D"]:
        """x was turned for the lengths `old`: turn it by what is missing to those of its rows now.

        R(p f_new) = R(p (f_new - f_old)) R(p f_old), in real arithmetic; x is rounded once more.
        """
        if all(self.same(0, n) for n in new):  # frequencies that changed do not come back
            return x
        known, where = old.unique(return_inverse=True)
        before, scale = self._table(tuple(known.tolist()))
        after, factor = self._table(new)
        turned = after[:, None] - before[where.to(before.device)]
        return self._turn(x, positions, turned, factor[:, None] / scale[where.to(scale.device)])

    def same(self, old: int, new: int) -> bool:
        """Whether two lengths have the same frequencies and factor."""
        (first, a), (second, b) = self._frequencies(old), self._frequencies(new)
        return a == b and torch.equal(first, second)

    def _turn(self, x: Tensor, positions: Positions, inv_freq: Tensor, factor: Tensor) -> Tensor:
        """By position * inv_freq [b,L or 1,n], times factor [b,L or 1]; angles in fp64."""
        device = torch.device("cpu") if x.device.type == "mps" else x.device  # mps has no fp64
        p = as_tensor(positions, device).to(device, torch.float64)
        angle, factor = p[..., None] * inv_freq.to(device), factor.to(device)[..., None]
        cos, sin = ((y * factor)[:, None].to(x.device, x.dtype) for y in (angle.cos(), angle.sin()))
        return turn(x, cos, sin, self.rotary.layout)

    def _table(self, rows: Lengths) -> tuple[Tensor, Tensor]:
        """inv_freq [R,n] and factor [R] of so many lengths, fp64."""
        inv_freq, factor = zip(*(self._frequencies(n) for n in rows), strict=True)
        return torch.stack(inv_freq), torch.tensor(factor, dtype=torch.float64)

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        r = self.rotary
        return _known(
            r.dim, r.base, r.scaling, r.rotary_dim, proportional=r.proportional, length=length
        )


@lru_cache(maxsize=1 << 16)
def _known(
    dim: int,
    base: float,
    scaling: Scaling | None,
    rotary_dim: int | None,
    *,
    proportional: bool,
    length: int,
) -> tuple[Tensor, float]:
    found = rope_frequencies(
        dim, base, scaling=scaling, rotary_dim=rotary_dim, proportional=proportional, length=length
    )
    return found.inv_freq, found.rotary_factor
