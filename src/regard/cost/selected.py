"""Count attention to selected keys (MoBA, Quest, MSA, DSA, QSA, NSA): how many keys each query
reads, and the cost of selecting them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from regard.cost.softmax import attention_flops, window_pairs
from regard.cost.spec import (
    NO_QUANTITY,
    CacheContents,
    Description,
    HeadShape,
    ParameterCounts,
    Quantity,
    Spec,
)
from regard.units import plural


def block_tokens(context: int, size: int, blocks: int) -> int:
    """Return the keys that the last token reads in its own block and in `blocks` - 1 earlier ones:
    min(blocks - 1, earlier blocks) size + (context - 1) mod size + 1.
    """
    own = context - 1
    return min(blocks - 1, own // size) * size + own % size + 1


def compressed_tokens(context: int, compress: int, stride: int) -> int:
    """Return the number of compressed tokens that the last token reads, which is that of the
    complete blocks: floor((s - l) / d) + 1 for s = `context`, l = `compress` and d = `stride`.
    """
    return (context - compress) // stride + 1 if context >= compress else 0


def block_pairs(context: int, size: int, blocks: int) -> int:
    """Return the query-key pairs of selected blocks over the first `context` tokens: the sum of
    `block_tokens`, in closed form.
    """
    whole, rest = divmod(context, size)
    own = whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    max_others = blocks - 1
    full = min(max_others, whole)
    # the sum of min(max_others, b) over the tokens of whole blocks b, and of the incomplete block
    others = size * (full * (full - 1) // 2 + (whole - full) * max_others) + rest * full
    return own + size * others


def compressed_pairs(context: int, compress: int, stride: int) -> int:
    """Return the causal pairs of compressed tokens: n (s - l + 1) - d n (n - 1) / 2 for n tokens,
    because s - l - j d + 1 queries after block j read it.
    """
    n = compressed_tokens(context, compress, stride)
    return n * (context - compress + 1) - stride * n * (n - 1) // 2


def nsa_tokens(context: int, stride: int, select: int, count: int, window: int) -> int:
    """Return the tokens that a decoding step of NSA reads as the paper counts them, s / d + n l' +
    w, l / d - 1 more than `compressed_tokens`. Source: Yuan et al. 2025 (arXiv 2502.11089), table
    4.
    """
    return context // stride + min(context, count * select) + min(context, window)


def compression_flops(blocks: int, compress: int, dim: int, hidden: int) -> int:
    """Return the FLOPs of a two-layer network on the l D values of C blocks: 2 C (l D h + h D)."""
    return 2 * blocks * (compress * dim * hidden + hidden * dim)


def gate_flops(blocks: int, heads: int, dim: int) -> int:
    """Return the FLOPs of one query's scores against the mean keys of N blocks: 2 H N D."""
    return 2 * heads * blocks * dim


def indexer_flops(keys: int, heads: int, dim: int) -> int:
    """Return the FLOPs of a query's index scores: 2 J S d for products, 2 J S for the sum."""
    return 2 * heads * keys * dim + 2 * heads * keys


class KeySelection(ABC):
    """A rule that selects keys: how many, and the cost of selecting them."""

    @property
    def values_per_token(self) -> int:
        """The values per token that the selection caches in addition to keys and values."""
        return 0

    @abstractmethod
    def tokens(self, context: int) -> Quantity:
        """Return how many keys the last of `context` tokens attends to."""

    @abstractmethod
    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of selecting keys for one query, without linear maps."""

    @abstractmethod
    def pairs(self, context: int) -> int:
        """Return the query-key pairs of one head over the first `context` tokens."""

    def summaries(self, context: int) -> Quantity:
        """Return how many more vectors per key head are cached, and read by a token; none if the
        rule computes them from all keys at every step.
        """
        return NO_QUANTITY

    @abstractmethod
    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return how many keys of a key/value head the last of `context` tokens reads at most."""


