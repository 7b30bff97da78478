"""Quantization of cached values in groups, and tensors that dequantize on first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from regard.caches.lazy_tensor import LazyTensor
from regard.errors import ArgumentError

Axis: TypeAlias = Literal["channel", "token", "exact"]
"""Which values share a scale: a "channel" of several tokens, or channels of one "token"."""


class QuantizedGroups(NamedTuple):
    """Values x `[B, n, L, d]` as integer codes: x ~ zero + code * scale.

    Outliers (NaN, infinities, values above a quarter of the range) are stored exactly.

    Attributes:
        codes: uint8 `[B, n, R, lines, bytes]`; R is L for "token" and L / group for "channel".
        scale: the scale of each group, `[B, n, R, lines, 1]` in the dtype of x.
        odd_at, odd: the index (slot * n + head) * d + channel of outliers, `[B, X]`, and values.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    odd_at: Tensor
    odd: Tensor


def quantize(
    x: Shaped[Tensor, "B n L d"],
    used: Bool[Tensor, "b L"],
    axis: Axis,
    *,
    bits: int,
    group: int,
    start: int = 0,
) -> QuantizedGroups:
    """Quantize values in groups: code = round((x - zero) / scale).

    zero = min and scale = (max - min) / (2^bits - 1) over the tokens of a group. The scale is
    rounded up to the dtype of x before it is used, so that |x - x'| <= scale / 2.

    Source: Liu et al. 2024 (arXiv 2402.02750), equation 1 and section 3.
    """
    none = x.new_zeros(x.shape[0], 0)
    if axis == "exact":
        return QuantizedGroups(x, none, none, none.long(), none)
    in_use = used[:, None, :, None].expand_as(x)
    fits = x.abs() <= torch.finfo(x.dtype).max / 4  # False for NaN
    strange = in_use & ~fits
    usable, lines = _view_as_groups(in_use & fits, axis, group), _view_as_groups(x, axis, group)
    low = lines.masked_fill(~usable, float("inf")).amin(-1, keepdim=True)
    high = lines.masked_fill(~usable, float("-inf")).amax(-1, keepdim=True)
    low, high = (y.where(y.isfinite(), 0) for y in (low, high))  # inf if the group has no token
    levels, zero = 2**bits - 1, low.double()
    scale = _round_up((high.double() - zero) / levels, x.dtype)
    code = (lines.double() - zero) / scale.double()
    code = code.where(usable & (scale > 0), 0).round().clamp(0, levels)
    outlier_at, odd = (
        _find_outliers(x, strange, start) if bool(strange.any()) else (none.long(), none)
    )
    return QuantizedGroups(_pack(code.to(torch.uint8), bits), scale, low, outlier_at, odd)


