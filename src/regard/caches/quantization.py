"""Quantised numbers of a cache: groups of integer codes with a scale and a zero, and tensors that
hold such codes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.errors import ArgumentError

Axis: TypeAlias = Literal["channel", "token", "exact"]
"""Which numbers share a scale: of one channel over tokens, of one token over channels; or none:
kept as they are.
"""


class QuantizedGroups(NamedTuple):
    """Numbers x [B,n,L,d] as codes: x ~ zero + code * scale.

    codes: uint8 [B,n,R,lines,bytes], several codes to a byte; R is L for "token" and L / group for
        "channel". For "exact", x.
    scale, zero: [B,n,R,lines,1] in the dtype of x.
    odd_at, odd: [B,X] numbers that no group can hold, exactly, and where they stand (slot-major,
        -1: none): NaN, infinities, and what exceeds a quarter of the dtype's range. X is 0 nearly
        always.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    odd_at: Tensor
    odd: Tensor


def quantize(
    x: Shaped[Tensor, "B n L d"],
    seen: Bool[Tensor, "b L"],
    axis: Axis,
    *,
    bits: int,
    group: int,
    start: int = 0,
) -> QuantizedGroups:
    """code = round((x - zero) / scale), zero = min, scale = (max - min) / (2^bits - 1) over each
    group.

    Min and max are over the slots that are seen. The scale is rounded up, and codes are made with
    the rounded one, so that
    |x - x'| <= scale / 2. The arithmetic is in fp64: it happens once per token.

    Args:
        x: floating numbers, any for "exact"; L is divisible by the group for "channel", d for
            "token".
        seen: which slots hold a token, [B or 1, L].
        axis: which numbers share a scale.
        bits, group: bits per code, codes per group.
        start: the slot at which x begins, for `odd_at`.

    >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0])[None, None, None]
    >>> made = quantize(x, torch.ones(1, 1, dtype=torch.bool), "token", bits=2, group=4)
    >>> made.codes.flatten().tolist(), made.scale.item()  # 0 + 1 * 4 + 2 * 16 + 3 * 64
    ([228], 1.0)

    Source: Liu et al. 2024 (arXiv 2402.02750), equation 1 and section 3.
    """
    none = x.new_zeros(x.shape[0], 0)
    if axis == "exact":
        return QuantizedGroups(x, none, none, none.long(), none)
    here = seen[:, None, :, None].expand_as(x)
    fits = x.abs() <= torch.finfo(x.dtype).max / 4  # false for NaN
    strange = here & ~fits
    usable, lines = _view_as_groups(here & fits, axis, group), _view_as_groups(x, axis, group)
    low = lines.masked_fill(~usable, float("inf")).amin(-1, keepdim=True)
    high = lines.masked_fill(~usable, float("-inf")).amax(-1, keepdim=True)
    low, high = (y.where(y.isfinite(), 0) for y in (low, high))  # a group without a token
    levels, zero = 2**bits - 1, low.double()
    scale = _round_up((high.double() - zero) / levels, x.dtype)
    code = (lines.double() - zero) / scale.double()
    code = code.where(usable & (scale > 0), 0).round().clamp(0, levels)
    at, odd = _find_outliers(x, strange, start) if bool(strange.any()) else (none.long(), none)
    return QuantizedGroups(_pack(code.to(torch.uint8), bits), scale, low, at, odd)


