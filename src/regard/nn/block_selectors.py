"""Selectors of blocks of keys by more than their mean: `Quest` bounds the scores of each page, and
`BlockMaximum` takes the best key of each block (MSA).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.caches import BoundedPages, Cache, Growing, Parts
from regard.cost.selected import BlockMaximumSelection, PageSelection
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.nn.projections import HeadProjection, Projection
from regard.nn.selected_attention import SelectedAttention
from regard.ops.selection.best_blocks import (
    PageBounds,
    block_maximum_mask,
    check_block_sizes,
    check_sizes,
    quest_mask,
)
from regard.span import Positions
from regard.units import plural


class Quest(nn.Module):
    """The selector of Quest: a query attends to its own page, and to the past pages whose bound is
    largest (`regard.ops.selection.quest_mask`).

    u_i = sum_d max(q_d low_id, q_d high_id) for page i, whose keys have numbers from low to high

    Args:
        size: the number of positions in a page.
        topk: the number of pages per query and query head, its own page included.

    Raises:
        ArgumentError: size or topk is below 1.

    >>> Quest(16, 128).spec.tokens(32768).value
    2048

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3.
    """

    def __init__(self, size: int, topk: int) -> None:
        super().__init__()
        check_sizes("Quest", size, topk, "page")
        self.size, self.topk = size, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return no parts, since the bounds are computed from the cached keys."""
        return ()

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        memory: Parts,
        positions: Positions,
        k_positions: Positions,
    ) -> Mask:
        """Return the mask of the chosen pages; `memory` may hold the bounds of all pages."""
        return quest_mask(
            q,
            k,
            size=self.size,
            topk=self.topk,
            bounds=PageBounds(*memory) if memory else None,
            q_positions=positions,
            k_positions=k_positions,
        )

    @property
    def spec(self) -> PageSelection:
        """The page size and the number of pages, for the cost."""
        return PageSelection(self.size, self.topk)

    def extra_repr(self) -> str:
        """Return the page size and the number of pages."""
        return f"pages of {self.size}, topk={self.topk}"


class QuestAttention(SelectedAttention):
    """Softmax attention to the pages that `Quest` chooses, with a cache that stores the bounds of
    every page beside its keys.

    All keys stay in the cache, and a step reads the bounds, and the keys and values of the chosen
    pages. A text of at most topk pages is plain attention.

    Args:
        project: any `Projection`. If it changes keys after they were stored, their bounds are
            computed at every call.
        selector: a `Quest`.
        output: a module [B,T,H*E] -> [B,T,M].
        scale: the factor on the scores; None is 1/sqrt(D).

    Raises:
        ArgumentError: the selector is no `Quest`, the projection has several forms, whose keys have
            other bounds, or a cache has pages of another size.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> layer = QuestAttention(separate_qkv(8, 4, 2, 2), Quest(4, 2), nn.Linear(8, 8))
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 9, 8), cache=cache).shape, cache.bytes  # 9 tokens, 3 pages
    (torch.Size([1, 9, 8]), 384)

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.
    """

    def __init__(
        self,
        project: Projection,
        selector: Quest,
        output: nn.Module,
        *,
        scale: float | None = None,
    ) -> None:
        if not isinstance(selector, Quest):
            raise ArgumentError(
                f"selector is {type(selector).__name__}; QuestAttention needs a Quest: use "
                "SelectedAttention for others"
            )
        if hasattr(type(project), "select_form"):
            raise ArgumentError(
                f"{type(project).__name__} has several forms, whose keys have other bounds, so "
                "that the pages would depend on the number of queries; Quest needs keys per head"
            )
        super().__init__(project, selector, output, scale=scale)

    def check_cache(self, cache: Cache) -> None:
        """Raise if the cache has pages of another size than the selector."""
        size = self._quest.size
        if isinstance(cache, BoundedPages) and cache.size != size:
            raise ArgumentError(
                f"the cache has pages of {plural(cache.size, 'position')}, and the selector of "
                f"{size}; use new_cache()"
            )

    def selector_memory(self, memory: Parts, cache: Cache | None) -> Parts:
        """Return the bounds of the pages where the cache has them; else what it stored."""
        if isinstance(cache, BoundedPages) and self._stores_keys:
            return cache.bounds() or ()
        return memory

    def new_cache(self) -> Cache:
        """Return an empty cache of all tokens, with the bounds of pages where they are those of the
        keys that it stores.
        """
        return BoundedPages(self._quest.size) if self._stores_keys else Growing()

    @property
    def _quest(self) -> Quest:
        """The selector of this layer, whose class the constructor has checked."""
        assert isinstance(self.selector, Quest)
        return self.selector

    @property
    def _stores_keys(self) -> bool:
        """Whether the first part of the memory is the keys as attention uses them."""
        shape = self.project.shape
        whole = shape.memory == (shape.G * shape.D, shape.G * shape.E)
        return whole and getattr(self.project, "key_transform", None) is None


