"""Attention with a memory of fixed size: Infini-attention, and the functions that read and
write its compressive memory.
"""

from __future__ import annotations

from regard.ops.infini_attention import (
    CompressiveState,
    MemoryRead,
    elu_plus_one,
    infini_attention,
    retrieve,
    write,
)

__all__ = [
    "CompressiveState",
    "MemoryRead",
    "elu_plus_one",
    "infini_attention",
    "retrieve",
    "write",
]
