"""Count attention to compressed tokens (HCA and CSA): entries for closed blocks beside a window."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regard.cost.selected import indexer_flops
from regard.cost.softmax import attention_flops, window_pairs
from regard.cost.spec import CacheContents, Description, Quantity, Spec
from regard.language import Phrase


@dataclass(frozen=True)
class CompressedSpec(Spec):
    """Attention to a window of W tokens, and to one entry for each closed block of m tokens.

    A cache holds min(S, W) vectors of D, floor(S / m) entries of D (and of d for an indexer), and
    contents and gates of the tokens that no entry holds yet.

    Attributes:
        overlap: whether an entry pools two blocks, with two contents and gates for each token.
        index_heads, index_dim: J and d of the indexer; 0 without one.
        topk: how many entries a query reads at most; None is all.

    Source: DeepSeek-AI 2026, DeepSeek-V4, by its code in transformers.
    """

    heads: int
    head_dim: int
    block: int
    window: int
    overlap: bool = False
    index_heads: int = 0
    index_dim: int = 0
    topk: int | None = None

    @property
    def name(self) -> str:
        """The name of the mechanism, with its blocks and its window."""
        return Phrase(
            "{name} {heads} heads of {dim}, blocks of {block}, window {window}",
            name="HCA" if self.topk is None else "CSA",
            heads=self.heads,
            dim=self.head_dim,
            block=self.block,
            window=self.window,
        )

    def tokens(self, context: int) -> Quantity:
        """Return the tokens of the window."""
        return Quantity(min(context, self.window), f"min(S, {self.window})")

    def entries(self, context: int) -> int:
        """Return the number of closed blocks, floor(S / m)."""
        return context // self.block

    def open_tokens(self, context: int) -> int:
        """Return the tokens whose contents and gates are kept: those of the open block, and with
        overlap of the block before it.
        """
        dropped = max(0, self.entries(context) - self.overlap)
        return context - dropped * self.block

    def cached(self, context: int) -> CacheContents:
        """Return the vectors of the window, the entries, and the parts of the open block."""
        widths = (self.head_dim, self.index_dim) if self.index_dim else (self.head_dim,)
        series = tuple((2 * (1 + self.overlap), d) for d in widths)
        entries = CacheContents(tuple((1, d) for d in widths), self.entries(context))
        others = (entries, CacheContents(series, self.open_tokens(context)))
        return CacheContents(self.parts, self.tokens(context).value, others=others)

    def read(self, context: int) -> CacheContents:
        """Return the window, the entries that are read, and all index keys."""
        chosen = CacheContents(((1, self.head_dim),), self._chosen(context))
        keys = CacheContents(((1, self.index_dim),), self.entries(context))
        others = (chosen, keys) if self.index_dim else (chosen,)
        return CacheContents(self.parts, self.tokens(context).value, others=others)

    def describe(self, context: int, name: str | None = None) -> Description:
        """Return all figures; entries and the open block count as the state there."""
        others = self.cached(context).others
        terms = [f"{x.tokens} x {x.values_per_token}" for x in others]
        total = sum(x.values for x in others)
        read = self.read(context)
        parts = [f"{x.tokens} x {x.values_per_token}" for x in (read, *read.others)]
        return replace(
            super().describe(context, name),
            state=Quantity(total, f"{terms[0]} (entries) + {terms[1]} (open block)"),
            read=Quantity(read.values, " + ".join(parts)),
        )

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one query: window, entries, the choice, and 1 / m of a pooling."""
        n, C = self.tokens(context).value + self._chosen(context), self.entries(context)
        choice = indexer_flops(C, self.index_heads, self.index_dim)
        pooling = self._pooling(1) // self.block
        formula = (
            f"4 H n D + {choice} (choice of entries) + {pooling} (pooling, once per block), with "
            f"n = {n}"
        )
        flops = attention_flops(self.heads * n, self.head_dim, self.head_dim) + choice + pooling
        return Quantity(flops, formula)

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all queries, with each block pooled once."""
        pairs = window_pairs(context, context, self.window)
        pairs += self._entry_pairs(context, self.topk)
        scored = self._entry_pairs(context, None)
        choices = indexer_flops(scored, self.index_heads, self.index_dim)
        attention = attention_flops(self.heads * pairs, self.head_dim, self.head_dim)
        return attention + choices + self._pooling(self.entries(context))

    def _chosen(self, context: int) -> int:
        """Return how many entries the last query reads."""
        C = self.entries(context)
        return C if self.topk is None else min(C, self.topk)

    def _entry_pairs(self, context: int, most: int | None) -> int:
        """Return the sum of min(floor(t / m), most) over t = 1 to S."""
        m, C = self.block, self.entries(context)
        full = C if most is None else min(C, most)  # the first `full` blocks are seen by all later
        last = context - C * m + 1  # queries that could see all C entries
        return m * (full * (full - 1) // 2) + full * (m * (C - full) + last)

    def _pooling(self, blocks: int) -> int:
        """Return the FLOPs of weighted sums over the tokens of some blocks, 2 for each value."""
        tokens = self.block * (1 + self.overlap)
        return 2 * blocks * tokens * (self.head_dim + self.index_dim)
