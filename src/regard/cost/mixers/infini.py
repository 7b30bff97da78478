"""Infini-attention in a model: softmax inside a segment, and a memory of fixed size for all segments before."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.flops import attention_flops
from regard.cost.infini import infini_flops, infini_state
from regard.cost.mixers.heads import Heads
from regard.cost.mixers.weights import Memory, Weights


@dataclass(frozen=True)
class Infini:
    """Heads with a memory of G D (E + 1) numbers, and one gate per query head.

    Attributes:
        heads: sizes and matrices.
        segment: N, tokens of a segment; the open one is kept token by token.
        delta: whether only what the memory does not answer is written.

    >>> layer = Infini(Heads(1024, 8, 8, 128, 128), segment=2048)
    >>> 12 * layer.memory(10**6 - 10**6 % 2048).state  # the paper's model: "1.6M (114x)"
    1585152

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), table 2.
    """

    heads: Heads
    segment: int
    delta: bool = False

    @property
    def name(self) -> str:
        """The segment, too."""
        return f"Infini, {self.heads.name}, segment {self.segment:,}"

    @property
    def weights(self) -> Weights:
        """Those of its heads, and the gates."""
        return self.heads.weights + Weights(biases=self.heads.heads)

    @property
    def mapped(self) -> int:
        """Those of its heads."""
        return self.heads.mapped

    def memory(self, context: int) -> Memory:
        """The open segment, which is empty once it is full, and the memory."""
        return Memory(
            self.heads.parts, context % self.segment,
            infini_state(self.heads.groups, self.heads.head_dim, self.heads.value_dim), bounded=True,
        )  # fmt: skip

    def read(self, context: int) -> Memory:
        """The segment up to the token, and the memory."""
        seen = (context - 1) % self.segment + 1
        return Memory(self.heads.parts, seen, self.memory(context).state, bounded=True)

    def decode_flops(self, context: int) -> int:
        """Softmax inside the segment, a read, and a write."""
        return self._flops((context - 1) % self.segment + 1)

    def prefill_flops(self, context: int) -> int:
        """The same for each token: pairs of one segment, reads and writes."""
        whole, rest = divmod(context, self.segment)
        pairs = whole * _triangle(self.segment) + _triangle(rest)
        h = self.heads
        return attention_flops(h.heads * pairs, h.head_dim, h.value_dim) + context * self._flops(0)

    def _flops(self, seen: int) -> int:
        h = self.heads
        return infini_flops(h.heads, h.groups, seen, h.head_dim, h.value_dim, delta=self.delta)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
