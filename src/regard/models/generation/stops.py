"""Text that ends at a string, while it arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import ArgumentError, ArgumentTypeError


class Stops:
    """Lets text through up to the first stop string; what may be the beginning of one is held back until that is known.

    The stop string that is complete first ends the text, and of several that are complete at the same letter the one that
    began first. The answer depends on the letters, not on the pieces that they came in.

    Args:
        stops: a string, or several, none of them empty.

    Attributes:
        found: the stop string that ended the text, or None.

    Raises:
        ArgumentError, ArgumentTypeError: a stop string is empty, or no string.

    >>> stops = Stops(["\\n\\n", "END"])
    >>> [stops.push(piece) for piece in ("one\\n", "two E", "N", "D three")]
    ['one', '\\ntwo ', '', '']
    >>> stops.found
    'END'
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise ArgumentTypeError(f"a stop is {type(stop).__name__}; it must be a string")
            if not stop:
                raise ArgumentError("a stop string is empty; every text ends with it: leave it out")
        self.stops = stops
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string, now that this piece has come."""
        if not self.stops:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max(_begun(text, stop) for stop in self.stops)
        at = len(text) - keep
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """What was held back, when no more text comes: it was no stop string."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many letters at the end of the text are the beginning of the stop string."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
