"""The forms in which weights of linear maps, and the slots of caches, may be stored with fewer
bits.

The form of a weight is a frozen record of tensors, defined by `dequantize`. Its zero points must
not change after its first product (`regard.ops.stored_linear.stored_linear`). A tensor of stored
slots computes values on demand; `coded`, `float8` or `paged` has the form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.huge_pages import empty_like
from regard.ops.cpu import arguments
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import DTYPES

if TYPE_CHECKING:
    from regard.caches.float8 import Float8Vectors
    from regard.caches.paged import PagesOfRows
    from regard.caches.quantization import QuantizedAndRecent

GROUPS = (32, 64, 128)
"""The numbers of inputs that may share a scale."""

INT4_BLOCK = 128
"""The number of inputs whose 4-bit codes are stored together, in 64 bytes."""

INT8_BLOCK = 64
"""The number of 8-bit codes that compiled loops look up together."""

FORMS = ("half", "int8", "int8-digits", "int4", "int4-digits")
"""The loops for stored matrices, whose numbers are those of `StoredForm` in `csrc/stored.h`."""

NUMBERS_OF_DTYPES = {dtype: number for number, dtype in enumerate(DTYPES)}
"""The dtypes of stored scales, and their numbers in compiled code."""


class StoredWeight(ABC):
    """A matrix W [N, M] in a form with fewer bits; `dtype` is that of x, y and W as a whole."""

    form: ClassVar[str]
    dtype: torch.dtype

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The numbers of outputs N and inputs M."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by name, the codes first; the rows of each are the outputs."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same form with a function applied to each stored tensor."""
        changed: Any = {name: function(x) for name, x in self.tensors().items()}
        return replace(self, **changed)  # type: ignore[type-var]

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N M"]:
        """Return the matrix W [N, M], computed in fp32 and rounded once to `dtype`."""

    @property
    def device(self) -> torch.device:
        """The device of the stored tensors."""
        return next(iter(self.tensors().values())).device

    def to(self, device: torch.device, dtype: torch.dtype) -> StoredWeight:
        """Return the record on a device and for a dtype, without rounding, and once for each."""
        if (self.device, self.dtype) == (device, dtype):
            return self
        last: StoredWeight | None = vars(self).get("_last_converted", lambda: None)()
        if last is not None and (last.device, last.dtype) == (device, dtype):
            return last
        changed: Any = {"dtype": dtype}
        converted = replace(self.map(lambda x: x.to(device)), **changed)  # type: ignore[type-var]
        vars(self)["_last_converted"] = ref(converted)
        return converted

    def rows(self, first: int, last: int) -> StoredWeight:
        """Return the rows first <= i < last as a record that shares memory with this one."""
        return self.map(lambda x: x[first:last])

    def gather(self, ids: Int[Tensor, "*L"]) -> Float[Tensor, "*L M"]:
        """Return the rows with these indices, dequantized: an embedding."""
        return torch.unflatten(
            self.map(lambda x: x.index_select(0, ids.flatten())).dequantize(), 0, ids.shape
        )

    @property
    def layout(self) -> tuple[int, ...] | None:
        """What compiled code reads (sizes, group, bytes of a row, addresses), or None."""
        codes, scales, numbers = self._last_layout
        if numbers is not None and numbers[-2:] != _addresses(codes, scales):
            for name in ("_last_layout", "matrix_struct"):
                vars(self).pop(name, None)
            return self._last_layout[2]
        return numbers

    @cached_property
    def _last_layout(self) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """The codes, the scales, and their `layout`."""
        tensors = list(self.tensors().values())
        codes, scales = tensors[0], tensors[-1]
        plain = all(
            type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.is_contiguous() and x.numel()
            for x in tensors
        )
        if not plain or scales.dtype not in DTYPES:
            return codes, scales, None
        (N, M), columns = self.shape, codes.shape[1] * (2 if self.form == "int4" else 1)
        row_scales = 0 if scales is codes else scales[0].numel()
        group = 0 if scales is codes else columns // scales.shape[-1]
        row_bytes = codes.shape[1] * codes.element_size()
        addresses = _addresses(codes, scales)
        return codes, scales, (N, M, columns, group, row_bytes, row_scales, *addresses)

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the scales; of the matrix where it has none."""
        return list(self.tensors().values())[-1].dtype

    @cached_property
    def matrix_struct(self) -> array[int] | None:
        """The struct StoredMatrix of the record, packed once after `layout`; or None."""
        if self.layout is None:
            return None
        scales, width, group = list(self.tensors().values())[-1], self.layout[2], self.layout[3]
        form = fitting_form(self.form, self.dtype, scales, group, width)
        numbers = FORMS.index(form), NUMBERS_OF_DTYPES[self.scale_dtype]
        return struct_layout("StoredMatrix").pack_numbers(*numbers, *self.layout[2:])

    def __getstate__(self) -> dict[str, object]:
        """Return the tensors and sizes without addresses and shared memory."""
        computed = ("_last_layout", "_last_converted", "scale_dtype", "matrix_struct")
        return {
            name: x.clone() if isinstance(x, Tensor) and _is_part(x) else x
            for name, x in vars(self).items()
            if name not in computed
        }

    def __deepcopy__(self, memo: object) -> StoredWeight:
        """Return the record itself: it cannot change, so copies of a model share it."""
        return self

    @property
    def bytes(self) -> int:
        """The size in bytes of the stored tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())


