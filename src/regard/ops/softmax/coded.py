"""Keys and values of which the older slots are codes of few bits: what a kernel that reads codes asks of them.

Nothing here knows of caches: any tensor with an attribute `coded` will do (`regard.caches.packed.Packed` has one).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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
    """Keys and values in codes as compiled loops take them, how many slots they are, and what stands behind them."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    slots: int
    recent: tuple[Tensor, Tensor]


def older(k: Tensor, v: Tensor) -> Older | None:
    """The older slots of keys with a scale per channel and values with one per token; None for any other tensors."""
    keys, values = (_coded(x, axis) for x, axis in ((k, "channel"), (v, "token")))
    if keys is None or values is None:
        return None
    slots = k.shape[2] - keys.recent.shape[2]
    recent = keys.recent, values.recent
    return Older(_memory(keys, slots), _memory(values, slots), slots, recent)


def _coded(x: Tensor, axis: str) -> Coded | None:
    found: Coded | None = getattr(x, "coded", None)
    return found if found is not None and found.axis == axis else None


def _memory(x: Coded, slots: int) -> tuple[Any, ...]:
    """Codes and scales as flat memory and steps, as `regard.ops.jit.quantised` says."""
    from regard.ops.jit.bits import BF16, FP16

    codes, scale, zero = x.made.codes, x.made.scale, x.made.zero
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if zero.stride() != scale.stride():  # filled in by hand
        scale, zero = scale.contiguous(), zero.contiguous()
    tag = FP16 if scale.dtype == torch.float16 else BF16
    group = codes.shape[-1] * 8 // x.bits
    flat = tuple(_flat(y) for y in (codes, scale, zero))
    return (flat[0], codes.stride()[:4], *flat[1:], scale.stride()[:4], tag, group, x.bits, slots)


def _flat(x: Tensor) -> Any:
    """All memory that a tensor [B,G,R,lines,n] reaches, as one line; 16 bits of a number as they are."""
    last = sum((n - 1) * step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    flat = x.as_strided((last + x.shape[-1],), (1,))
    return (flat.view(torch.uint16) if x.element_size() == 2 else flat).numpy()
