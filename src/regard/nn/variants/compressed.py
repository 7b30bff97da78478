"""Attention to compressed tokens: one entry for each block of tokens, beside a window (HCA and CSA
of DeepSeek-V4).
"""

from __future__ import annotations

from typing import Annotated, Unpack

import torch
from torch import nn

from regard.nn.attention.compressed import BlockPooling, CompressedAttention, EntryIndexer
from regard.nn.blocks.norms import RMSNorm
from regard.nn.projections.factored import SharedKeyValue
from regard.nn.projections.heads import HeadProjection
from regard.nn.projections.steps import FinishedProjection, InverseRotary, WeightlessRMSNorm
from regard.nn.variants.options import Base, HeadSize, Option
from regard.nn.variants.projections import Start
from regard.nn.variants.registry import variant
from regard.nn.weights import Linear
from regard.positions import Rotary


class SharedVector(HeadSize, total=False):
    """Heads that read one shared vector per token or block, rotated in some of its dims."""

    window: Annotated[int, Option("the number of last tokens that are read whole.", 128, example=6)]
    rotary_dim: Annotated[
        int | None, Option("the number of dims that are rotated; None is all.", None)
    ]
    base: Base


class _CompressedStart(Start):
    """The parts that HCA and CSA have in common."""

    def __init__(self, dim: int, heads: int, options: SharedVector) -> None:
        super().__init__(dim, heads, groups=1, head_dim=options.get("head_dim"))
        self.base, self.rotary_dim = options["base"], options["rotary_dim"]
        self.window = options["window"]

    def rotary_of(self, width: int) -> Rotary:
        """Return the rotary embedding of vectors of a width."""
        most = self.rotary_dim
        return Rotary(width, self.base, rotary_dim=None if most is None else min(most, width))

    def pooling(self, width: int, block: int, *, overlap: bool) -> BlockPooling:
        """Return the network that pools blocks to entries of a width."""
        steps = RMSNorm(width), self.rotary_of(width)
        return BlockPooling(self.dim, width, block, *steps, overlap=overlap)

    def attend_to_blocks(
        self, block: int, *, overlap: bool, indexer: EntryIndexer | None = None
    ) -> CompressedAttention:
        """Return the attention with a sink for each head."""
        rotary = self.rotary_of(self.D)
        project = SharedKeyValue(
            self.q(WeightlessRMSNorm(), rotary), self.kv(RMSNorm(self.D), rotary)
        )
        return CompressedAttention(
            FinishedProjection(project, InverseRotary(rotary)),
            self.pooling(self.D, block, overlap=overlap),
            self.output(),
            window=self.window,
            indexer=indexer,
            sink=nn.Parameter(torch.zeros(self.heads)),
        )


@variant(
    "compression",
    "z = softmax(q [K_window; E]^T / sqrt(D), sink) [K_window; E]; E_i = R norm(sum_t "
    "softmax_t(W_z x_t + b_t) * W_y x_t) over the m tokens t of block i",
    "DeepSeek-AI 2026, DeepSeek-V4 (code in transformers)",
    users="DeepSeek-V4, in every second layer",
    choose="a text of a million tokens must fit: 1 / m of the cache, and every block is read",
    avoid="single tokens far back decide: a block of 128 tokens is one vector",
    where=(
        "b_t: learned bias of a place in the block; E: entries of closed blocks; i: number of a "
        "block; m: number of positions in a block; R: rotation to the first position of the block; "
        "sink: learned logit of a head; W_y: learned matrix of the contents; W_z: learned matrix "
        "of the gates"
    ),
    example={"block": 4},
)
def hca(
    dim: int, heads: int, *, block: int = 128, **options: Unpack[SharedVector]
) -> CompressedAttention:
    """Heavily compressed attention: every block of m tokens becomes one entry, pooled with a weight
    for each channel, and all heads read all entries and a window of whole tokens.

    A cache stores D values per block, and the last tokens. Keys are values, and the result is
    rotated back by the position of the query.

    Args:
        block: the number m of positions per block.
    """
    return _CompressedStart(dim, heads, options).attend_to_blocks(block, overlap=False)


@variant(
    "compression",
    "z = softmax(q [K_window; E_I]^T / sqrt(D), sink) [K_window; E_I]; I = the topk blocks with "
    "the largest sum_j w_j relu(q'_j . e'_i)",
    "DeepSeek-AI 2026, DeepSeek-V4 (code in transformers)",
    users="DeepSeek-V4, in every second layer",
    choose="a text of a million tokens must fit, and a few places in it decide",
    avoid="the text is short: entries are learned, and nothing is saved below the window",
    where=(
        "E: entries of closed blocks, each pooled from two blocks; e': entries of the indexer; i: "
        "number of a block; j: number of an indexer head; q': queries of the indexer; sink: "
        "learned logit of a head; w: learned weight of an indexer head"
    ),
    example={"block": 2, "topk": 3, "index_heads": 3, "index_dim": 8, "rotary_dim": 4},
)
def csa(
    dim: int,
    heads: int,
    *,
    block: int = 4,
    topk: int = 512,
    index_heads: int = 64,
    index_dim: int = 128,
    **options: Unpack[SharedVector],
) -> CompressedAttention:
    """Compressed sparse attention: every m tokens become one entry, pooled from two blocks, and a
    lightning indexer chooses the entries that all heads read, beside a window of whole tokens.

    A cache stores D + d values per block, and the last tokens. Keys are values, and the result is
    rotated back by the position of the query.

    Args:
        block: the number m of positions per block.
        topk: the number of entries per query.
        index_heads: the number J of indexer heads.
        index_dim: the size d of an indexer head.
    """
    start = _CompressedStart(dim, heads, options)
    indexer = EntryIndexer(
        HeadProjection(dim, index_heads, index_dim, start.rotary_of(index_dim)),
        start.pooling(index_dim, block, overlap=True),
        Linear(dim, index_heads, bias=False),
        topk=topk,
    )
    return start.attend_to_blocks(block, overlap=True, indexer=indexer)
