"""One part of a memory that is kept two ways: its older slots in codes, the recent ones as they came."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from regard.caches.appended import Appended
from regard.caches.codes import Axis, Codes, cut, quantise
from regard.caches.packed import Coded, Packed
from regard.process import is_compiling


@dataclass(frozen=True, eq=False)
class Split:
    """Older slots in codes, and the recent ones behind them; each operation answers another one.

    rows: codes, scale and zero, which grow; odd_at, odd: as in `Codes`.

    >>> x = torch.randn(1, 2, 10, 4)
    >>> held = Split.of(x, "channel", bits=8, group=8).settled(8, torch.ones(1, 8, dtype=torch.bool), 0)
    >>> held.codes.codes.shape, held.recent.view.shape, held.answer()
    (torch.Size([1, 2, 1, 4, 8]), torch.Size([1, 2, 2, 4]), Packed((1, 2, 10, 4), torch.float32, in codes))
    """

    axis: Axis
    bits: int
    group: int
    rows: tuple[Appended, ...]
    odd_at: Tensor
    odd: Tensor
    recent: Appended

    @classmethod
    def of(cls, x: Shaped[Tensor, "B n T d"], axis: Axis, *, bits: int, group: int) -> Split:
        """A part that holds x as it came."""
        none = torch.zeros(1, 0, dtype=torch.bool, device=x.device)
        made = quantise(x[:, :, :0], none, axis, bits=bits, group=group)
        return cls.holding(made, x, axis, bits=bits, group=group)

    @classmethod
    def holding(cls, made: Codes, recent: Tensor, axis: Axis, *, bits: int, group: int) -> Split:
        """A part of these codes and recent slots."""
        rows = _rows(made, axis)
        return cls(axis, bits, group, rows, made.odd_at, made.odd, Appended(recent))

    @property
    def codes(self) -> Codes:
        """The older slots."""
        if self.axis == "exact":
            return Codes(self.rows[0].view, self.odd, self.odd, self.odd_at, self.odd)
        codes, scale, zero = (x.view for x in self.rows)
        return Codes(codes, scale, zero, self.odd_at, self.odd)

    def appended(self, x: Shaped[Tensor, "B n T d"], room: int) -> Split:
        """With x behind the recent slots, and room for so many more."""
        return replace(self, recent=self.recent.append(x, room=room))

    def settled(self, leave: int, seen: Bool[Tensor, "b L"], start: int) -> Split:
        """With the first of the recent slots in codes, which slots start, start + 1, ... then are."""
        recent = self.recent.view
        x, rest = recent[:, :, :leave], recent[:, :, leave:]
        new = quantise(x, seen, self.axis, bits=self.bits, group=self.group, start=start)
        pairs = zip(self.rows, _rows(new, self.axis), strict=True)
        rows = tuple(old.append(x.view, room=None if old.length else 0) for old, x in pairs)
        odd_at, odd = (
            torch.cat(both, 1) for both in ((self.odd_at, new.odd_at), (self.odd, new.odd))
        )
        # a copy: a view would keep the whole of a long prompt alive
        return replace(self, rows=rows, odd_at=odd_at, odd=odd, recent=Appended(rest.clone()))

    def cut(self, old: int, length: int) -> Split:
        """The first slots, of which so many are in codes; of the exceptions, those in front of `length`."""
        _, n, _, d = self.recent.view.shape
        lines = old // self.group if self.axis == "channel" else old
        made = cut(self.codes, self.axis, lines, length * n * d)
        rows = tuple(x.cut(lines) for x in self.rows)
        recent = self.recent.cut(max(0, length - old))
        return replace(self, rows=rows, odd_at=made.odd_at, recent=recent)

    def answer(self) -> Tensor:
        """All slots [B,n,S,d]: plain, or in codes still where nothing but a kernel has to know."""
        coded = Coded(self.codes, self.axis, self.bits, self.recent.view)
        if not self.rows[0].length:
            return self.recent.view
        if self.axis == "exact":
            return torch.cat([self.rows[0].view, self.recent.view], dim=2)
        packed = Packed.of(coded)
        return packed.numbers() if is_compiling() else packed


def _rows(made: Codes, axis: Axis) -> tuple[Appended, ...]:
    """What of codes grows slot by slot."""
    if axis == "exact":
        return (Appended(made.codes),)
    inner = axis == "token"  # where a line of the kernel's is a slot
    codes, scale, zero, *_ = made
    return Appended(codes), Appended(scale, inner=inner), Appended(zero, inner=inner)
