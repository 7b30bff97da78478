"""Compressive memory: the functions that read and write it, and Infini-attention, which
combines it with softmax attention.
"""

from regard.deprecation import renamed
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

__getattr__ = renamed(
    __name__, {"Compressed": "CompressiveState", "Read": "MemoryRead", "sigma": "elu_plus_one"}
)