def dequantize(
    made: QuantizedGroups, axis: Axis, shape: tuple[int, int, int, int], *, bits: int
) -> Shaped[Tensor, "B n L d"]:
    """zero + code * scale, in fp32 or better, as [B,n,L,d] of the shape.

    >>> x = torch.randn(1, 2, 8, 4)
    >>> seen = torch.ones(1, 8, dtype=torch.bool)
    >>> made = quantize(x, seen, "channel", bits=8, group=8)
    >>> bool((dequantize(made, "channel", (1, 2, 8, 4), bits=8) - x).abs().max() < 0.02)
    True
    """
    if axis == "exact":
        return made.codes
    wide = torch.promote_types(made.scale.dtype, torch.float32)
    code = _unpack(made.codes, bits).to(wide)
    lines = made.zero.to(wide) + code * made.scale.to(wide)
    if axis == "channel":
        lines = lines.transpose(-1, -2)  # [B,n,R,group,d]
    x = lines.to(made.scale.dtype).reshape(shape)
    if made.odd.shape[1]:
        _, n, _, d = shape
        row, column = (made.odd_at >= 0).nonzero(as_tuple=True)
        at = made.odd_at[row, column]
        x[row, at // d % n, at // (n * d), at % d] = made.odd[row, column]
    return x


def crop_groups(made: QuantizedGroups, axis: Axis, rows: int, numbers: int) -> QuantizedGroups:
    """The first rows of codes; of the exceptions, those among the first numbers of each row.

    >>> seen, x = torch.ones(1, 4, dtype=torch.bool), torch.randn(1, 1, 4, 2)
    >>> crop_groups(quantize(x, seen, "token", bits=8, group=2), "token", 3, 6).scale.shape
    torch.Size([1, 1, 3, 1, 1])
    """
    if axis == "exact":
        return made._replace(codes=made.codes[:, :, :rows])
    at = made.odd_at.masked_fill(made.odd_at >= numbers, -1)
    codes, scale, zero = (x[:, :, :rows] for x in made[:3])
    return QuantizedGroups(codes, scale, zero, at, made.odd)


def group_shapes(
    shape: tuple[int, int, int, int], axis: Axis, *, bits: int, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the codes and the scales of numbers [B,n,L,d] are like.

    >>> group_shapes((1, 2, 64, 16), "channel", bits=4, group=32)
    ((1, 2, 2, 16, 16), (1, 2, 2, 16, 1))
    """
    B, n, L, d = shape
    if axis == "exact":
        return shape, (B, 0)
    scale = (B, n, L // group, d) if axis == "channel" else (B, n, L, d // group)
    return (*scale, group * bits // 8), (*scale, 1)


def check_groups(
    made: QuantizedGroups,
    recent: Tensor,
    axis: Axis,
    older: int,
    *,
    bits: int,
    group: int,
    name: str = "the memory",
) -> None:
    """Codes are those of `older` slots in front of recent ones [B,n,L,d]: a kernel reads them by
    their address.

    Raises:
        ArgumentError: their sizes, dtypes or devices are others, or an exception stands behind
            their slots.

    >>> x = torch.randn(1, 2, 8, 4)
    >>> made = quantize(x, torch.ones(1, 8, dtype=torch.bool), "channel", bits=8, group=8)
    >>> check_groups(made, x, "channel", 16, bits=8, group=8)
    Traceback (most recent call last):
    regard.errors.ArgumentError: codes and scales of the memory are ((1, 2, 1, 4, 8), ...
    """
    B, n, _, d = recent.shape
    wanted = group_shapes((B, n, older, d), axis, bits=bits, group=group)
    got = tuple(made.codes.shape), tuple(made.scale.shape)
    if got != wanted or made.zero.shape != made.scale.shape or made.odd.shape != made.odd_at.shape:
        raise ArgumentError(
            f"codes and scales of {name} are {got}, not {wanted} for {older} slots in front of "
            f"{tuple(recent.shape)}, "
            f"by {axis} in {bits} bits and groups of {group}"
        )
    kind = recent.dtype if axis == "exact" else torch.uint8
    kinds = {made.scale.dtype, made.zero.dtype, made.odd.dtype}
    if made.codes.dtype != kind or kinds != {recent.dtype} or made.odd_at.dtype != torch.int64:
        raise ArgumentError(
            f"codes of {name} are {made.codes.dtype} with scales {made.scale.dtype}, zeros "
            f"{made.zero.dtype} and exceptions "
            f"{made.odd.dtype} at {made.odd_at.dtype}; they must be {kind} with {recent.dtype}, "
            "as the recent slots are, "
            "at torch.int64"
        )
    if {x.device for x in made} != {recent.device}:
        raise ArgumentError(
            f"codes of {name} are not all on {recent.device}, where the recent slots are; move "
            "them with .to()"
        )


def _view_as_groups(x: Tensor, axis: Axis, group: int) -> Tensor:
    """x [B,n,L,d] with each group as a last dim: [B,n,L/group,d,group], or
    [B,n,L,d/group,group].
    """
    if axis == "channel":
        return torch.unflatten(x, 2, (x.shape[2] // group, group)).transpose(-1, -2)
    return torch.unflatten(x, 3, (-1, group))


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x >= 0 in another dtype, rounded upwards: the codes must reach the largest number of the
    group.
    """
    y = x.to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()]
    above = (y.contiguous().view(whole) + 1).view(dtype)  # the bits of floats are in their order
    return torch.where(y.double() < x, above, y)


def _find_outliers(x: Tensor, strange: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Where the strange numbers of each row stand, and what they are, [B, X]."""
    flat, values = (y.transpose(1, 2).flatten(1) for y in (strange, x))
    most = int(flat.sum(1).max())
    at = flat.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    found = flat.gather(1, at)
    odd = values.gather(1, at).masked_fill(~found, 0)
    return (at + start * x.shape[1] * x.shape[3]).masked_fill(~found, -1), odd


def _pack(code: Tensor, bits: int) -> Tensor:
    """8 / bits codes to a byte, the first in the lowest bits."""
    per = 8 // bits
    if per == 1:
        return code.contiguous()
    shifts = torch.arange(per, dtype=torch.uint8, device=code.device) * bits
    return (torch.unflatten(code, -1, (-1, per)) << shifts).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of each byte, in order."""
    per = 8 // bits
    if per == 1:
        return packed
    shifts = torch.arange(per, dtype=torch.uint8, device=packed.device) * bits
    codes: Tensor = ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    return codes


class QuantizedAndRecent(NamedTuple):
    """What a kernel that reads codes needs: older slots in codes, and behind them the recent ones
    [B,n,l,d] as they came.
    """

    made: QuantizedGroups
    axis: Axis
    bits: int
    recent: Tensor


class LazyDequantizedTensor(Tensor):
    """A tensor [B,n,S,d] of which the older slots are codes still.

    Shape, dtype and device are those of the numbers. Any operation of torch makes the numbers
    first, once; from then on it is they that are read and written, and `coded` is None. A kernel
    that reads codes asks for `coded` instead.

    >>> from regard.caches.quantization import quantize
    >>> x = torch.randn(1, 2, 8, 4)
    >>> made = quantize(x, torch.ones(1, 8, dtype=torch.bool), "channel", bits=8, group=8)
    >>> packed = LazyDequantizedTensor.of(QuantizedAndRecent(made, "channel", 8, x[:, :, :1]))
    >>> packed.shape, packed.coded is None
    (torch.Size([1, 2, 9, 4]), False)
    >>> type(packed * 1).__name__, packed.coded is None
    ('Tensor', True)
    """

    _coded: QuantizedAndRecent
    _numbers: Tensor | None = None

    # operations arrive at __torch_dispatch__, below autograd; properties cost what they cost on any
    # tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, coded: QuantizedAndRecent) -> LazyDequantizedTensor:
        """The tensor that these codes, and the recent slots behind them, are.

        Raises:
            ArgumentError: their sizes, dtypes or devices do not go together; a kernel reads codes
                by their address.
        """
        recent = coded.recent
        B, n, length, d = recent.shape
        codes, group = coded.made.codes, coded.made.codes.shape[-1] * 8 // coded.bits
        older = codes.shape[2] * (group if coded.axis == "channel" else 1)
        check_groups(coded.made, recent, coded.axis, older, bits=coded.bits, group=group)
        made = Tensor._make_wrapper_subclass(
            cls, (B, n, older + length, d), dtype=recent.dtype, device=recent.device
        )
        made._coded = coded
        return made

    @property
    def coded(self) -> QuantizedAndRecent | None:
        """The codes, unless the numbers have been made, or there are some that codes do not
        hold.
        """
        codes_say_all = self._numbers is None and not self._coded.made.odd.shape[1]
        return self._coded if codes_say_all else None

    def numbers(self) -> Tensor:
        """The numbers as a plain tensor, always the same one."""
        if self._numbers is None:
            made, axis, bits, recent = self._coded
            older = (*recent.shape[:2], self.shape[2] - recent.shape[2], recent.shape[3])
            held = dequantize(made, axis, older, bits=bits)
            # Another thread may have made them meanwhile, and somebody may have written to those or
            # know their address: the first ones stay.
            self.__dict__.setdefault("_numbers", torch.cat([held, recent], dim=2))
        found: Tensor = self.__dict__["_numbers"]
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Any operation: on the numbers."""
        opened = tree_map_only(
            LazyDequantizedTensor, LazyDequantizedTensor.numbers, (tuple(args), dict(kwargs or {}))
        )
        return func(*opened[0], **opened[1])

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers as an array."""
        return self.numbers().numpy(force=force)

    def tolist(self) -> Any:
        """The numbers as lists."""
        return self.numbers().tolist()

    def data_ptr(self) -> int:
        """Where the numbers are."""
        return self.numbers().data_ptr()

    def untyped_storage(self) -> Any:
        """The memory of the numbers."""
        return self.numbers().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.numbers(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "codes" if self._numbers is None else "numbers"
        return f"Packed({tuple(self.shape)}, {self.dtype}, in {state})"