@dataclass(frozen=True, eq=False)
class HalfWeight(StoredWeight):
    """A matrix of 16-bit numbers that is multiplied in fp32.

    W[n, m] = values[n, m]
    """

    form: ClassVar[str] = "half"
    values: Float[Tensor, "N M"]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs N and inputs M."""
        return self.values.shape

    @classmethod
    def round(cls, weight: Float[Tensor, "N M"], half: torch.dtype) -> HalfWeight:
        """Round a matrix to fp16 or bf16."""
        if half not in (torch.float16, torch.bfloat16):
            raise ArgumentError(f"half is {half}; it must be float16 or bfloat16")

        def panel(rows: Tensor) -> HalfWeight:
            values = rows.to(half, copy=True, memory_format=torch.contiguous_format)
            if bool(values.isinf().any()) and not bool(rows.isinf().any()):
                raise ArgumentError(
                    f"the weight has the value {float(rows.abs().max()):.3g}, which is too large "
                    f"for {half}; use bfloat16"
                )
            return cls(values)

        return _by_panels(weight, panel)

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N M"]:
        """Return the matrix in `dtype`; see `StoredWeight.dequantize`."""
        return self.values.to(dtype or self.dtype)


@dataclass(frozen=True, eq=False)
class Int8Weight(StoredWeight):
    """A matrix of 8-bit codes with a scale for each group of inputs.

    W[n, m] = scales[n, m // group] codes[n, m]

    Args:
        codes: int8 [N, width], width a multiple of the group; codes beyond M are 0.
        scales: fp16, bf16 or fp32 [N, width / group].
    """

    form: ClassVar[str] = "int8"
    codes: Int8[Tensor, "N width"]
    scales: Float[Tensor, "N groups"]
    columns: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def quantize(
        cls,
        weight: Float[Tensor, "N M"],
        *,
        group: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Int8Weight:
        """Quantize a matrix: each number is rounded to the nearest code.

        scale = max |w| / 127 over a group, rounded to fp16;  code = round(w / scale)
        """

        def panel(rows: Tensor) -> Int8Weight:
            values = _grouped(rows, group)
            scales = _half_scales(values.abs().amax(-1) / 127)
            codes = (values / _safe(scales)[..., None]).round_().clamp_(-127, 127)
            return cls(codes.flatten(1).to(torch.int8), scales, rows.shape[1], dtype or rows.dtype)

        return _by_panels(weight, panel)

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs N and inputs M."""
        return torch.Size((self.codes.shape[0], self.columns))

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N M"]:
        """Return the matrix in `dtype`; see `StoredWeight.dequantize`."""
        grouped = torch.unflatten(self.codes, 1, (-1, self.group))
        values = grouped.float().mul_(self.scales.float()[..., None]).flatten(1)
        return values[:, : self.columns].to(dtype or self.dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight(StoredWeight):
    """A matrix of 4-bit codes with a scale and a zero point for each group of inputs.

    W[n, m] = scales[n, 0, g] (code[n, m] - scales[n, 1, g]),  g = m // group, code in 0 ... 15

    Of 128 inputs, code c is in bits 4 (c // 16) to 4 (c // 16) + 3 of word c % 16.

    Args:
        codes: uint8 [N, width / 2], width a multiple of 128; `unpacked` returns the codes in order.
        scales: fp16, bf16 or fp32 [N, 2, width / group], the scales and then the zero points.
    """

    form: ClassVar[str] = "int4"
    codes: UInt8[Tensor, "N half"]
    scales: Float[Tensor, "N 2 groups"]
    columns: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def quantize(
        cls,
        weight: Float[Tensor, "N M"],
        *,
        group: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Int4Weight:
        """Quantize a matrix: each number is rounded to the nearest code.

        scale = (max(w, 0) - min(w, 0)) / 15 over a group, rounded to fp16
        zero = round(-min(w, 0) / scale);  code = round(w / scale) + zero
        """

        def panel(rows: Tensor) -> Int4Weight:
            values = _grouped(rows, group)
            least, greatest = values.amin(-1).clamp_(max=0), values.amax(-1).clamp_(min=0)
            scales = _half_scales((greatest - least) / 15)
            zeros = (-least / _safe(scales)).round_().clamp_(0, 15)
            codes = (values / _safe(scales)[..., None]).round_() + zeros[..., None]
            codes = codes.clamp_(0, 15).flatten(1).to(torch.uint8)
            return cls.pack(codes, scales, zeros, rows.shape[1], dtype or rows.dtype)

        return _by_panels(weight, panel)

    @classmethod
    def pack(
        cls,
        codes: UInt8[Tensor, "N width"],
        scales: Float[Tensor, "N groups"],
        zeros: Float[Tensor, "N groups"],
        columns: int,
        dtype: torch.dtype,
    ) -> Int4Weight:
        """Pack codes in 0 ... 15, in the order of the inputs, with their scales and zero points."""
        group = codes.shape[1] // scales.shape[1]
        padding = -codes.shape[1] % INT4_BLOCK
        pairs = F.pad(codes, (0, padding)).unflatten(1, (-1, 4, 2, 16))
        packed = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).mT
        factors = torch.stack((scales, zeros.to(scales.dtype)), 1)
        factors = F.pad(factors, (0, padding // group)).contiguous()
        return cls(packed.flatten(1), factors, columns, dtype)

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return 2 * self.codes.shape[1] // self.scales.shape[2]

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs N and inputs M."""
        return torch.Size((self.codes.shape[0], self.columns))

    def unpacked(self) -> UInt8[Tensor, "N width"]:
        """Return the codes [N, width], one in each byte, in the order of the inputs."""
        # byte b of word w has code 32 b + w and, above it, code 32 b + 16 + w
        pairs = torch.unflatten(self.codes, 1, (-1, 16, 4)).mT
        return torch.stack((pairs & 15, pairs >> 4), -2).flatten(1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N M"]:
        """Return the matrix in `dtype`; see `StoredWeight.dequantize`."""
        scales, zeros = self.scales.float()[..., None].unbind(1)
        codes = torch.unflatten(self.unpacked(), 1, (-1, self.group)).float()
        values = codes.sub_(zeros).mul_(scales).flatten(1)
        return values[:, : self.columns].to(dtype or self.dtype)


def fitting_form(form: str, dtype: torch.dtype, scales: Tensor, group: int, width: int) -> str:
    """Return the name of the fastest loops that are right for a stored matrix and vectors."""
    if dtype not in (torch.bfloat16, torch.float16):
        return form
    if form == "int8":
        return "int8-digits" if width % INT8_BLOCK == 0 else form
    if form != "int4" or group != INT4_BLOCK:
        return form
    zeros = scales[:, 1].float()
    exact = (zeros == zeros.round()) & (zeros >= 0) & (zeros <= 15)
    return "int4-digits" if bool(exact.all()) else form


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Return the addresses of tensors in their own dtypes."""
    return tuple(arguments.address(x, x.dtype) for x in tensors)


def _is_part(x: Tensor) -> bool:
    """Return whether a tensor is a part of larger memory."""
    return x.untyped_storage().nbytes() > x.nbytes


PANEL_ELEMENTS = 1 << 20
"""The number of elements that are quantized at a time, which bounds the temporary memory."""

AnyRecord = TypeVar("AnyRecord", bound=StoredWeight)


def _by_panels(weight: Tensor, quantize: Callable[[Tensor], AnyRecord]) -> AnyRecord:
    """Quantize a matrix in panels of rows, and return the record of the whole matrix."""
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ArgumentTypeError(
            f"weight is {weight.dtype} {tuple(weight.shape)}; it must be a matrix [N, M] of "
            "floating-point numbers"
        )
    step = max(1, PANEL_ELEMENTS // max(1, weight.shape[1]))
    if len(weight) <= step:
        return quantize(weight.detach())
    whole: list[Tensor] = []
    record = quantize(weight[:1].detach())
    for first in range(0, len(weight), step):
        parts = quantize(weight[first : first + step].detach()).tensors().values()
        if not whole:
            whole = [empty_like(x, (len(weight), *x.shape[1:])) for x in parts]
        for x, part in zip(whole, parts, strict=True):
            x[first : first + step] = part
    remaining = iter(whole)
    mapped = record.map(lambda _: next(remaining))
    assert isinstance(mapped, type(record))
    return mapped


def _grouped(weight: Tensor, group: int | None) -> Tensor:
    """Return the matrix in fp32 as [N, groups, group], padded with zeros."""
    if group is None:
        group = next((g for g in reversed(GROUPS) if weight.shape[1] % g == 0), GROUPS[0])
    if group not in GROUPS:
        raise ArgumentError(f"group is {group}; it must be one of {GROUPS}")
    values = F.pad(weight.float(), (0, -weight.shape[1] % group))
    return torch.unflatten(values, 1, (-1, group))


def _half_scales(scales: Tensor) -> Tensor:
    """Round scales to fp16; a scale that is too large, or NaN, raises."""
    rounded = scales.half()
    if not bool(rounded.isfinite().all()):
        raise ArgumentError(
            f"the weight has values up to {float(scales.max()) * 15:.3g}, or NaN, which fp16 "
            "scales cannot represent; keep this weight in full precision"
        )
    return rounded


def _safe(scales: Tensor) -> Tensor:
    """Return scales in fp32 with 1 in place of 0, whose codes are 0 then."""
    return scales.float().masked_fill(scales == 0, 1.0)


class CodedMemory(NamedTuple):
    """Keys and values whose first `slots` slots are stored as codes."""

    keys: QuantizedAndRecent
    values: QuantizedAndRecent
    slots: int


def coded_memory(k: Tensor, v: Tensor) -> CodedMemory | None:
    """Return keys and values of a quantized cache as their codes."""
    keys: QuantizedAndRecent | None = getattr(k, "coded", None)
    values: QuantizedAndRecent | None = getattr(v, "coded", None)
    if keys is None or values is None or keys.axis != "channel" or values.axis != "token":
        return None
    if keys.groups.scale.dtype != values.groups.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if slots != v.shape[2] - values.recent.shape[2]:  # a loop reads the codes of both together
        return None
    return CodedMemory(keys, values, slots)


class PagedMemory(NamedTuple):
    """Keys and values whose slots lie in the same pages."""

    keys: PagesOfRows
    values: PagesOfRows


def paged_memory(k: Tensor, v: Tensor) -> PagedMemory | None:
    """Return keys and values of a paged cache as their pages."""
    keys: PagesOfRows | None = getattr(k, "paged", None)
    values: PagesOfRows | None = getattr(v, "paged", None)
    if keys is None or values is None or keys.table is not values.table:
        return None
    return PagedMemory(keys, values) if keys.pages.shape[:3] == values.pages.shape[:3] else None


class Float8Memory(NamedTuple):
    """Keys and values whose slots are stored as 8-bit floating-point numbers of one format."""

    keys: Float8Vectors
    values: Float8Vectors


def float8_memory(k: Tensor, v: Tensor) -> Float8Memory | None:
    """Return keys and values of an fp8 cache as it stores them."""
    keys: Float8Vectors | None = getattr(k, "float8", None)
    values: Float8Vectors | None = getattr(v, "float8", None)
    if keys is None or values is None or keys.format != values.format:
        return None
    return Float8Memory(keys, values)
