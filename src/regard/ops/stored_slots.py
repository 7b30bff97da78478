"""How kernels recognize memory that a cache keeps in another form than `[B, G, S, d]`: codes of few
bits, 8-bit floating-point numbers, and pages of a pool.

A cache returns such memory as a tensor that computes its values when an operation needs them. Its
attribute `coded`, `float8` or `paged` has the stored form as long as that is enough; kernels ask
for it here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class QuantizedCodes(Protocol):
    """Protocol of the codes of quantized keys or values: a number is x = zero + code * scale, with
    one scale and one zero per line of codes.

    For keys, R counts groups of tokens, and a line is one channel of a group. For values, R counts
    tokens, and a line is one group of channels of a token.
    """

    @property
    def codes(self) -> Tensor:
        """The codes, uint8 `[B, G, R, lines, bytes]`; several codes share a byte, the first in
        its lowest bits.
        """

    @property
    def scale(self) -> Tensor:
        """The scale of each line `[B, G, R, lines, 1]`, in the dtype of the numbers before
        quantization.
        """

    @property
    def zero(self) -> Tensor:
        """The number that the code 0 stands for in each line, in the shape of the scale."""


class QuantizedSlots(Protocol):
    """Protocol of the keys or values of a quantized cache: earlier slots are stored as codes,
    recent ones in full precision.
    """

    @property
    def groups(self) -> QuantizedCodes:
        """The groups of codes of the earlier slots."""

    @property
    def axis(self) -> str:
        """Whether the numbers that share a scale belong to one "channel" or to one "token"."""

    @property
    def bits(self) -> int:
        """The number of bits of a code: 8, 4 or 2."""

    @property
    def recent(self) -> Tensor:
        """The recent slots `[B, G, l, d]` in full precision."""


class Float8Slots(Protocol):
    """Protocol of keys or values that are stored as 8-bit floating-point numbers: x = code * scale,
    with one scale for each slot of a head.
    """

    @property
    def codes(self) -> Tensor:
        """The bytes of the numbers, uint8 `[B, G, S, d]`."""

    @property
    def scale(self) -> Tensor:
        """The scales, powers of two, `[B, G, S, 1]` in the dtype of the numbers."""

    @property
    def format(self) -> str:
        """The format of the numbers: "e4m3" or "e5m2"."""


class PagedSlots(Protocol):
    """Protocol of the keys or values of a paged cache."""

    @property
    def pages(self) -> Tensor:
        """The pages of the pool `[pages, page size, G, d]`."""

    @property
    def table(self) -> Tensor:
        """The page of each page-sized run of slots of a row, int32 `[B, columns]`."""


class CodedMemory(NamedTuple):
    """Keys and values whose first slots are stored as codes.

    Args:
        keys: the keys, with one scale for each channel of a group of tokens.
        values: the values, with one scale for each group of channels of a token.
        slots: how many slots are stored as codes; those of `recent` follow.
    """

    keys: QuantizedSlots
    values: QuantizedSlots
    slots: int


def coded_memory(k: Tensor, v: Tensor) -> CodedMemory | None:
    """Return keys and values of a quantized cache as their codes."""
    keys: QuantizedSlots | None = getattr(k, "coded", None)
    values: QuantizedSlots | None = getattr(v, "coded", None)
    if keys is None or values is None or keys.axis != "channel" or values.axis != "token":
        return None
    if keys.groups.scale.dtype != values.groups.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if slots != v.shape[2] - values.recent.shape[2]:  # a loop reads the codes of both together
        return None
    return CodedMemory(keys, values, slots)


def paged_memory(k: Tensor, v: Tensor) -> tuple[PagedSlots, PagedSlots] | None:
    """Return keys and values of a paged cache as their pages."""
    keys: PagedSlots | None = getattr(k, "paged", None)
    values: PagedSlots | None = getattr(v, "paged", None)
    if keys is None or values is None or keys.table is not values.table:
        return None
    return (keys, values) if keys.pages.shape[:3] == values.pages.shape[:3] else None


class Float8Memory(NamedTuple):
    """Keys and values whose slots are stored as 8-bit floating-point numbers of one format.

    Args:
        keys: the keys.
        values: the values.
    """

    keys: Float8Slots
    values: Float8Slots


def float8_memory(k: Tensor, v: Tensor) -> Float8Memory | None:
    """Return keys and values of an fp8 cache as it stores them."""
    keys: Float8Slots | None = getattr(k, "float8", None)
    values: Float8Slots | None = getattr(v, "float8", None)
    if keys is None or values is None or keys.format != values.format:
        return None
    return Float8Memory(keys, values)
