"""Attention with a memory of fixed size: Infini-attention and its compressive memory."""

from __future__ import annotations

from regard.ops.memory import Compressed, Read, infini_attention, retrieve, sigma, write

__all__ = ["Compressed", "Read", "infini_attention", "retrieve", "sigma", "write"]
