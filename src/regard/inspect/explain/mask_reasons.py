"""Why a query may not see a key, in words: which terms of its mask say no."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regard import masks
from regard.span import Positions, as_tensor, find_empty_slots, slice_positions

Bools = NDArray[np.bool_]

EMPTY = "padding"
"""Of a slot whose position is -1, be it the key's or the query's: it holds no token."""


def why_masked(
    mask: masks.Mask | None,
    positions: Positions,
    i: int,
    visible: Bools,
    head: int = 0,
    k_positions: Positions | None = None,
) -> tuple[str, ...]:
    """For each key, the terms of the mask that keep query i from it; "" where the kernel let it see
    the key.

    Args:
        mask: of the call; None is none.
        positions: of the queries; i is a row of them. k_positions: of the keys, the same if None.
        visible: what the query sees.
        head: the query head.

    >>> from regard.span import Span
    >>> why_masked(masks.Causal(), Span(0, 3), 1, np.array([True, True, False]))
    ('', '', 'future')
    """
    keys = positions if k_positions is None else k_positions
    if (
        empty := find_empty_slots(slice_positions(positions, slice(i, i + 1)))
    ) is not None and bool(empty[0]):
        return tuple("" if seen else EMPTY for seen in visible)
    said = (
        [set[str]() for _ in visible] if mask is None else _reasons(mask, positions, keys, i, head)
    )
    held = (as_tensor(keys)[0] >= 0).tolist()
    words = (
        (" and ".join(sorted(terms)) or "the kernel") if real else EMPTY
        for terms, real in zip(said, held, strict=True)
    )
    return tuple("" if seen else word for seen, word in zip(visible, words, strict=True))


def _reasons(mask: masks.Mask, q: Positions, k: Positions, i: int, head: int) -> list[set[str]]:
    """The terms that say no, per key; empty where the mask as a whole says yes."""
    rows = mask.block(q, k, slice(i, i + 1))[0]
    allowed = rows[head if rows.shape[0] > 1 else 0, 0].tolist()
    if operands := mask.operands():
        terms = [_reasons(term, q, k, i, head) for term in operands]
        said = [set[str]().union(*each) for each in zip(*terms, strict=True)]
    else:
        said = [{mask.refusal().words} for _ in allowed]
    return [set() if yes else words for yes, words in zip(allowed, said, strict=True)]