def dequantize(
    groups: QuantizedGroups, axis: Axis, shape: tuple[int, int, int, int], *, bits: int
) -> Shaped[Tensor, "B n L d"]:
    """Return zero + code * scale as `[B, n, L, d]`, computed in fp32 or better."""
    if axis == "exact":
        return groups.codes
    wide = torch.promote_types(groups.scale.dtype, torch.float32)
    code = _unpack(groups.codes, bits).to(wide)
    lines = groups.zero.to(wide) + code * groups.scale.to(wide)
    if axis == "channel":
        lines = lines.transpose(-1, -2)  # [B,n,R,group,d]
    x = lines.to(groups.scale.dtype).reshape(shape)
    if groups.odd.shape[1]:
        _, n, _, d = shape
        row, column = (groups.odd_at >= 0).nonzero(as_tuple=True)
        places = groups.odd_at[row, column]
        x[row, places // d % n, places // (n * d), places % d] = groups.odd[row, column]
    return x


def crop_groups(groups: QuantizedGroups, axis: Axis, rows: int, numbers: int) -> QuantizedGroups:
    """Return the first rows of codes, and the outliers among their first `numbers` values."""
    if axis == "exact":
        return groups._replace(codes=groups.codes[:, :, :rows])
    places = groups.odd_at.masked_fill(groups.odd_at >= numbers, -1)
    codes, scale, zero = (x[:, :, :rows] for x in groups[:3])
    return QuantizedGroups(codes, scale, zero, places, groups.odd)


def group_shapes(
    shape: tuple[int, int, int, int], axis: Axis, *, bits: int, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the codes and of the scales of values `[B, n, L, d]`."""
    B, n, L, d = shape
    if axis == "exact":
        return shape, (B, 0)
    scale = (B, n, L // group, d) if axis == "channel" else (B, n, L, d // group)
    return (*scale, group * bits // 8), (*scale, 1)


def check_groups(
    groups: QuantizedGroups,
    recent: Tensor,
    axis: Axis,
    slots: int,
    *,
    bits: int,
    group: int,
    name: str = "the memory",
) -> None:
    """Raise unless the codes hold `slots` slots and fit the recent ones, as kernels trust them."""
    B, n, _, d = recent.shape
    wanted = group_shapes((B, n, slots, d), axis, bits=bits, group=group)
    got = tuple(groups.codes.shape), tuple(groups.scale.shape)
    if (
        got != wanted
        or groups.zero.shape != groups.scale.shape
        or groups.odd.shape != groups.odd_at.shape
    ):
        raise ArgumentError(
            f"codes and scales of {name} are {got}, not {wanted} for {slots} slots before recent "
            f"slots {tuple(recent.shape)}, with axis {axis!r}, {bits} bits and group {group}"
        )
    kind = recent.dtype if axis == "exact" else torch.uint8
    kinds = {groups.scale.dtype, groups.zero.dtype, groups.odd.dtype}
    if groups.codes.dtype != kind or kinds != {recent.dtype} or groups.odd_at.dtype != torch.int64:
        raise ArgumentError(
            f"codes of {name} are {groups.codes.dtype} with scales {groups.scale.dtype}, zeros "
            f"{groups.zero.dtype} and outliers {groups.odd.dtype} at {groups.odd_at.dtype}; they "
            f"must be {kind} with {recent.dtype}, as the recent slots are, at torch.int64"
        )
    if {x.device for x in groups} != {recent.device}:
        raise ArgumentError(
            f"codes of {name} are not all on {recent.device}, where the recent slots are; move "
            "them with .to()"
        )


def _view_as_groups(x: Tensor, axis: Axis, group: int) -> Tensor:
    """Return x `[B, n, L, d]` with each group as the last dimension."""
    if axis == "channel":
        return torch.unflatten(x, 2, (x.shape[2] // group, group)).transpose(-1, -2)
    return torch.unflatten(x, 3, (-1, group))


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x >= 0 to another dtype, rounded up, so that codes reach the group's maximum."""
    y = x.to(dtype)
    integer_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()]

    above = (y.contiguous().view(integer_dtype) + 1).view(dtype)
    return torch.where(y.double() < x, above, y)


def _find_outliers(x: Tensor, strange: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the places and values of the outliers of each row, `[B, X]`."""
    flat, values = (y.transpose(1, 2).flatten(1) for y in (strange, x))
    most = int(flat.sum(1).max())
    places = flat.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    is_outlier = flat.gather(1, places)
    odd = values.gather(1, places).masked_fill(~is_outlier, 0)
    return (places + start * x.shape[1] * x.shape[3]).masked_fill(~is_outlier, -1), odd


def _pack(code: Tensor, bits: int) -> Tensor:
    """Pack 8 / bits codes into each byte, the first in the lowest bits."""
    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return code.contiguous()
    shifts = torch.arange(codes_per_byte, dtype=torch.uint8, device=code.device) * bits
    return (torch.unflatten(code, -1, (-1, codes_per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of each byte, in order."""
    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return packed
    shifts = torch.arange(codes_per_byte, dtype=torch.uint8, device=packed.device) * bits
    codes: Tensor = ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    return codes


class QuantizedAndRecent(NamedTuple):
    """The input of a kernel: quantized slots, then unquantized recent ones `[B, n, l, d]`."""

    groups: QuantizedGroups
    axis: Axis
    bits: int
    recent: Tensor


@dataclass(frozen=True, eq=False)
class CodedSlots:
    """The older slots that a compiled step reads as codes, one object while they are the same."""

    parts: tuple[QuantizedAndRecent, ...]
    slots: int


class LazyDequantizedTensor(LazyTensor):
    """A tensor `[B, n, S, d]` whose older slots are stored as codes until a value is needed.

    The first torch operation dequantizes them, once, and `coded` is None from then on.
    """

    is_inexact: ClassVar[bool] = True

    _coded: QuantizedAndRecent

    @classmethod
    def of(cls, coded: QuantizedAndRecent) -> LazyDequantizedTensor:
        """Create the tensor from codes and the recent slots that follow them."""
        recent = coded.recent
        B, n, length, d = recent.shape
        codes, group = coded.groups.codes, coded.groups.codes.shape[-1] * 8 // coded.bits
        slots = codes.shape[2] * (group if coded.axis == "channel" else 1)
        check_groups(coded.groups, recent, coded.axis, slots, bits=coded.bits, group=group)
        tensor = Tensor._make_wrapper_subclass(
            cls, (B, n, slots + length, d), dtype=recent.dtype, device=recent.device
        )
        tensor._coded = coded
        return tensor

    @property
    def coded(self) -> QuantizedAndRecent | None:
        """The codes; None if the values were dequantized, or if there are outliers."""
        codes_suffice = self.is_stored and not self._coded.groups.odd.shape[1]
        return self._coded if codes_suffice else None

    def compute_numbers(self) -> Tensor:
        """Dequantize the codes, and append the recent slots."""
        groups, axis, bits, recent = self._coded
        shape = (*recent.shape[:2], self.shape[2] - recent.shape[2], recent.shape[3])
        values = dequantize(groups, axis, shape, bits=bits)
        return torch.cat([values, recent], dim=2)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        state = "stored as codes" if self.is_stored else "dequantized"
        return f"LazyDequantizedTensor({tuple(self.shape)}, {self.dtype}, {state})"
