"""Why a query may not see a key, in words."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from regard import masks
from regard.span import Span

Bools = NDArray[np.bool_]


def why_masked(
    mask: masks.Mask | None, positions: Span, i: int, visible: Bools, head: int = 0
) -> tuple[str, ...]:
    """For each key, the terms of the mask that keep query i from it; "" where the kernel let it see the key.

    >>> why_masked(masks.Causal(), Span(0, 3), 1, np.array([True, True, False]))
    ('', '', 'future')
    """
    said = [set[str]() for _ in visible] if mask is None else _reasons(mask, positions, i, head)
    words = (" and ".join(sorted(terms)) or "the kernel" for terms in said)
    return tuple("" if seen else word for seen, word in zip(visible, words, strict=True))


def _reasons(mask: masks.Mask, positions: Span, i: int, head: int) -> list[set[str]]:
    """The terms that say no, per key; empty where the mask as a whole says yes."""
    rows = mask.block(positions, positions, slice(i, i + 1))[0]
    allowed = rows[head if rows.shape[0] > 1 else 0, 0].tolist()
    if isinstance(mask, (masks.All, masks.Any)):
        terms = [_reasons(term, positions, i, head) for term in _terms(mask)]
        said = [set[str]().union(*each) for each in zip(*terms, strict=True)]
    else:
        word = "future" if isinstance(mask, masks.Causal) else f"outside {mask}"
        said = [{word} for _ in allowed]
    return [set() if yes else words for yes, words in zip(allowed, said, strict=True)]


def _terms(mask: masks.All | masks.Any) -> tuple[masks.Mask, ...]:
    terms: tuple[masks.Mask, ...] = getattr(mask, fields(mask)[0].name)
    return terms
