"""What the sections of the terminal page share about keys: their order, their names, and the numbers that are shown."""

from __future__ import annotations

from collections.abc import Sequence

from regard.view import glyphs
from regard.view.lines import Data

TOP = 8  # keys that are named; the others are counted


def ordered(data: Data) -> Sequence[int]:
    """Visible keys, the largest weight first; the query itself where it sees nothing."""
    seen = [j for j, reason in enumerate(data["masked"]) if not reason]
    return sorted(seen, key=lambda j: -abs(data["weights"][j])) or [data["key"]]


def piece_of(data: Data, j: int) -> str:
    """Token j, cut to fit a line."""
    return glyphs.cell(data["pieces"][j], 16).rstrip()
