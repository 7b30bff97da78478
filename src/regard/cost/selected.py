"""Attention to selected keys (MoBA, DSA, NSA): which keys it reads, and what choosing them costs.

The functions take sizes and return exact integers; `SelectedSpec` and `NSASpec` add them up for one
layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from regard.cost.softmax import attention_flops, window_pairs
from regard.cost.spec import CacheContents, HeadShape, ParameterCounts, Quantity, Spec


def block_tokens(context: int, size: int, blocks: int) -> int:
    """Keys that the last token sees in its own block and the `blocks` - 1 fullest others.

    The own block ends at the token: min(blocks - 1, blocks in front) size + (context - 1) mod size
    + 1.

    >>> block_tokens(8192, 64, 16)
    1024
    >>> block_tokens(65, 64, 16)  # one token in its own block, 64 in front
    65
    """
    own = context - 1
    return min(blocks - 1, own // size) * size + own % size + 1


def compressed_tokens(context: int, compress: int, stride: int) -> int:
    """Compressed tokens that the last token sees: those whose blocks are complete, floor((s - l) /
    d) + 1.

    >>> compressed_tokens(8192, 32, 16), compressed_tokens(31, 32, 16)
    (511, 0)
    """
    return (context - compress) // stride + 1 if context >= compress else 0


def block_pairs(context: int, size: int, blocks: int) -> int:
    """Query-key pairs of selected blocks over the first `context` tokens: the sum of
    `block_tokens`, in closed form.

    >>> block_pairs(100, 8, 3) == sum(block_tokens(t, 8, 3) for t in range(1, 101))
    True
    """
    whole, rest = divmod(context, size)
    own = whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    most = blocks - 1
    full = min(most, whole)
    # the sum of min(most, b) over whole blocks b, and what the last, open one adds
    others = size * (full * (full - 1) // 2 + (whole - full) * most) + rest * full
    return own + size * others


def compressed_pairs(context: int, compress: int, stride: int) -> int:
    """Query-key pairs of compressed tokens over the first `context` tokens: the sum of
    `compressed_tokens`.

    n (s - l + 1) - d n (n - 1) / 2, n = `compressed_tokens`: number j is seen from the token l + j
    d on

    >>> compressed_pairs(100, 8, 4) == sum(compressed_tokens(t, 8, 4) for t in range(1, 101))
    True
    """
    n = compressed_tokens(context, compress, stride)
    return n * (context - compress + 1) - stride * n * (n - 1) // 2


def nsa_tokens(context: int, stride: int, select: int, count: int, window: int) -> int:
    """Tokens that one decoding step of native sparse attention reads, as the paper counts them: s /
    d + n l' + w.

    Never more than the context in a branch. The exact number of compressed tokens is
    `compressed_tokens`, which is l / d - 1 less.

    >>> nsa_tokens(8192, 16, 64, 16, 512)
    2048

    Source: Yuan et al. 2025 (arXiv 2502.11089), table 4.
    """
    return context // stride + min(context, count * select) + min(context, window)


def compression_flops(blocks: int, compress: int, dim: int, hidden: int) -> int:
    """FLOPs of a two-layer network on the l D numbers of each compressed block: 2 C (l D h + h D).

    >>> compression_flops(1, 32, 128, 128)
    1081344
    """
    return 2 * blocks * (compress * dim * hidden + hidden * dim)


def gate_flops(blocks: int, heads: int, dim: int) -> int:
    """FLOPs of one query's scores against block means: 2 H N D.

    >>> gate_flops(64, 32, 128)
    524288
    """
    return 2 * heads * blocks * dim


def indexer_flops(keys: int, heads: int, dim: int) -> int:
    """FLOPs of one query's index scores: 2 J S d for the products, 2 J S for the weighted sum.

    >>> indexer_flops(1, 64, 128)
    16512
    """
    return 2 * heads * keys * dim + 2 * heads * keys


class KeySelection(Protocol):
    """What choosing keys costs, and how many it chooses."""

    @property
    def values_per_token(self) -> int:
        """How many values it adds to those that a cache holds for one token."""

    def tokens(self, context: int) -> Quantity:
        """How many keys the last of `context` tokens attends to."""

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """FLOPs of choosing for one query, without linear maps."""

    def pairs(self, context: int) -> int:
        """Query-key pairs of one head over the first `context` tokens."""


@dataclass(frozen=True)
class BlockSelection:
    """MoBA: the query's own block, and the past blocks whose mean key fits the query best.

    Attributes:
        size: tokens per block.
        topk: blocks per query, its own included.

    >>> BlockSelection(512, 3).tokens(2048).value
    1536

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """

    size: int
    topk: int
    values_per_token = 0

    def tokens(self, context: int) -> Quantity:
        """The own block up to the token, and the chosen blocks."""
        return Quantity(
            block_tokens(context, self.size, self.topk),
            f"own block up to S, and at most {self.topk - 1} x {self.size} in front",
        )

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """The means of the past blocks against each query head: 2 H N D."""
        N = (context - 1) // self.size
        formula = f"2 H N D (block scores) = 2 x {heads} x {N} x {head_dim}"
        return Quantity(gate_flops(N, heads, head_dim), formula)

    def pairs(self, context: int) -> int:
        """The sum of `tokens`."""
        return block_pairs(context, self.size, self.topk)


@dataclass(frozen=True)
class IndexSelection:
    """DSA: the topk keys by an index score of J heads of d; a cache holds one index key per token.

    Attributes:
        heads, head_dim: J and d.
        topk: keys per query.

    >>> IndexSelection(4, 2, topk=3).tokens(100)
    Quantity(value=3, formula='min(S, 3)')

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """

    heads: int
    head_dim: int
    topk: int

    @property
    def values_per_token(self) -> int:
        """The index key: d."""
        return self.head_dim

    def tokens(self, context: int) -> Quantity:
        """All keys, or topk of them."""
        return Quantity(min(context, self.topk), f"min(S, {self.topk})")

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Every key is scored: 2 J S (d + 1)."""
        J, d = self.heads, self.head_dim
        return Quantity(
            indexer_flops(context, J, d),
            f"2 J S (d + 1) (index scores) = 2 x {J} x {context} x ({d} + 1)",
        )

    def pairs(self, context: int) -> int:
        """A band as wide as topk."""
        return window_pairs(context, context, self.topk)


