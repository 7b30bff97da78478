"""Selections: which keys a query is worth reading, computed from queries and keys, as masks for
softmax attention.
"""

from regard.ops.selection.lightning_indexer import index_mask, index_scores, indexer_loss
from regard.ops.selection.moba import moba_mask
from regard.ops.selection.nsa import NSABlocks, selection_mask
from regard.ops.selection.position_blocks import BlockLayout, block_layout, top_k_mask

__all__ = [
    "BlockLayout",
    "NSABlocks",
    "block_layout",
    "index_mask",
    "index_scores",
    "indexer_loss",
    "moba_mask",
    "selection_mask",
    "top_k_mask",
]
