"""Selectors: what chooses the keys that each query reads, and what that costs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.caches import Parts
from regard.cost.selected import BlockSelection, IndexSelection, Selection
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.nn.project import Heads
from regard.ops.selection.indexer import check_topk, index_mask
from regard.ops.selection.moba import check_moba, moba_mask
from regard.span import Positions


@runtime_checkable
class Selector(Protocol):
    """From queries, keys and what it remembered itself to the keys that each query reads."""

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """x [B,S,M] -> what a cache stores for it per position, beside keys and values; may be
        nothing.
        """

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """A causal mask for this call: queries q [B,H,T,D] of x [B,T,M] at positions, keys k
        [B,G,S,D] at seen.
        """

    @property
    def spec(self) -> Selection:
        """What choosing costs, and how many keys it chooses."""


class MoBA(nn.Module):
    """The own block, and those past blocks whose mean key fits the query best:
    `regard.ops.selection.moba_mask`.

    Args:
        size: positions per block.
        topk: blocks per query and query head, the own one included.

    Raises:
        ArgumentError: size or topk is below 1.

    >>> MoBA(512, 3).spec.tokens(2048).value
    1536

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """

    def __init__(self, size: int, topk: int) -> None:
        super().__init__()
        check_moba(size, topk)
        self.size, self.topk = size, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Nothing: the means are of the keys."""
        return ()

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """The mask of chosen blocks."""
        return moba_mask(
            q, k, size=self.size, topk=self.topk, q_positions=positions, k_positions=seen
        )

    @property
    def spec(self) -> BlockSelection:
        """The sizes of blocks and choice, for the cost."""
        return BlockSelection(self.size, self.topk)

    def extra_repr(self) -> str:
        """Block size and number."""
        return f"blocks of {self.size}, topk={self.topk}"


class Indexer(nn.Module):
    """The topk keys by a small score of its own: `regard.ops.selection.index_mask`.

    I_ts = sum_j w_tj relu(q_tj . k_s / sqrt(d)),  w_t = W_w x_t / sqrt(J)

    It learns from `regard.nn.selected.indexer_losses` alone: no gradient flows through the choice.

    Args:
        q: `Heads` that make J index queries of dim d.
        k: `Heads` that make one index key of dim d; a cache keeps it beside what the projection
            remembers.
        weight: a linear map [B,T,M] -> [B,T,J].
        topk: keys per query, for all heads together.

    Raises:
        ArgumentError: the heads do not fit one another, or topk is below 1.

    >>> indexer = Indexer(Heads(8, 4, 2), Heads(8, 1, 2), nn.Linear(8, 4, bias=False), topk=3)
    >>> indexer.spec.tokens(100)
    Figure(value=3, formula='min(S, 3)')

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2; the factors 1/sqrt(d) and 1/sqrt(J) are
    of its published code.
    """

    def __init__(self, q: Heads, k: Heads, weight: nn.Linear, *, topk: int) -> None:
        super().__init__()
        check_topk(topk)
        if k.heads != 1 or q.head_dim != k.head_dim or weight.out_features != q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, k is {k.extra_repr()}, weights for "
                f"{weight.out_features} heads: k must be "
                f"1 heads of {q.head_dim}, and weight must give {q.heads}"
            )
        self.q, self.k, self.weight, self.topk = q, k, weight, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """The index key [B,1,S,d]."""
        return (self.k(x, positions),)

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Index queries [B,J,T,d], scaled by 1/sqrt(d), and weights [B,T,J], by 1/sqrt(J)."""
        q = self.q(x, positions) * self.q.head_dim**-0.5
        return q, self.weight(x) * self.q.heads**-0.5

    def choose(
        self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, positions: Positions, seen: Positions
    ) -> Mask:
        """The mask of chosen keys."""
        with torch.no_grad():
            index_q, weight = self.parts(x, positions)
        return index_mask(
            index_q, memory[0], weight, topk=self.topk, q_positions=positions, k_positions=seen
        )

    @property
    def spec(self) -> IndexSelection:
        """The sizes of the index score and of the choice, for the cost."""
        return IndexSelection(self.q.heads, self.q.head_dim, self.topk)

    def extra_repr(self) -> str:
        """topk."""
        return f"topk={self.topk}"
