"""Attention with a memory of fixed size: Infini-attention, and the functions that read and
write its compressive memory.
"""

from __future__ import annotations

from regard.deprecation import renamed
from regard.ops.memory import (
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

__getattr__ = renamed(
    __name__, {"Compressed": "CompressiveState", "Read": "MemoryRead", "sigma": "elu_plus_one"}
)
