"""The cache `Float8`: 8-bit floating-point numbers, with a scale for each vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.caches.base import (
    Cache,
    Contents,
    Parts,
    check_crop,
    check_same_layout,
    check_update,
    named_parts,
    parts_of,
    positions_before,
)
from regard.caches.contiguous import written_length
from regard.caches.lazy_tensor import LazyTensor
from regard.caches.quantized import GrowingTensor
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_compiling
from regard.span import Positions, Span, concat_positions, slice_positions, slot_count
from regard.units import plural

Float8Format: TypeAlias = Literal["e4m3", "e5m2"]
"""The bits of exponent and of fraction of an 8-bit floating-point number."""


class _Format(NamedTuple):
    """The dtype, the bits of fraction, and the largest number mantissa * 2^exponent of a format."""

    dtype: torch.dtype
    fraction: int
    mantissa: float
    exponent: int


FORMATS: Mapping[str, _Format] = {
    "e4m3": _Format(torch.float8_e4m3fn, 3, 1.75, 8),
    "e5m2": _Format(torch.float8_e5m2, 2, 1.75, 15),
}
"""The formats by name; the largest numbers are 448 and 57344."""


class Float8Vectors(NamedTuple):
    """Vectors x `[B, n, S, d]` as 8-bit floats with a scale for each: x ~ code * scale."""

    codes: Tensor
    scale: Tensor
    format: str


def to_float8(
    x: Float[Tensor, "*n d"], format: Float8Format = "e4m3"
) -> tuple[UInt8[Tensor, "*n d"], Float[Tensor, "*n 1"]]:
    """Round vectors to 8-bit floating-point numbers with a power of two as the scale of each.

    code = round(x / scale),  scale = the smallest 2^i with max|x| / 2^i <= the largest number

    NaN stays NaN; an infinity becomes NaN in e4m3, which has none. They do not change the scale.

    Source: Micikevicius et al. 2022 (arXiv 2209.05433), section 3; OCP Microscaling Formats 1.0.
    """
    dtype, fraction, mantissa, exponent = FORMATS[format]
    info = torch.finfo(x.dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # larger numbers would be rounded up to infinity in the dtype of x; this one is as close
    largest = (2 - 2.0**-fraction) * 2.0 ** (math.frexp(info.max)[1] - 1)
    wide = wide.clamp(-largest, largest).where(wide.isfinite(), wide)
    most = wide.abs().masked_fill(~wide.isfinite(), 0.0).amax(-1, keepdim=True)
    share = 2 * torch.frexp(most).mantissa
    power = (most / share).where(most > 0, 1.0)  # exact: 2^i <= most < 2^(i + 1)
    scale = power * torch.where(share > mantissa, 2.0 ** (1 - exponent), 2.0**-exponent)
    if format == "e4m3":  # torch would make a finite number of an infinity
        wide = wide.masked_fill(wide.isinf(), torch.nan)
    scale = scale.where(most > 0, 1.0).clamp(min=info.smallest_normal)
    return (wide / scale).to(dtype).view(torch.uint8), scale.to(x.dtype)


def from_float8(
    codes: UInt8[Tensor, "*n d"], scale: Float[Tensor, "*n 1"], format: str
) -> Float[Tensor, "*n d"]:
    """Return code * scale in the dtype of the scale, exact but for its subnormal numbers."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    numbers = codes.view(FORMATS[format].dtype).to(wide) * scale.to(wide)
    return numbers.to(scale.dtype)


class LazyFloat8Tensor(LazyTensor):
    """A tensor `[B, n, S, d]` that is stored as 8-bit floats until a value is needed."""

    is_inexact: ClassVar[bool] = True

    _vectors: Float8Vectors

    @classmethod
    def of(cls, vectors: Float8Vectors) -> LazyFloat8Tensor:
        """Create the tensor from its stored form."""
        check_vectors(vectors, "the memory")
        codes, scale, _ = vectors
        tensor = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        tensor._vectors = vectors
        return tensor

    @property
    def float8(self) -> Float8Vectors | None:
        """The stored form; None if the values were computed."""
        return self._vectors if self.is_stored else None

    def compute_numbers(self) -> Tensor:
        """Compute every number from its code and the scale of its vector."""
        return from_float8(*self._vectors)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        state = f"stored as {self._vectors.format}" if self.is_stored else "computed"
        return f"LazyFloat8Tensor({tuple(self.shape)}, {self.dtype}, {state})"


def check_vectors(vectors: Float8Vectors, name: str) -> None:
    """Raise unless codes and scales fit each other; kernels read them by their address."""
    codes, scale, format = vectors
    check_format(format)
    wanted = (*codes.shape[:-1], 1)
    if codes.ndim != 4 or tuple(scale.shape) != wanted:
        raise ArgumentError(
            f"codes of {name} are {tuple(codes.shape)} with scales {tuple(scale.shape)}; codes "
            f"must be [batch, heads, length, dim], and scales {wanted}"
        )
    if codes.dtype != torch.uint8 or not scale.is_floating_point():
        raise ArgumentError(
            f"codes of {name} are {codes.dtype} with scales {scale.dtype}; codes must be "
            "torch.uint8, and scales floating"
        )
    if codes.device != scale.device:
        raise ArgumentError(
            f"codes of {name} are on {codes.device}, and their scales on {scale.device}; move them "
            "with .to()"
        )


def check_format(format: str) -> None:
    """Raise unless a format is known."""
    if format not in FORMATS:
        raise ArgumentError(
            f"format is {format!r}; it must be {' or '.join(FORMATS)}{suggest(format, FORMATS)}"
        )