@dataclass(frozen=True)
class SelectedSpec(Spec):
    """Softmax attention to keys that are chosen for each query; a cache holds all keys.

    Attributes:
        shape: H, G, D and E.
        selection: how keys are chosen.
    """

    shape: HeadShape
    selection: KeySelection

    @property
    def name(self) -> str:
        """The selection, and the heads."""
        return f"{type(self.selection).__name__}, {self.shape.label}"

    def step(self, context: int) -> Quantity:
        """Scores and mix of one row of chosen keys, and the choice."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        read, choice = self.selection.tokens(context), self.selection.flops(context, H, D)
        flops = attention_flops(H * read.value, D, E) + choice.value
        return Quantity(flops, f"2 H n (D + E), n = {read} + {choice.formula}")

    def prefill_flops(self, context: int) -> int:
        """Scores and mix of all chosen pairs, and the choices of all tokens."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        choices = sum(self.selection.flops(t, H, D).value for t in range(1, context + 1))
        return attention_flops(H * self.selection.pairs(context), D, E) + choices


@dataclass(frozen=True)
class NSASpec(Spec):
    """Native sparse attention: compressed tokens, the blocks that they point at, and a window, each
    with its own keys.

    The two networks that compress a block stand `counted_separately`: they run once per block, and not once per
    token.

    Attributes:
        shape: H, G, D and E of each branch.
        compress, stride, select, count, window: l, d, l', n and w.
        hidden: the widths of the networks that compress keys and values; None is D and E.
        recompress: whether each decoded token compresses all blocks anew, as `regard.nn.NSA` does.
            Otherwise a block is compressed once, which is 1 / d of a block for each token.

    >>> layer = NSASpec.of(2560, HeadShape(64, 4, 192, 128))  # the paper's model
    >>> # table 4 says 5632: it counts s / d compressed tokens
    >>> layer.read(65536).tokens, layer.cached(65536).values_per_token
    (5631, 3840)

    Source: Yuan et al. 2025 (arXiv 2502.11089), section 3 and table 4.
    """

    shape: HeadShape
    compress: int = 32
    stride: int = 16
    select: int = 64
    count: int = 16
    window: int = 512
    hidden: tuple[int, int] | None = None
    recompress: bool = False

    @classmethod
    def of(
        cls,
        dim: int,
        shape: HeadShape,
        compress: int = 32,
        stride: int = 16,
        select: int = 64,
        count: int = 16,
        window: int = 512,
    ) -> NSASpec:
        """The spec of three branches, three gates per head with biases, and two networks with place
        vectors.
        """
        matrices = shape.query_maps(dim) + 3 * shape.key_maps(dim) + 3 * dim * shape.heads
        weights = ParameterCounts(matrices, 3 * shape.heads)
        for D in (shape.head_dim, shape.value_dim):
            network = compress * D * D + D * D
            weights += ParameterCounts(network, compress * D + 2 * D, counted_separately=network)
        return cls(weights, 3 * shape.parts, shape, compress, stride, select, count, window)

    @property
    def name(self) -> str:
        """The heads, the selected blocks and the window."""
        blocks = f"{self.count} blocks of {self.select}"
        return f"NSA, {self.shape.label}, {blocks}, window {self.window}"

    @property
    def values_per_token(self) -> Quantity:
        """Keys and values of all branches."""
        G, D, E = self.shape.groups, self.shape.head_dim, self.shape.value_dim
        return Quantity(3 * G * (D + E), f"3 G (D + E) = 3 x {G} x ({D} + {E})")

    def read(self, context: int) -> CacheContents:
        """The keys and values of one branch or another that a token reads."""
        return CacheContents(self.shape.parts, self._seen(context))

    def read_by_paper(self, context: int) -> Quantity:
        """The tokens that a decoding step reads, as table 4 of the paper counts them."""
        return Quantity(
            nsa_tokens(context, self.stride, self.select, self.count, self.window),
            f"S / {self.stride} + min(S, {self.count} x {self.select}) + min(S, {self.window})",
        )

    def _blocks(self, context: int) -> int:
        return compressed_tokens(context, self.compress, self.stride)

    def _seen(self, context: int) -> int:
        chosen = block_tokens(context, self.select, self.count)
        return self._blocks(context) + chosen + min(context, self.window)

    def step(self, context: int) -> Quantity:
        """One row in all branches, the importance of blocks, and compression."""
        C, n = self._blocks(context), self._seen(context)
        if self.recompress:
            phi, why = self._compression(C), "compression, anew"
        else:
            phi, why = self._compression(1) // self.stride, "compression, shared by d tokens"
        formula = f"2 H n (D + E), n = {n} + 2 H C D (importance), C = {C} + {phi} ({why})"
        return Quantity(self._rows(n, C) + phi, formula)

    def prefill_flops(self, context: int) -> int:
        """All rows, and each block compressed once."""
        compressed = compressed_pairs(context, self.compress, self.stride)
        seen = compressed + block_pairs(context, self.select, self.count)
        seen += window_pairs(context, context, self.window)
        return self._rows(seen, compressed) + self._compression(self._blocks(context))

    def _rows(self, seen: int, compressed: int) -> int:
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        return attention_flops(H * seen, D, E) + 2 * H * compressed * D

    def _compression(self, blocks: int) -> int:
        D, E = self.shape.head_dim, self.shape.value_dim
        widths = (D, E) if self.hidden is None else self.hidden
        both = (
            compression_flops(blocks, self.compress, d, h)
            for d, h in zip((D, E), widths, strict=True)
        )
        return self.shape.groups * sum(both)
