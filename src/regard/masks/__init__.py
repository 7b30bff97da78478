"""Masks: rules on token positions that say which keys each query may attend to.

Masks are combined with `&`, `|` and `~`. In a dense mask, True = may attend.

A mask is a frozen dataclass with one rule, `allows(q_positions, k_positions)`, on tokens; the
public methods exclude empty slots. It knows its key intervals and tiles, so that kernels skip what
is hidden, how far it reaches, why it hides a key, and which wrong masks a faulty kernel might use.
"""

from regard.masks.base import MASKS, And, Mask, Not, Or, Reach, Refusal, reach
from regard.masks.batched import Document, Padding, Prefix
from regard.masks.blocks import BigBird, BlockCausal, BlockDiffusion, Blocks, Selected
from regard.masks.convert import (
    from_additive,
    from_block_mask,
    from_drop,
    from_lengths,
    from_sliding_window,
    from_window_size,
    to_additive,
    to_block_mask,
    to_drop,
)
from regard.masks.custom import Dense, Fn, Heads
from regard.masks.parse import parse
from regard.masks.patterns import (
    Causal,
    Chunk,
    Dilated,
    EarlierChunks,
    Full,
    Global,
    Neighborhood,
    Sinks,
    Strided,
    Window,
)
from regard.masks.tiling import EMPTY, FULL, PARTIAL, UNBOUNDED, Intervals
from regard.registry import import_all

__all__ = [
    "EMPTY",
    "FULL",
    "MASKS",
    "PARTIAL",
    "UNBOUNDED",
    "And",
    "BigBird",
    "BlockCausal",
    "BlockDiffusion",
    "Blocks",
    "Causal",
    "Chunk",
    "Dense",
    "Dilated",
    "Document",
    "EarlierChunks",
    "Fn",
    "Full",
    "Global",
    "Heads",
    "Intervals",
    "Mask",
    "Neighborhood",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "Reach",
    "Refusal",
    "Selected",
    "Sinks",
    "Strided",
    "Window",
    "from_additive",
    "from_block_mask",
    "from_drop",
    "from_lengths",
    "from_sliding_window",
    "from_window_size",
    "parse",
    "reach",
    "to_additive",
    "to_block_mask",
    "to_drop",
]

# Masks in other files of this folder become `regard.masks.<Name>` without an entry here.
import_all(__name__, __path__)
globals().update(
    (kind.__name__, kind) for _, kind in MASKS if kind.__module__.startswith(f"{__name__}.")
)
