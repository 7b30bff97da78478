"""Softmax attention of heads: MHA, GQA and MQA, with a window or without, causal or not; and its use across two texts."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.flops import attention_flops
from regard.cost.latent import causal_pairs
from regard.cost.mixers.weights import Memory, Weights
from regard.cost.traffic import window_pairs


@dataclass(frozen=True)
class Heads:
    """H query heads of D dims against G keys and values, of D and E dims.

    matrices M H D + M G (D + E) + H E M;  a cache keeps G (D + E) numbers per token, of the last W where there is a window

    Attributes:
        dim, heads, groups, head_dim, value_dim: M, H, G, D, E.
        bias: whether queries, keys and values have one; `output_bias`: whether the output has.
        norms: numbers of norms on queries and keys.
        extra: other numbers beside the matrices, such as one sink per head.
        window: W, the keys that a query sees at most, its own included; None is all.
        causal: whether a query sees its own and earlier keys only.

    >>> layer = Heads(12288, 96, 96, 128, 128)  # one layer of GPT-3: 4 x 12288 x 128 numbers for each of 96 heads
    >>> layer.weights.matrices, layer.memory(2048).per_token
    (603979776, 24576)
    >>> Heads(1152, 4, 1, 256, 256, window=512).memory(32768).tokens
    512

    Source: Vaswani et al. 2017 (arXiv 1706.03762); groups: Ainslie et al. 2023 (arXiv 2305.13245).
    """

    dim: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    bias: bool = False
    output_bias: bool = False
    norms: int = 0
    extra: int = 0
    window: int | None = None
    causal: bool = True

    @property
    def name(self) -> str:
        """The number of heads decides."""
        if self.heads == self.groups:
            kind = "MHA"
        else:
            kind = "MQA" if self.groups == 1 else "GQA"
        sizes = f"{kind} {self.heads}/{self.groups} heads of {self.head_dim}"
        return sizes if self.window is None else f"{sizes}, window {self.window:,}"

    @property
    def weights(self) -> Weights:
        """Four matrices, and their biases."""
        H, G, D, E = self.heads, self.groups, self.head_dim, self.value_dim
        biases = (H * D + G * (D + E) if self.bias else 0) + (self.dim if self.output_bias else 0)
        return Weights(self.mapped, biases + self.extra, self.norms)

    @property
    def mapped(self) -> int:
        """All four."""
        return self.asked + self.kept

    @property
    def asked(self) -> int:
        """Numbers of the matrices that make queries, and the output."""
        return self.dim * self.heads * (self.head_dim + self.value_dim)

    @property
    def kept(self) -> int:
        """Numbers of the matrices that make keys and values."""
        return self.dim * self.groups * (self.head_dim + self.value_dim)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Keys, and values."""
        return (self.groups, self.head_dim), (self.groups, self.value_dim)

    def seen(self, context: int) -> int:
        """Keys that the token at position context - 1 sees."""
        return context if self.window is None else min(context, self.window)

    def memory(self, context: int) -> Memory:
        """Keys and values; nothing is kept where nothing is decoded."""
        if not self.causal:
            return Memory()
        return Memory(self.parts, self.seen(context), bounded=self.window is not None)

    def read(self, context: int) -> Memory:
        """All of it."""
        return self.memory(context)

    def decode_flops(self, context: int) -> int:
        """Scores and mix of one row."""
        return attention_flops(self.heads * self.seen(context), self.head_dim, self.value_dim)

    def prefill_flops(self, context: int) -> int:
        """Scores and mix of what the mask leaves."""
        pairs = self.heads * self.pairs(context)
        return attention_flops(pairs, self.head_dim, self.value_dim)

    def pairs(self, context: int) -> int:
        """Query-key pairs of one head."""
        if not self.causal:
            return context * context
        if self.window is None:
            return causal_pairs(context, context)
        return window_pairs(context, context, self.window)


@dataclass(frozen=True)
class Cross:
    """Queries of one text against the keys and values of another, which are made once.

    >>> Cross(Heads(512, 8, 8, 64, 64)).memory(100).numbers  # of a source of 100 tokens
    102400
    """

    heads: Heads

    @property
    def name(self) -> str:
        """As its heads, across."""
        return f"across, {self.heads.name}"

    @property
    def weights(self) -> Weights:
        """Those of its heads."""
        return self.heads.weights

    @property
    def mapped(self) -> int:
        """A written token meets queries and output only."""
        return self.heads.asked

    def memory(self, context: int) -> Memory:
        """Keys and values of a source as long as the context."""
        return Memory(self.heads.parts, context, bounded=True, given=True)

    def read(self, context: int) -> Memory:
        """All of it."""
        return self.memory(context)

    def decode_flops(self, context: int) -> int:
        """One row against the source."""
        return self.heads.decode_flops(context)

    def prefill_flops(self, context: int) -> int:
        """Keys and values of the source."""
        return 2 * context * self.heads.kept
