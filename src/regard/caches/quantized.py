"""The quantized cache: older tokens are stored in few bits, the most recent ones exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast, get_args

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    LayerSize,
    OpenSlot,
    Parts,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.caches.buffer_writes import can_write_in_place, write_slots
from regard.caches.contiguous import written_length
from regard.caches.quantization import (
    Axis,
    CodedSlots,
    LazyDequantizedTensor,
    QuantizedAndRecent,
    QuantizedGroups,
    check_groups,
    crop_groups,
    quantize,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.huge_pages import empty_like
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor, concat_positions, slice_positions, slot_count
from regard.units import plural


class GrowingTensor:
    """Slots `[B, n, L, ...]` with spare capacity, so that appending does not copy old slots.

    A returned view keeps its values, unless a shorter `GrowingTensor` of its buffer grows. With
    `inner`, values of a line are contiguous over the slots, which makes loops faster.
    """

    def __init__(self, memory: Tensor, length: int | None = None, *, inner: bool = False) -> None:
        if inner and length is None:
            memory = memory.transpose(2, 3).contiguous().transpose(2, 3)
        self._memory, self._inner = memory, inner
        self.length = memory.shape[2] if length is None else length

    @property
    def view(self) -> Tensor:
        """The slots that are used, without the spare capacity."""
        return self._memory[:, :, : self.length]

    def append(self, new: Shaped[Tensor, "B n T ..."], *, room: int | None = None) -> GrowingTensor:
        """Return these slots followed by new ones."""
        start, stop = self.length, self.length + new.shape[2]
        if start == stop:
            return self
        if torch.is_grad_enabled() and (new.requires_grad or self._memory.requires_grad):
            return GrowingTensor(torch.cat([self.view, new], dim=2))
        memory = self._memory
        if stop > memory.shape[2]:
            room = stop // 4 if room is None else room
            memory = self._empty(stop + room)
            memory[:, :, :start] = self.view
        (memory,) = write_slots((memory,), (new,), start)
        return GrowingTensor(memory, stop, inner=self._inner)

    def with_room(self, slots: int) -> GrowingTensor:
        """Return these slots in a buffer that the caller may write, with room for more slots."""
        if self.length < self._memory.shape[2] and can_write_in_place((self._memory,), ()):
            return self
        memory = self._empty(self.length + slots)
        memory[:, :, : self.length] = self.view
        return GrowingTensor(memory, self.length, inner=self._inner)

    @property
    def buffer(self) -> Tensor:
        """The buffer of the slots, with the spare capacity."""
        return self._memory

    def cut(self, length: int) -> GrowingTensor:
        """Return the first `length` slots."""
        return GrowingTensor(self._memory, length, inner=self._inner)

    def _empty(self, slots: int) -> Tensor:
        B, n, _, *rest = self._memory.shape
        if self._inner:
            return empty_like(self._memory, (B, n, rest[0], slots, *rest[1:])).transpose(2, 3)
        return empty_like(self._memory, (B, n, slots, *rest))


@dataclass(frozen=True, eq=False)
class QuantizedPart:
    """One part of the memory: quantized older slots, then recent ones; it is immutable."""

    axis: Axis
    bits: int
    group: int
    rows: tuple[GrowingTensor, ...]
    odd_at: Tensor
    odd: Tensor
    recent: GrowingTensor

    @classmethod
    def of(
        cls, x: Shaped[Tensor, "B n T d"], axis: Axis, *, bits: int, group: int
    ) -> QuantizedPart:
        """Create a part that holds x unquantized."""
        none = torch.zeros(1, 0, dtype=torch.bool, device=x.device)
        groups = quantize(x[:, :, :0], none, axis, bits=bits, group=group)
        return cls.holding(groups, x, axis, bits=bits, group=group)

    @classmethod
    def holding(
        cls, groups: QuantizedGroups, recent: Tensor, axis: Axis, *, bits: int, group: int
    ) -> QuantizedPart:
        """Create a part from codes and recent slots."""
        rows = _growing_fields(groups, axis)
        return cls(axis, bits, group, rows, groups.odd_at, groups.odd, GrowingTensor(recent))

    @property
    def codes(self) -> QuantizedGroups:
        """The quantized older slots, as groups."""
        if self.axis == "exact":
            return QuantizedGroups(self.rows[0].view, self.odd, self.odd, self.odd_at, self.odd)
        codes, scale, zero = (x.view for x in self.rows)
        return QuantizedGroups(codes, scale, zero, self.odd_at, self.odd)

    def appended(self, x: Shaped[Tensor, "B n T d"], room: int) -> QuantizedPart:
        """Return the part with x appended to the recent slots, with room for `room` more."""
        return replace(self, recent=self.recent.append(x, room=room))

    def with_oldest_quantized(
        self, count: int, used: Bool[Tensor, "b L"], start: int
    ) -> QuantizedPart:
        """Return the part with its first `count` recent slots quantized."""
        recent = self.recent.view
        x, rest = recent[:, :, :count], recent[:, :, count:]
        new = quantize(x, used, self.axis, bits=self.bits, group=self.group, start=start)
        pairs = zip(self.rows, _growing_fields(new, self.axis), strict=True)
        rows = tuple(old.append(x.view, room=None if old.length else 0) for old, x in pairs)
        odd_at, odd = (
            torch.cat(both, 1) for both in ((self.odd_at, new.odd_at), (self.odd, new.odd))
        )
        # a copy, because a view would keep a long prompt in memory
        return replace(self, rows=rows, odd_at=odd_at, odd=odd, recent=GrowingTensor(rest.clone()))

    def cut(self, old: int, length: int) -> QuantizedPart:
        """Return the first `length` slots, of which `old` are quantized."""
        _, n, _, d = self.recent.view.shape
        lines = old // self.group if self.axis == "channel" else old
        groups = crop_groups(self.codes, self.axis, lines, length * n * d)
        rows = tuple(x.cut(lines) for x in self.rows)
        recent = self.recent.cut(max(0, length - old))
        return replace(self, rows=rows, odd_at=groups.odd_at, recent=recent)

    def all_slots(self) -> Tensor:
        """Return all slots `[B, n, S, d]`, dequantized lazily."""
        coded = QuantizedAndRecent(self.codes, self.axis, self.bits, self.recent.view)
        if not self.rows[0].length:
            return self.recent.view
        if self.axis == "exact":
            return torch.cat([self.rows[0].view, self.recent.view], dim=2)
        packed = LazyDequantizedTensor.of(coded)
        return packed.numbers() if is_compiling() else packed


def _growing_fields(groups: QuantizedGroups, axis: Axis) -> tuple[GrowingTensor, ...]:
    """Return the fields of the codes that grow slot by slot."""
    if axis == "exact":
        return (GrowingTensor(groups.codes),)
    inner = axis == "token"  # the kernel reads one slot per line
    codes, scale, zero, *_ = groups
    return GrowingTensor(codes), GrowingTensor(scale, inner=inner), GrowingTensor(zero, inner=inner)


class Quantized(Cache):
    """A cache that keeps the last `residual` slots exactly and all earlier ones in few bits.

    Keys are quantized per channel and values per token:

        x ~ zero + code * scale, code in 0..2^bits - 1
        zero = min and scale = (max - min) / (2^bits - 1) of each group
        |x - x'| <= scale / 2, plus the rounding of scale and x' to the dtype of x

    A group is `group` slots of one channel ("channel", so that an outlier channel does not enlarge
    other scales), or `group` channels of one slot ("token"). Slots are quantized in whole groups
    and never twice, whatever the chunks. fp16 and bf16 take bits + 32 / group bits per value.

    NaN, infinities and values above a quarter of the dtype's range are stored exactly. A crop does
    not dequantize. Left padding moves a row's tokens to other groups, so that rows of a padded
    batch equal the single row within the bound, not bitwise.

    Args:
        bits: 8, 4 or 2.
        group: values that share a scale; a part with fewer channels forms one group of them.
        residual: the smallest number of recent slots that stay unquantized.
        axes: "channel", "token" or "exact" (not quantized) for each part of the memory.

    Raises:
        ArgumentError: an argument is not allowed; an update does not fit, has another number of
            parts or channels that form no groups, or requires a gradient.

    >>> cache = Quantized(8, group=4, residual=4)
    >>> k = v = torch.randn(1, 2, 10, 4)
    >>> (keys, _), positions = cache.update((k, v), Span(0, 10))
    >>> torch.equal(keys[:, :, -4:], k[:, :, -4:]), bool((keys - k).abs().max() < 0.02), positions
    (True, True, Span(start=0, length=10))

    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), sections 3.2 and 3.3.
    """

    crop_is_exact: ClassVar[bool] = False
    kind: ClassVar[str | None] = "quantized"
    needs_widths: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ("_parts", "_positions")
    static_step_refusal: ClassVar[str | None] = (
        "Python counts the tokens of a group, and reads its outliers where it is coded"
    )

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
                f"group is {group}; it must be a multiple of {8 // bits}, since {8 // bits} codes "
                f"of {bits} bits fill a byte"
            )
        if residual < 0:
            raise ArgumentError(f"residual is {residual}; it must be 0 or more")
        if not axes or not set(axes) <= set(get_args(Axis)):
            raise ArgumentError(
                f'axes are {tuple(axes)}; name "channel", "token" or "exact" for each part of the '
                "memory"
            )
        self.bits, self.group, self.residual = bits, group, residual
        self.axes = cast("tuple[Axis, ...]", tuple(axes))
        self._parts: tuple[QuantizedPart, ...] = ()
        self._positions: Positions | None = None
        # the codes as `open_slot` gave them last, and the rows from which they were made
        self._coded: tuple[list[tuple[GrowingTensor, ...]], CodedSlots | None] = [], None

    @classmethod
    def for_layer(cls, size: LayerSize) -> Quantized:
        """Create a cache of 8 bits and 128 recent slots; the first of several parts is taken for
        keys.
        """
        widths = size.widths
        axes = ["channel" if i == 0 and len(widths) > 1 else "token" for i in range(len(widths))]
        tokens = [width for width, axis in zip(widths, axes, strict=True) if axis == "token"]
        group = max(g for g in range(1, 33) if all(w % min(g, w) == 0 for w in tokens))
        return cls(8, group=group, axes=axes)

    @property
    def settings(self) -> Mapping[str, object]:
        """Bits, group, residual and axes, as constructor arguments."""
        return {**super().settings, "axes": list(self.axes)}

    @property
    def quantized(self) -> int:
        """The number of slots that are quantized; the others are stored unquantized."""
        return len(self) - (self._parts[0].recent.length if self._parts else 0)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append memory, each part `[B, n, T, d]`; return all memory, older slots dequantized."""
        check_update(memory, positions)
        if self._parts:
            check_same_layout(tuple(x.recent.view for x in self._parts), memory)
        self._check(memory)
        parts, old = self._parts, self.quantized
        if parts and self._positions is not None:
            parts = tuple(x.appended(new, self.group) for x, new in zip(parts, memory, strict=True))
            positions = concat_positions(self._positions, positions)
        else:
            parts = tuple(
                QuantizedPart.of(x, axis, bits=self.bits, group=self._group(axis, x.shape[3]))
                for x, axis in zip(memory, self.axes, strict=True)
            )
        count = self._due(slot_count(positions)) - old
        if count > 0:
            parts = _with_oldest_quantized(parts, positions, old, count)
        self._parts, self._positions = parts, positions
        return tuple(x.all_slots() for x in parts), positions

    def open_slot(self, positions: Positions) -> OpenSlot | None:
        """Return the recent slots with room for a token per row, and the codes before them."""
        parts, stored = self._parts, self._positions
        if not parts or stored is None or slot_count(positions) != 1 or "exact" in self.axes:
            return None
        if any(x.recent.buffer.requires_grad for x in parts):
            return None
        count = self._due(len(self) + 1) - self.quantized
        if count > parts[0].recent.length:  # the new token itself
            return None
        if count > 0:
            parts = _with_oldest_quantized(parts, stored, self.quantized, count)
        parts = tuple(replace(x, recent=x.recent.with_room(self.group)) for x in parts)
        if count <= 0:
            self._parts = parts  # the same contents with more room
        if any(x.odd.shape[1] for x in parts):
            return None
        buffers, slot = tuple(x.recent.buffer for x in parts), parts[0].recent.length
        coded = self._codes_of(parts, len(self) - slot)
        return OpenSlot(buffers, slot, stored, coded=coded, state=parts)

    def close_slot(self, opened: OpenSlot, positions: Positions) -> None:
        """Count the slot as written."""
        length = opened.slot + 1
        self._parts = tuple(replace(x, recent=x.recent.cut(length)) for x in opened.state)
        self._positions = positions

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        if not self._parts or self._positions is None:
            return
        old, positions = self.quantized, positions_before(self._positions, length)
        n = written_length(positions)
        if n < old:  # whole groups stay; slots after n in the last group become empty
            old = -(-n // self.group) * self.group
            positions = _pad_positions(slice_positions(positions, slice(0, n)), old)
        self._parts = tuple(x.cut(old, n) for x in self._parts)
        self._positions = slice_positions(positions, slice(0, max(n, old)))

    def contents(self) -> Contents:
        """Return codes, scales, zeros and outliers, the recent slots, and the positions."""
        if not self._parts or self._positions is None:
            return {}
        groups = {
            k: x for i, p in enumerate(self._parts) for k, x in _named_fields(p.codes, i).items()
        }
        recent = named_parts(tuple(x.recent.view for x in self._parts), "recent")
        return {**groups, **recent, "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the codes, recent slots and positions."""
        positions, recent = contents.get("positions"), parts_of(contents, "recent")
        self._coded = [], None
        if positions is None or isinstance(positions, int):
            self._parts, self._positions = (), None
            return
        fields = [parts_of(contents, name) for name in QuantizedGroups._fields]
        codes = tuple(QuantizedGroups(*x) for x in zip(*fields, strict=False))
        self._check_contents(codes, recent, slot_count(positions))
        self._parts = tuple(
            QuantizedPart.holding(
                groups, x, axis, bits=self.bits, group=self._group(axis, x.shape[3])
            )
            for groups, x, axis in zip(codes, recent, self.axes, strict=True)
        )
        self._positions = positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)

    def _due(self, slots: int) -> int:
        """Return how many of a number of slots are to be quantized."""
        return (max(0, slots - self.residual) // self.group) * self.group

    def _codes_of(self, parts: tuple[QuantizedPart, ...], slots: int) -> CodedSlots | None:
        """Return the codes of the parts, the same object as last time if they are the same."""
        rows, (known, coded) = [x.rows for x in parts], self._coded
        if len(rows) != len(known) or any(x is not y for x, y in zip(rows, known, strict=True)):
            codes = (
                QuantizedAndRecent(x.codes, x.axis, x.bits, x.recent.buffer[:, :, :0])
                for x in parts
            )
            coded = CodedSlots(tuple(codes), slots) if slots else None
            self._coded = rows, coded
        return coded

    def _check_contents(
        self, codes: tuple[QuantizedGroups, ...], recent: Parts, slots: int
    ) -> None:
        """Raise unless codes and recent slots together hold `slots` slots."""
        if not len(codes) == len(recent) == len(self.axes):
            raise ArgumentError(
                f"codes of {plural(len(codes), 'part')} and recent slots of {len(recent)} for axes "
                f"{self.axes}; there must be one of each per axis"
            )
        for i, (groups, x, axis) in enumerate(zip(codes, recent, self.axes, strict=True)):
            _, n, length, d = x.shape
            group, quantized = self._group(axis, d), slots - length
            check_groups(groups, x, axis, quantized, bits=self.bits, group=group, name=f"part {i}")
            places = groups.odd_at
            if (
                places.numel()
                and not -1 <= int(places.min()) <= int(places.max()) < quantized * n * d
            ):
                raise ArgumentError(
                    f"codes of part {i} have outliers at {int(places.min())} to "
                    f"{int(places.max())}; {quantized} slots of {n} x {d} values have places 0 to "
                    f"{quantized * n * d - 1}, and -1 for none"
                )

    def _group(self, axis: Axis, channels: int) -> int:
        """Return the number of values per group, at most the number of channels."""
        return min(self.group, channels) if axis == "token" else self.group

    def _check(self, memory: Parts) -> None:
        if len(memory) != len(self.axes):
            raise ArgumentError(
                f"memory has {plural(len(memory), 'part')} for axes {self.axes}; name an axis for "
                "each part"
            )
        for i, (x, axis) in enumerate(zip(memory, self.axes, strict=True)):
            if axis == "exact":
                continue
            if not x.is_floating_point():
                raise ArgumentTypeError(
                    f"memory {i} is {x.dtype}; only floating dtypes can be quantized: name its "
                    "axis "
                    '"exact"'
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise ArgumentError(
                    f"memory {i} requires a gradient, which codes do not have; use a Growing "
                    "cache, or torch.no_grad()"
                )
            d, per = x.shape[3], 8 // self.bits
            group = self._group(axis, d)
            if axis == "token" and (group < 1 or d % group or group % per):
                allowed = ", ".join(str(g) for g in range(per, d + 1, per) if d % g == 0)
                raise ArgumentError(
                    f"memory {i} has {d} channels, which do not divide into groups of {group} "
                    f"codes of {self.bits} bits; allowed groups: {allowed or 'none'}"
                )


def _with_oldest_quantized(
    parts: tuple[QuantizedPart, ...], positions: Positions, old: int, count: int
) -> tuple[QuantizedPart, ...]:
    """Return the parts with `count` more slots quantized, after the first `old` ones."""
    group = slice_positions(positions, slice(old, old + count))
    used = as_tensor(group, parts[0].recent.view.device) >= 0
    return tuple(x.with_oldest_quantized(count, used, old) for x in parts)


def _pad_positions(positions: Positions, slots: int) -> Positions:
    """Return positions padded with -1 to a number of slots."""
    if slot_count(positions) == slots:
        return positions
    tensor = as_tensor(positions)
    return torch.cat(
        [tensor, tensor.new_full((tensor.shape[0], slots - tensor.shape[1]), -1)], dim=1
    )


def _named_fields(codes: QuantizedGroups, i: int) -> dict[str, Tensor]:
    return {f"{name}.{i}": x for name, x in codes._asdict().items()}
