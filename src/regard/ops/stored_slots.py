"""How kernels recognize memory in another form than `[B, G, S, d]`: codes, floats, pages.

A tensor of such memory computes values on demand; `coded`, `float8` or `paged` has the form.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class QuantizedCodes(Protocol):
    """Protocol of the codes of quantized keys or values: x = zero + code * scale of a line.

    For keys, R counts groups of tokens, and a line is one channel of a group. For values, R counts
    tokens, and a line is one group of channels of a token.
    """

    @property
    def codes(self) -> Tensor:
        """The codes, uint8 `[B, G, R, lines, bytes]`, the first of a byte in its lowest bits."""

    @property
    def scale(self) -> Tensor:
        """The scale of each line `[B, G, R, lines, 1]`, in the dtype of the numbers."""

    @property
    def zero(self) -> Tensor:
        """The number that the code 0 stands for in each line, in the shape of the scale."""


class QuantizedSlots(Protocol):
    """Protocol of quantized keys or values: codes, then recent slots in full precision."""

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
    """Protocol of keys or values as 8-bit floats, with a scale for each slot of a head."""

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
    """Keys and values whose first `slots` slots are stored as codes."""

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
    """Keys and values whose slots are stored as 8-bit floating-point numbers of one format."""

    keys: Float8Slots
    values: Float8Slots


def float8_memory(k: Tensor, v: Tensor) -> Float8Memory | None:
    """Return keys and values of an fp8 cache as it stores them."""
    keys: Float8Slots | None = getattr(k, "float8", None)
    values: Float8Slots | None = getattr(v, "float8", None)
    if keys is None or values is None or keys.format != values.format:
        return None
    return Float8Memory(keys, values)
