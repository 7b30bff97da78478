"""Key selection: functions that choose keys for each query, and return masks."""

from regard.ops.selection.best_blocks import (
    PageBounds,
    block_maximum_mask,
    closed_blocks_mask,
    moba_mask,
    quest_mask,
)
from regard.ops.selection.lightning_indexer import index_mask, index_scores, indexer_loss
from regard.ops.selection.nsa import NSABlocks, selection_mask
from regard.ops.selection.position_blocks import BlockLayout, block_layout, top_k_mask

__all__ = [
    "BlockLayout",
    "NSABlocks",
    "PageBounds",
    "block_layout",
    "block_maximum_mask",
    "closed_blocks_mask",
    "index_mask",
    "index_scores",
    "indexer_loss",
    "moba_mask",
    "quest_mask",
    "selection_mask",
    "top_k_mask",
]
