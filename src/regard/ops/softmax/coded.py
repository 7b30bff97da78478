"""Keys and values of which the older slots are codes of few bits: what a kernel that reads codes asks of them.

Nothing here knows of caches: any tensor with an attribute `coded` will do (`regard.caches.packed.Packed` has one).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Made(Protocol):
    """Codes of a run of slots, and what each group of them means: x = zero + code * scale."""

    @property
    def codes(self) -> Tensor:
        """uint8 [B,G,R,lines,bytes], several codes to a byte, the first in its lowest bits."""

    @property
    def scale(self) -> Tensor:
        """[B,G,R,lines,1], in the dtype of the numbers."""

    @property
    def zero(self) -> Tensor:
        """As the scale."""


class Coded(Protocol):
    """Older slots in codes, and recent ones behind them."""

    @property
    def made(self) -> Made:
        """The codes."""

    @property
    def axis(self) -> str:
        """Which numbers share a scale: of one "channel", or of one "token"."""

    @property
    def bits(self) -> int:
        """Of a code: 8, 4 or 2."""

    @property
    def recent(self) -> Tensor:
        """The recent slots [B,G,l,d], as they came."""


class Older(NamedTuple):
    """Keys and values in codes, and what stands behind them.

    memory: as a compiled entry takes it: for keys and for values the address of their codes and its steps of B, G, rows and
    lines, the addresses of scales and zeros and their steps, columns of a group, bits. dtype: of the scales. slots: how many.
    held: what must live as long as the addresses are used.
    """

    memory: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    recent: tuple[Tensor, Tensor]
    held: tuple[Tensor, ...]


def older(k: Tensor, v: Tensor) -> Older | None:
    """The older slots of keys with a scale per channel and values with one per token; None for any other tensors."""
    keys, values = (_coded(x, axis) for x, axis in ((k, "channel"), (v, "token")))
    if keys is None or values is None or keys.made.scale.dtype != values.made.scale.dtype:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    if (
        slots != v.shape[2] - values.recent.shape[2]
    ):  # of two memories: one loop over codes reads both
        return None
    (first, held), (second, more) = _memory(keys), _memory(values)
    recent = keys.recent, values.recent
    return Older((*first, *second), keys.made.scale.dtype, slots, recent, (*held, *more))


def _coded(x: Tensor, axis: str) -> Coded | None:
    found: Coded | None = getattr(x, "coded", None)
    return found if found is not None and found.axis == axis else None


def _memory(x: Coded) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Addresses and steps of codes, scales and zeros; and what they are of."""
    codes, scale, zero = x.made.codes, x.made.scale, x.made.zero
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if zero.stride() != scale.stride():  # filled in by hand
        scale, zero = scale.contiguous(), zero.contiguous()
    group = codes.shape[-1] * 8 // x.bits
    at = (codes.data_ptr(), *codes.stride()[:4], scale.data_ptr(), zero.data_ptr(), *scale.stride()[:4])  # fmt: skip
    return (*at, group, x.bits), (codes, scale, zero)
