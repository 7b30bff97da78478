"""Compressive memory: its rules of reading and writing, and Infini-attention, which mixes it with
softmax.
"""

from regard.ops.memory.compressive import (
    CompressiveState,
    MemoryRead,
    elu_plus_one,
    retrieve,
    write,
)
from regard.ops.memory.infini_attention import infini_attention

__all__ = [
    "CompressiveState",
    "MemoryRead",
    "elu_plus_one",
    "infini_attention",
    "retrieve",
    "write",
]