class OwnBlockSelection(KeySelection):
    """A rule that selects `topk` blocks a query: its own up to itself, and earlier ones."""

    size: int
    topk: int
    _block = "block"

    def tokens(self, context: int) -> Quantity:
        """Return the keys of the query's own block up to itself, and of the selected blocks."""
        return Quantity(
            block_tokens(context, self.size, self.topk),
            f"own {self._block} up to S, and at most {self.topk - 1} x {self.size} before it",
        )

    def pairs(self, context: int) -> int:
        """Return the sum of `tokens` over all queries."""
        return block_pairs(context, self.size, self.topk)

    def _keys_of_choices(self, context: int, choices: int) -> int:
        """Return the keys that are read at most for so many choices of earlier blocks."""
        own = (context - 1) % self.size + 1
        return min(context, own + choices * (self.tokens(context).value - own))


@dataclass(frozen=True)
class BlockSelection(OwnBlockSelection):
    """The selection of MoBA: `topk` blocks a query, its own and the earlier ones whose mean keys
    score highest. Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """

    size: int
    topk: int

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of scores against the mean keys of the earlier blocks: 2 H N D."""
        N = (context - 1) // self.size
        formula = f"2 H N D (block scores) = 2 x {heads} x {N} x {head_dim}"
        return Quantity(gate_flops(N, heads, head_dim), formula)

    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return all keys, because the mean keys are computed from them at every step."""
        return context


