"""Masks: rules on positions, joined by `&`, `|` and `~`, that say which key a query may see.

In a dense mask, True = may attend.
"""

from regard.masks.algebra import All, Any, Not
from regard.masks.base import Mask
from regard.masks.batched import Document, Padding, Prefix
from regard.masks.blocks import BigBird, Blocks
from regard.masks.convert import (
    from_additive,
    from_drop,
    from_lengths,
    from_sliding_window,
    from_window_size,
    to_additive,
    to_drop,
)
from regard.masks.custom import Dense, Fn, Heads
from regard.masks.local import Causal, Chunk, Dilated, Full, Window
from regard.masks.parse import parse
from regard.masks.reach import Reach, reach
from regard.masks.selected import Selected
from regard.masks.sparse import Global, Sinks, Strided
from regard.masks.tiling import EMPTY, FAR, FULL, PARTIAL, Intervals

__all__ = [
    "EMPTY",
    "FAR",
    "FULL",
    "PARTIAL",
    "All",
    "Any",
    "BigBird",
    "Blocks",
    "Causal",
    "Chunk",
    "Dense",
    "Dilated",
    "Document",
    "Fn",
    "Full",
    "Global",
    "Heads",
    "Intervals",
    "Mask",
    "Not",
    "Padding",
    "Prefix",
    "Reach",
    "Selected",
    "Sinks",
    "Strided",
    "Window",
    "from_additive",
    "from_drop",
    "from_lengths",
    "from_sliding_window",
    "from_window_size",
    "parse",
    "reach",
    "to_additive",
    "to_drop",
]
