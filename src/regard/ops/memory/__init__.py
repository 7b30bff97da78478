"""Compressive memory: its rules of reading and writing, and Infini-attention, which mixes it with
softmax.
"""

from regard.ops.memory.compressive import Compressed, Read, retrieve, sigma, write
from regard.ops.memory.infini import infini_attention

__all__ = ["Compressed", "Read", "infini_attention", "retrieve", "sigma", "write"]