@dataclass(frozen=True)
class PageSelection(OwnBlockSelection):
    """The selection of Quest: `topk` pages a query, its own and the earlier ones with the largest
    bounds; a cache stores two vectors per page and key head. Source: Tang et al. 2024 (arXiv
    2406.10774), sections 3.3 and 3.4.
    """

    size: int
    topk: int
    _block = "page"

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of the bounds of the earlier pages: two products each, 4 H N D."""
        N = (context - 1) // self.size
        formula = f"4 H N D (page bounds) = 4 x {heads} x {N} x {head_dim}"
        return Quantity(2 * gate_flops(N, heads, head_dim), formula)

    def summaries(self, context: int) -> Quantity:
        """Return the two vectors of each page."""
        pages = -(-context // self.size)
        return Quantity(2 * pages, f"2 vectors x {plural(pages, 'page')}")

    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return the keys that H/G query heads read if they choose different pages."""
        return self._keys_of_choices(context, heads // groups)


@dataclass(frozen=True)
class BlockMaximumSelection(OwnBlockSelection):
    """The selection of MSA: local blocks, and the earlier ones whose best key has the largest index
    score of J heads of width d; a cache stores an index key per token. Source: MiniMax-M3,
    `MiniMaxM3VLIndexer` of transformers.
    """

    heads: int
    head_dim: int
    size: int
    topk: int

    @property
    def values_per_token(self) -> int:
        """The d values of the index key."""
        return self.head_dim

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of scoring every key: 2 J S d."""
        J, d = self.heads, self.head_dim
        formula = f"2 J S d (index scores) = 2 x {J} x {context} x {d}"
        return Quantity(gate_flops(context, J, d), formula)

    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return the selected keys, which the query heads of an index head share."""
        return self._keys_of_choices(context, max(1, self.heads // groups))


@dataclass(frozen=True)
class IndexSelection(KeySelection):
    """The selection of DSA: the `topk` keys with the highest index scores of J heads of width d; a
    cache stores an index key per token. Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """

    heads: int
    head_dim: int
    topk: int

    @property
    def values_per_token(self) -> int:
        """The d values of the index key."""
        return self.head_dim

    def tokens(self, context: int) -> Quantity:
        """Return how many keys are selected: all keys, or `topk` of them."""
        return Quantity(min(context, self.topk), f"min(S, {self.topk})")

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of scoring every key: 2 J S (d + 1)."""
        J, d = self.heads, self.head_dim
        return Quantity(
            indexer_flops(context, J, d),
            f"2 J S (d + 1) (index scores) = 2 x {J} x {context} x ({d} + 1)",
        )

    def pairs(self, context: int) -> int:
        """Return the query-key pairs, which are those of a window of `topk` keys."""
        return window_pairs(context, context, self.topk)

    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return the selected keys, which all heads share."""
        return min(context, self.topk)


@dataclass(frozen=True)
class PooledSelection(KeySelection):
    """The selection of QSA and of DSA on pools: the `topk` closed blocks with the highest index
    scores of J heads of width d, and the tokens behind the last closed one; a cache stores `stored`
    values per token, from which index keys are pooled. Source: Qwen4-Exp and GLM-5.3-Flash, by
    their code in transformers.
    """

    heads: int
    head_dim: int
    size: int
    topk: int
    stored: int

    @property
    def values_per_token(self) -> int:
        """The values from which index keys are pooled."""
        return self.stored

    def tokens(self, context: int) -> Quantity:
        """Return the tokens of the chosen blocks, and those behind the last closed one."""
        closed, rest = divmod(context, self.size)
        formula = f"min(floor(S / {self.size}), {self.topk}) x {self.size} + S mod {self.size}"
        return Quantity(min(closed, self.topk) * self.size + rest, formula)

    def flops(self, context: int, heads: int, head_dim: int) -> Quantity:
        """Return the FLOPs of scoring every closed block: 2 J N (d + 1)."""
        J, d, N = self.heads, self.head_dim, context // self.size
        return Quantity(
            indexer_flops(N, J, d),
            f"2 J N (d + 1) (index scores) = 2 x {J} x {N} x ({d} + 1)",
        )

    def pairs(self, context: int) -> int:
        """Return the sum of `tokens` over all queries."""
        m, (whole, rest) = self.size, divmod(context, self.size)
        behind = whole * (m * (m - 1) // 2) + rest * (rest + 1) // 2
        full = min(self.topk, whole)
        blocks = m * (full * (full - 1) // 2 + (whole - full) * self.topk) + (rest + 1) * full
        return behind + m * blocks

    def keys_read(self, context: int, heads: int, groups: int) -> int:
        """Return the selected tokens, which all heads share."""
        return self.tokens(context).value


@dataclass(frozen=True)
class SelectedSpec(Spec):
    """Softmax attention to keys that are selected for each query; a cache stores all keys."""

    shape: HeadShape
    selection: KeySelection

    @property
    def name(self) -> str:
        """The selection rule and the heads."""
        return f"{type(self.selection).__name__}, {self.shape.label}"

    def summaries(self, context: int) -> Quantity:
        """Return how many values are cached beside those of tokens, such as bounds of pages."""
        G, D, vectors = self.shape.groups, self.shape.head_dim, self.selection.summaries(context)
        if not vectors.value:
            return NO_QUANTITY
        return Quantity(G * D * vectors.value, f"G D x {vectors.formula}, {G} x {D} each")

    def cached(self, context: int) -> CacheContents:
        """Return the tokens of a cache, and what it stores beside them."""
        return replace(super().cached(context), others=self._others(context))

    def read(self, context: int) -> CacheContents:
        """Return the part of the cache that the decoded token reads at most: the keys and values
        that are selected, and everything by which they are selected.
        """
        keys = self.selection.keys_read(context, self.shape.heads, self.shape.groups)
        n = len(self.parts) - bool(self.selection.values_per_token)
        index = (CacheContents(self.parts[n:], context),) if self.parts[n:] else ()
        return CacheContents(self.parts[:n], keys, others=(*index, *self._others(context)))

    def _others(self, context: int) -> tuple[CacheContents, ...]:
        """Return what a cache stores beside its tokens, as contents."""
        shape, vectors = self.shape, self.selection.summaries(context).value
        return (CacheContents(((shape.groups, shape.head_dim),), vectors),) if vectors else ()

    def describe(self, context: int, name: str | None = None) -> Description:
        """Return all figures; what is cached beside tokens counts as the state there."""
        described = super().describe(context, name)
        contents = self.read(context)
        per_token = " + ".join(f"{n} x {d}" for n, d in contents.parts)
        terms = [f"{contents.tokens} x ({per_token})"]
        for other in contents.others:
            ((n, d),) = other.parts
            terms.append(f"{other.tokens} x {n} x {d} (choice)")
        read = Quantity(contents.values, " + ".join(terms))
        return replace(described, state=self.summaries(context), read=read)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one query: attention to the selected keys, and their selection."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        read, choice = self.selection.tokens(context), self.selection.flops(context, H, D)
        flops = attention_flops(H * read.value, D, E) + choice.value
        return Quantity(flops, f"2 H n (D + E) + {choice.formula}, with n = {read}")

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all selected query-key pairs, and of selecting them."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        choices = sum(self.selection.flops(t, H, D).value for t in range(1, context + 1))
        return attention_flops(H * self.selection.pairs(context), D, E) + choices


@dataclass(frozen=True)
class NSASpec(Spec):
    """Native sparse attention (NSA): compressed tokens, selected blocks and a window, each branch
    with its own keys and values.

    The two networks that compress a block are `counted_separately`: they run once per block, not
    once per token.

    Attributes:
        compress: l, the number of tokens that one compressed token represents.
        stride: d, the distance between the starts of two compressed blocks.
        select: l', the number of tokens of a selected block.
        count: n, the number of selected blocks.
        window: w, the number of keys of the sliding window.
        hidden: the widths of the networks that compress keys and values; None is D and E.
        recompress: whether each decoded token compresses all blocks again, as `regard.nn.NSA` does.
            Otherwise a block is compressed once, which is 1 / d of a block for each token.

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
        """Return the spec of three branches, three gates per head with biases, and two compression
        networks with position embeddings inside a block.
        """
        matrices = shape.query_maps(dim) + 3 * shape.key_maps(dim) + 3 * dim * shape.heads
        weights = ParameterCounts(matrices, 3 * shape.heads)
        for D in (shape.head_dim, shape.value_dim):
            network = compress * D * D + D * D
            weights += ParameterCounts(network, compress * D + 2 * D, counted_separately=network)
        return cls(weights, 3 * shape.parts, shape, compress, stride, select, count, window)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads, its selected blocks and its window."""
        blocks = f"{plural(self.count, 'block')} of {self.select}"
        return f"NSA, {self.shape.label}, {blocks}, window {self.window}"

    @property
    def values_per_token(self) -> Quantity:
        """The keys and values of all three branches."""
        G, D, E = self.shape.groups, self.shape.head_dim, self.shape.value_dim
        return Quantity(3 * G * (D + E), f"3 G (D + E) = 3 x {G} x ({D} + {E})")

    def read(self, context: int) -> CacheContents:
        """Return the keys and values that one token reads, over all branches."""
        return CacheContents(self.shape.parts, self._keys_read(context))

    def read_by_paper(self, context: int) -> Quantity:
        """Return the tokens that a decoding step reads, as table 4 of the paper counts them."""
        return Quantity(
            nsa_tokens(context, self.stride, self.select, self.count, self.window),
            f"S / {self.stride} + min(S, {self.count} x {self.select}) + min(S, {self.window})",
        )

    def _blocks(self, context: int) -> int:
        """Return the number of compressed tokens that the last token reads."""
        return compressed_tokens(context, self.compress, self.stride)

    def _keys_read(self, context: int) -> int:
        """Return how many keys the last token reads in the three branches."""
        chosen = block_tokens(context, self.select, self.count)
        return self._blocks(context) + chosen + min(context, self.window)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of a query: all branches, block importance, compression."""
        C, n = self._blocks(context), self._keys_read(context)
        if self.recompress:
            phi, remark = self._compression(C), "all blocks compressed again"
        else:
            phi, remark = self._compression(1) // self.stride, "compression, once per d tokens"
        formula = (
            f"2 H n (D + E) + 2 H C D (importance) + {phi} ({remark}), with n = {n} and C = {C}"
        )
        return Quantity(self._attention_flops(n, C) + phi, formula)

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all queries, with each block compressed once."""
        compressed = compressed_pairs(context, self.compress, self.stride)
        pairs = compressed + block_pairs(context, self.select, self.count)
        pairs += window_pairs(context, context, self.window)
        return self._attention_flops(pairs, compressed) + self._compression(self._blocks(context))

    def _attention_flops(self, keys: int, compressed: int) -> int:
        """Return the FLOPs of attention to `keys`, and of the importance of `compressed`."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        return attention_flops(H * keys, D, E) + 2 * H * compressed * D

    def _compression(self, blocks: int) -> int:
        """Return the FLOPs of compressing the keys and values of some blocks, in all groups."""
        D, E = self.shape.head_dim, self.shape.value_dim
        widths = (D, E) if self.hidden is None else self.hidden
        both = (
            compression_flops(blocks, self.compress, d, h)
            for d, h in zip((D, E), widths, strict=True)
        )
        return self.shape.groups * sum(both)