@dataclass(frozen=True, eq=False)
class _Float8Part:
    """One part of the memory. It is immutable: each operation returns a new one."""

    codes: GrowingTensor
    scale: GrowingTensor
    format: str

    @classmethod
    def of(cls, vectors: Float8Vectors) -> _Float8Part:
        """Create a part that holds some slots."""
        codes, scale, format = vectors
        return cls(GrowingTensor(codes), GrowingTensor(scale), format)

    @property
    def vectors(self) -> Float8Vectors:
        """The codes and scales of all slots."""
        return Float8Vectors(self.codes.view, self.scale.view, self.format)

    def appended(self, new: _Float8Part) -> _Float8Part:
        """Return the part with new slots appended."""
        return _Float8Part(
            self.codes.append(new.codes.view), self.scale.append(new.scale.view), self.format
        )

    def cut(self, length: int) -> _Float8Part:
        """Return the first `length` slots."""
        return _Float8Part(self.codes.cut(length), self.scale.cut(length), self.format)

    def all_slots(self) -> Tensor:
        """Return all slots, whose numbers are computed when an operation needs them."""
        packed = LazyFloat8Tensor.of(self.vectors)
        return packed.numbers() if is_compiling() else packed


class Float8(Cache):
    """A cache that stores every token in 8-bit floating-point numbers (fp8).

        x ~ code * scale, a code of 8 bits for each number,
        scale = the smallest power of two with which the vector of a head fits into the format

    Each token and head has a scale of its own, so that nothing is calibrated or clipped, and a row
    has the same digits in any batch or chunks. A number is off by at most 2^-4 ("e4m3") or 2^-3
    ("e5m2") of itself, or by half of the smallest number times the scale.

    NaN stays NaN; an infinity becomes NaN in e4m3, which has none.

    Args:
        format: "e4m3" or "e5m2".

    Raises:
        ArgumentError: the format is unknown; an update does not fit, or requires a gradient.

    >>> cache = Float8()
    >>> k = v = torch.randn(1, 2, 10, 16)
    >>> (keys, _), positions = cache.update((k, v), Span(0, 10))
    >>> bool(((keys - k).abs() <= k.abs() / 16 + 1e-3).all()), positions, cache.bytes
    (True, Span(start=0, length=10), 800)

    Source: Micikevicius et al. 2022 (arXiv 2209.05433), section 3.
    """

    kind: ClassVar[str | None] = "fp8"
    needs_widths: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ("_parts", "_positions")

    def __init__(self, format: Float8Format = "e4m3") -> None:
        check_format(format)
        self.format = format
        self._parts: tuple[_Float8Part, ...] = ()
        self._positions: Positions | None = None

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Append memory, each part `[B, n, T, d]`; return all memory, rounded to 8 bits."""
        check_update(memory, positions)
        parts = self._parts
        if parts:
            stored = tuple(x.scale.view.expand(*x.codes.view.shape) for x in parts)
            check_same_layout(stored, memory)
        for i, x in enumerate(memory):
            _check_part(i, x)
        new = tuple(
            _Float8Part.of(Float8Vectors(*to_float8(x.detach(), self.format), self.format))
            for x in memory
        )
        if parts and self._positions is not None:
            new = tuple(x.appended(y) for x, y in zip(parts, new, strict=True))
            positions = concat_positions(self._positions, positions)
        self._parts, self._positions = new, positions
        return tuple(x.all_slots() for x in new), positions

    def crop(self, length: int) -> None:
        """Remove every token at position `length` or later."""
        check_crop(length)
        if not self._parts or self._positions is None:
            return
        positions = positions_before(self._positions, length)
        n = written_length(positions)
        self._parts = tuple(x.cut(n) for x in self._parts)
        self._positions = slice_positions(positions, slice(0, n))

    def contents(self) -> Contents:
        """Return the codes and scales of each part, and the positions."""
        if not self._parts or self._positions is None:
            return {}
        codes = named_parts(tuple(x.codes.view for x in self._parts), "codes")
        scales = named_parts(tuple(x.scale.view for x in self._parts), "scale")
        return {**codes, **scales, "positions": self._positions}

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the codes, scales and positions."""
        positions = contents.get("positions")
        if positions is None or isinstance(positions, int):
            self._parts, self._positions = (), None
            return
        codes, scales = parts_of(contents, "codes"), parts_of(contents, "scale")
        slots = slot_count(positions)
        if len(codes) != len(scales) or any(x.ndim != 4 or x.shape[2] != slots for x in codes):
            raise ArgumentError(
                f"contents have codes {[tuple(x.shape) for x in codes]} and scales "
                f"{[tuple(x.shape) for x in scales]} for {plural(slots, 'slot')}; there must be "
                "one of each per part, of as many slots"
            )
        pairs = zip(codes, scales, strict=True)
        vectors = [Float8Vectors(*pair, self.format) for pair in pairs]
        for i, x in enumerate(vectors):
            check_vectors(x, f"part {i}")
        self._parts = tuple(map(_Float8Part.of, vectors))
        self._positions = positions

    def __len__(self) -> int:
        return 0 if self._positions is None else slot_count(self._positions)


def _check_part(i: int, x: Tensor) -> None:
    """Raise unless a part of the memory can be stored in 8-bit floating-point numbers."""
    if not x.is_floating_point():
        raise ArgumentTypeError(
            f"memory {i} is {x.dtype}; only floating dtypes can be stored as fp8: use a Growing "
            "cache"
        )
    if not x.shape[3]:
        raise ArgumentError(
            f"memory {i} is {tuple(x.shape)}, of which no vector has a scale; use a Growing cache"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise ArgumentError(
            f"memory {i} requires a gradient, which fp8 does not have; use a Growing cache, or "
            "torch.no_grad()"
        )
