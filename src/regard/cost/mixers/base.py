"""What a mechanism answers when a model is added up."""

from __future__ import annotations

from typing import Protocol

from regard.cost.mixers.weights import Memory, Weights


class Mixer(Protocol):
    """One layer's attention, or what stands in its place."""

    @property
    def name(self) -> str:
        """What it is, with the sizes that tell layers of one model apart."""
        ...

    @property
    def weights(self) -> Weights:
        """Its parameters."""
        ...

    @property
    def mapped(self) -> int:
        """Numbers of the matrices that every token meets once, whatever the length."""
        ...

    def memory(self, context: int) -> Memory:
        """What its cache keeps after `context` tokens."""
        ...

    def read(self, context: int) -> Memory:
        """What one decoded token reads of it, at position context - 1."""
        ...

    def decode_flops(self, context: int) -> int:
        """FLOPs of the token at position context - 1, without those of `mapped`."""
        ...

    def prefill_flops(self, context: int) -> int:
        """FLOPs of the first `context` tokens at once, without those of `mapped`."""
        ...