class BlockMaximum(nn.Module):
    """The selector of MSA: index heads score every key, and a query attends to its own block, the
    local blocks before it, and the past blocks with the largest best score
    (`regard.ops.selection.block_maximum_mask`).

    s_ji = max over the keys s of block i of q'_jt . k'_s,  q' = norm(W_q x), k' = norm(W_k x)

    Index head j chooses for the query heads j H/J to (j + 1) H/J - 1; MiniMax-M3 has one index head
    for each key/value head. No gradient passes through the choice, so that the index heads keep
    their weights in training.

    Args:
        q: a `HeadProjection` to J index queries of dim d.
        k: a `HeadProjection` to one index key of dim d, which a cache stores besides the memory of
            the projection.
        heads: the number of query heads H, a multiple of J.
        size: the number of positions in a block.
        topk: the number of blocks per query, the local ones included.
        local: the number of last blocks that every query reads, its own included.

    Raises:
        ArgumentError: the heads do not fit one another, or a size is below 1.

    >>> q, k = HeadProjection(8, 2, 4), HeadProjection(8, 1, 4)
    >>> BlockMaximum(q, k, heads=4, size=128, topk=16).spec.tokens(32768).value
    2048

    Source: MiniMax 2026 (MiniMax-M3), by its code in transformers, `MiniMaxM3VLIndexer`.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        *,
        heads: int,
        size: int,
        topk: int,
        local: int = 1,
    ) -> None:
        super().__init__()
        check_block_sizes(size, topk, local)
        if k.heads != 1 or q.head_dim != k.head_dim or heads < 1 or heads % q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, k is {k.extra_repr()}, for "
                f"{plural(heads, 'query head')}; k must be 1 head of {q.head_dim}, and the index "
                "heads must divide the query heads"
            )
        self.q, self.k, self.heads = q, k, heads
        self.size, self.topk, self.local = size, topk, local

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the index keys [B,1,S,d]."""
        return (self.k(x, positions),)

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        memory: Parts,
        positions: Positions,
        k_positions: Positions,
    ) -> Mask:
        """Return the mask of the chosen blocks."""
        with torch.no_grad():
            queries = self.q(x, positions)
        return block_maximum_mask(
            queries,
            memory[0],
            heads=self.heads,
            size=self.size,
            topk=self.topk,
            local=self.local,
            q_positions=positions,
            k_positions=k_positions,
        )

    @property
    def spec(self) -> BlockMaximumSelection:
        """The sizes of the index heads and of the blocks, for the cost."""
        blocks = max(self.topk, self.local)
        return BlockMaximumSelection(self.q.heads, self.q.head_dim, self.size, blocks)

    def extra_repr(self) -> str:
        """Return the sizes of the blocks."""
        return f"blocks of {self.size}, topk={self.topk}, local={self.local}"
