"""How far a mask looks: which old keys a later query may still see. A cache may forget the
others.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.masks.algebra import All, Any
from regard.masks.base import Mask
from regard.masks.local import Chunk, Dilated, Window
from regard.masks.sparse import Sinks


@dataclass(frozen=True)
class Reach:
    """No query at position p sees a key outside the first `sinks` positions and p - window < k.

    Args:
        window: the last keys, the query's own included; None is all of them.
        sinks: the first positions.

    >>> Reach(window=8, sinks=4).tokens
    12
    """

    window: int | None
    sinks: int = 0

    @property
    def tokens(self) -> int | None:
        """The most keys behind a query, its own included; None without a bound."""
        return None if self.window is None else self.window + self.sinks


def reach(mask: Mask | None) -> Reach:
    """The old keys that a mask may still show: a bound, which every mask keeps within.

    >>> from regard.masks import Causal, Sinks, Window
    >>> reach(Causal() & (Window(8) | Sinks(4)))
    Reach(window=8, sinks=4)
    >>> reach(Causal())
    Reach(window=None, sinks=0)
    """
    if isinstance(mask, Window):
        return Reach(mask.size)
    if isinstance(mask, Chunk):
        return Reach(mask.size)
    if isinstance(mask, Dilated):
        return Reach(mask.size * mask.step)
    if isinstance(mask, Sinks):
        return Reach(0, mask.n)
    if isinstance(mask, All):  # every part bounds the whole
        bounds = [reach(part) for part in mask.masks]
        return min(bounds, key=lambda r: float("inf") if r.tokens is None else r.tokens)
    if isinstance(mask, Any):
        bounds = [reach(part) for part in mask.masks]
        windows = [r.window for r in bounds]
        window = None if None in windows else max(w for w in windows if w is not None)
        return Reach(window, 0 if window is None else max(r.sinks for r in bounds))
    return Reach(None)
