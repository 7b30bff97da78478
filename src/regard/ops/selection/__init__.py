"""Selections: which keys a query is worth reading, computed from queries and keys, as masks for
softmax attention.
"""

from regard.ops.selection.blocks import Order, order, top
from regard.ops.selection.indexer import index_mask, index_scores, indexer_loss
from regard.ops.selection.moba import moba_mask
from regard.ops.selection.nsa import NSABlocks, selection_mask

__all__ = [
    "NSABlocks",
    "Order",
    "index_mask",
    "index_scores",
    "indexer_loss",
    "moba_mask",
    "order",
    "selection_mask",
    "top",
]
