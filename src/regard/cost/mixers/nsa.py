"""Native sparse attention in a model: three branches of keys and values, compression networks, and gates."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.flops import attention_flops
from regard.cost.mixers.heads import Heads
from regard.cost.mixers.weights import Memory, Weights
from regard.cost.selected import (
    block_pairs,
    block_tokens,
    compressed_pairs,
    compressed_tokens,
    compression_flops,
)
from regard.cost.traffic import window_pairs


@dataclass(frozen=True)
class NSA:
    """Compressed tokens, the blocks that they point at, and a window: each branch has keys and values of its own.

    A block is compressed once, when it is complete: 1 / d of one for each token.

    Attributes:
        heads: H, G and dims; its matrices make queries, output, and one branch.
        compress, stride, select, count, window: l, d, l', n and w.

    >>> layer = NSA(Heads(2560, 64, 4, 192, 128))  # the paper's model
    >>> layer.read(65536).tokens, layer.memory(65536).per_token  # table 4 says 5632: it counts s / d compressed tokens
    (5631, 3840)

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3 and table 4.
    """

    heads: Heads
    compress: int = 32
    stride: int = 16
    select: int = 64
    count: int = 16
    window: int = 512

    @property
    def name(self) -> str:
        """Heads and window."""
        return f"NSA, {self.heads.name}, {self.count} blocks of {self.select}, window {self.window}"

    @property
    def weights(self) -> Weights:
        """Matrices of three branches, three gates per head with biases, and two compression networks with place vectors."""
        h = self.heads
        networks = Weights()
        for D in (h.head_dim, h.value_dim):
            places = self.compress * D
            networks += Weights(self.compress * D * D + D * D, places + 2 * D)
        return Weights(self.mapped, 3 * h.heads) + networks

    @property
    def mapped(self) -> int:
        """Queries, output, keys and values of each branch, and gates."""
        h = self.heads
        return h.asked + 3 * h.kept + 3 * h.dim * h.heads

    def memory(self, context: int) -> Memory:
        """Keys and values of all branches."""
        return Memory(3 * self.heads.parts, context)

    def read(self, context: int) -> Memory:
        """Keys and values of so many tokens of one branch or another."""
        return Memory(self.heads.parts, self._seen(context))

    def _seen(self, context: int) -> int:
        compressed = compressed_tokens(context, self.compress, self.stride)
        blocks = block_tokens(context, self.select, self.count)
        return compressed + blocks + min(context, self.window)

    def decode_flops(self, context: int) -> int:
        """One row in all branches, the importance of blocks, and the share of a compression."""
        compressed = compressed_tokens(context, self.compress, self.stride)
        return self._flops(self._seen(context), compressed) + self._compression(1) // self.stride

    def prefill_flops(self, context: int) -> int:
        """All rows, and each block compressed once."""
        compressed = compressed_pairs(context, self.compress, self.stride)
        seen = compressed + block_pairs(context, self.select, self.count)
        seen += window_pairs(context, context, self.window)
        blocks = compressed_tokens(context, self.compress, self.stride)
        return self._flops(seen, compressed) + self._compression(blocks)

    def _flops(self, seen: int, compressed: int) -> int:
        h = self.heads
        importance = 2 * h.heads * compressed * h.head_dim
        return attention_flops(h.heads * seen, h.head_dim, h.value_dim) + importance

    def _compression(self, blocks: int) -> int:
        h = self.heads
        both = (compression_flops(blocks, self.compress, D, D) for D in (h.head_dim, h.value_dim))
        return h.groups * sum(both)
