"""The reasons why a query may not attend to a key: the terms of the mask that exclude it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regard import masks
from regard.span import Positions, as_tensor, find_empty_slots, slice_positions

Bools = NDArray[np.bool_]

EMPTY = "padding"
"""The reason for a key or query whose position is -1: the slot holds no token."""


def why_masked(
    mask: masks.Mask | None,
    positions: Positions,
    i: int,
    visible: Bools,
    head: int = 0,
    k_positions: Positions | None = None,
) -> tuple[str, ...]:
    """Return, for each key, the terms of the mask that exclude it for query i; "" if it is visible.

    >>> from regard.span import Span
    >>> why_masked(masks.Causal(), Span(0, 3), 1, np.array([True, True, False]))
    ('', '', 'future')
    """
    keys = positions if k_positions is None else k_positions
    if (
        empty := find_empty_slots(slice_positions(positions, slice(i, i + 1)))
    ) is not None and bool(empty[0]):
        return tuple("" if is_visible else EMPTY for is_visible in visible)
    reasons = (
        [set[str]() for _ in visible] if mask is None else _reasons(mask, positions, keys, i, head)
    )
    has_token = (as_tensor(keys)[0] >= 0).tolist()
    words = (
        (" and ".join(sorted(terms)) or "the kernel") if real else EMPTY
        for terms, real in zip(reasons, has_token, strict=True)
    )
    return tuple(
        "" if is_visible else word for is_visible, word in zip(visible, words, strict=True)
    )


def _reasons(mask: masks.Mask, q: Positions, k: Positions, i: int, head: int) -> list[set[str]]:
    """Return, for each key, the terms that exclude it; empty where the mask as a whole allows
    it.
    """
    rows = mask.block(q, k, slice(i, i + 1))[0]
    allowed = rows[head if rows.shape[0] > 1 else 0, 0].tolist()
    if operands := mask.operands():
        terms = [_reasons(term, q, k, i, head) for term in operands]
        reasons = [set[str]().union(*each) for each in zip(*terms, strict=True)]
    else:
        reasons = [{mask.refusal().words} for _ in allowed]
    return [set() if yes else words for yes, words in zip(allowed, reasons, strict=True)]
