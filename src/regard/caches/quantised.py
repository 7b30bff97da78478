"""The cache that keeps older tokens in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    check_crop,
    check_fits,
    check_update,
    kept_until,
    memory_of,
    named,
)
from regard.caches.codes import Axis, Codes, check_codes
from regard.caches.growing import written
from regard.caches.split import Split
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, Span, as_tensor, count, follow, part


class Quantised(Cache):
    """Keep the last `residual` slots as they are, and all before them in few bits: keys per channel, values per token.

    x ~ zero + code * scale, code in 0..2^bits - 1, zero = min and scale = (max - min) / (2^bits - 1) of each group
    |x - x'| <= scale / 2, plus the rounding of scale and x' to the dtype of x

    A group is `group` slots of one channel ("channel": an outlier channel keeps its large scale to itself), or `group`
    channels of one slot ("token"). Slots leave the residual by whole groups, also within one long update, and are never
    quantised again: what is held depends on the slots that came, not on the chunks they came in. Scale and zero have the
    dtype of the memory: bits + 32 / group bits per number where that is fp16 or bf16.

    Slots at -1 take no part in a group. NaN, infinities and what exceeds a quarter of the dtype's range are kept
    aside, exactly, and disturb no other number. A group of equal numbers is exact. A crop into the quantised slots leaves
    them quantised, and the cut slots of the last group empty. Groups are of slots, so that padding in front of a row shifts
    them: rows of a padded batch agree with the row alone within the bound, not bitwise.

    Args:
        bits: 8, 4 or 2.
        group: numbers that share a scale; a part of fewer channels makes one group of them.
        residual: how many of the last slots stay as they are, at least.
        axes: "channel", "token" or "exact" (not quantised) for each part of the memory.

    Raises:
        ArgumentError: bits, group, residual or axes is not allowed; an update does not fit what is held, its parts are
            not those of axes, its channels do not divide into groups, or it requires a gradient. The cache is left as it was.

    >>> cache = Quantised(8, group=4, residual=4)
    >>> k = v = torch.randn(1, 2, 10, 4)
    >>> (keys, _), positions = cache.update((k, v), Span(0, 10))
    >>> torch.equal(keys[:, :, -4:], k[:, :, -4:]), bool((keys - k).abs().max() < 0.02), positions
    (True, True, Span(start=0, length=10))

    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), sections 3.2 and 3.3.
    """

    def __init__(
        self,
        bits: int = 8,
        *,
        group: int = 32,
        residual: int = 128,
        axes: Sequence[str] = ("channel", "token"),
    ) -> None:
        if bits not in (2, 4, 8):
            raise ArgumentError(f"bits is {bits}; it must be 8, 4 or 2")
        if group < 1 or group % (8 // bits):
            raise ArgumentError(
                f"group is {group}; it must be a multiple of {8 // bits}, for {8 // bits} codes of {bits} bits fill a byte"
            )
        if residual < 0:
            raise ArgumentError(f"residual is {residual}; it must be 0 or more")
        if not axes or not set(axes) <= set(get_args(Axis)):
            raise ArgumentError(
                f'axes are {tuple(axes)}; name "channel", "token" or "exact" for each part of the memory'
            )
        self.bits, self.group, self.residual = bits, group, residual
        self.axes = cast("tuple[Axis, ...]", tuple(axes))
        self._parts: tuple[Split, ...] = ()
        self._positions: Positions | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """bits, group, residual and axes."""
        return {
            "bits": self.bits, "group": self.group, "residual": self.residual, "axes": list(self.axes),
        }  # fmt: skip

    @property
    def quantised(self) -> int:
        """How many slots are held in few bits; the others are held as they came."""
        return len(self) - (self._parts[0].recent.length if self._parts else 0)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append memory, each [B,n,T,d], at positions; return all that is held, the older slots as their codes say."""
        check_update(memory, positions)
        if self._parts:
            check_fits(tuple(x.recent.view for x in self._parts), memory)
        self._check(memory)
        parts, old = self._parts, self.quantised
        if parts and self._positions is not None:
            parts = tuple(x.appended(new, self.group) for x, new in zip(parts, memory, strict=True))
            positions = follow(self._positions, positions)
        else:
            parts = tuple(
                Split.of(x, axis, bits=self.bits, group=self._group(axis, x.shape[3]))
                for x, axis in zip(memory, self.axes, strict=True)
            )
        leave = (max(0, count(positions) - self.residual) // self.group) * self.group - old
        if leave > 0:
            seen = as_tensor(part(positions, slice(old, old + leave)), memory[0].device) >= 0
            parts = tuple(x.settled(leave, seen, old) for x in parts)
        self._parts, self._positions = parts, positions
        return tuple(x.answer() for x in parts), positions

    def crop(self, length: int) -> None:
        """Forget every token at position `length` or later."""
        check_crop(length)
        if not self._parts or self._positions is None:
            return
        old, positions = self.quantised, kept_until(self._positions, length)
        n = written(positions)
        if n < old:  # whole groups stay, and what was behind n in the last one is empty
            old = -(-n // self.group) * self.group
            positions = _padded(part(positions, slice(0, n)), old)
        self._parts = tuple(x.cut(old, n) for x in self._parts)
        self._positions = part(positions, slice(0, max(n, old)))

    def contents(self) -> Contents:
        """Codes, scales, zeros and exceptions of each part, the recent slots, and the positions."""
        if not self._parts or self._positions is None:
            return {}
        made = {k: x for i, p in enumerate(self._parts) for k, x in _named(p.codes, i).items()}
        recent = named(tuple(x.recent.view for x in self._parts), "recent")
        return {**made, **recent, "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Hold these codes, recent slots and positions.

        Raises:
            ArgumentError: their shapes are not those of this cache.
        """
        positions, recent = contents.get("positions"), memory_of(contents, "recent")
        if positions is None or isinstance(positions, int):
            self._parts, self._positions = (), None
            return
        fields = [memory_of(contents, name) for name in Codes._fields]
        codes = tuple(Codes(*x) for x in zip(*fields, strict=False))
        self._check_held(codes, recent, count(positions))
        self._parts = tuple(
            Split.holding(made, x, axis, bits=self.bits, group=self._group(axis, x.shape[3]))
            for made, x, axis in zip(codes, recent, self.axes, strict=True)
        )
        self._positions = positions

    def mark(self) -> Any:
        """What is held: an update writes behind it only."""
        return self._parts, self._positions

    def restore(self, mark: Any) -> None:
        """Take back the update that came after `mark`."""
        self._parts, self._positions = mark

    def __len__(self) -> int:
        return 0 if self._positions is None else count(self._positions)

    def _check_held(self, codes: tuple[Codes, ...], recent: Parts, slots: int) -> None:
        """Codes and recent slots are those of so many slots."""
        if not len(codes) == len(recent) == len(self.axes):
            raise ArgumentError(
                f"{len(codes)} parts in codes and {len(recent)} recent ones for axes {self.axes}"
            )
        for i, (made, x, axis) in enumerate(zip(codes, recent, self.axes, strict=True)):
            _, n, length, d = x.shape
            group, older = self._group(axis, d), slots - length
            check_codes(made, x, axis, older, bits=self.bits, group=group, name=f"part {i}")
            at = made.odd_at
            if at.numel() and not -1 <= int(at.min()) <= int(at.max()) < older * n * d:
                raise ArgumentError(
                    f"codes of part {i} have exceptions at {int(at.min())} to {int(at.max())}; "
                    f"{older} slots of {n} x {d} numbers have places 0 to {older * n * d - 1}, and -1 for none"
                )

    def _group(self, axis: Axis, channels: int) -> int:
        """Numbers that share a scale: no more than there are channels."""
        return min(self.group, channels) if axis == "token" else self.group

    def _check(self, memory: Parts) -> None:
        if len(memory) != len(self.axes):
            raise ArgumentError(
                f"memory has {len(memory)} parts for axes {self.axes}; name an axis for each part"
            )
        for i, (x, axis) in enumerate(zip(memory, self.axes, strict=True)):
            if axis == "exact":
                continue
            if not x.is_floating_point():
                raise ArgumentTypeError(
                    f'memory {i} is {x.dtype}; only floating numbers are quantised: name its axis "exact"'
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise ArgumentError(
                    f"memory {i} requires a gradient, which codes do not have; use a Growing cache, or torch.no_grad()"
                )
            d, per = x.shape[3], 8 // self.bits
            group = self._group(axis, d)
            if axis == "token" and (group < 1 or d % group or group % per):
                allowed = ", ".join(str(g) for g in range(per, d + 1, per) if d % g == 0)
                raise ArgumentError(
                    f"memory {i} has {d} channels, which make no groups of {group} codes of {self.bits} bits; "
                    f"allowed groups: {allowed or 'none'}"
                )


def _padded(positions: Positions, slots: int) -> Positions:
    """Positions, and -1 up to so many slots."""
    if count(positions) == slots:
        return positions
    held = as_tensor(positions)
    return torch.cat([held, held.new_full((held.shape[0], slots - held.shape[1]), -1)], dim=1)


def _named(codes: Codes, i: int) -> dict[str, Tensor]:
    return {f"{name}.{i}": x for name, x in codes._asdict().items()}
