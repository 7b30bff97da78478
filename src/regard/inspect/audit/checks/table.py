"""The battery: every check in the order in which it is made. One that cannot be tried raises
`CannotTry`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from regard.inspect.audit.checks import (
    cached,
    explained,
    leaks,
    masks,
    numbers,
    padding,
    places,
    repeat,
    weights,
)
from regard.inspect.audit.result import Finding


class Check(NamedTuple):
    """A check: run(probe, T) -> findings.

    Attributes:
        name: of the check.
        what: a right answer, in words.
        run: the check; T is the length that it is made at, and shrunk to.
    """

    name: str
    what: str
    run: Callable[..., list[Finding]]


REPEATABLE = Check(
    "repeatable", "equal calls give equal bits in evaluation mode", repeat.repeatable
)
"""Made first: where it finds something, no other check can say anything."""

CHECKS = (
    Check("input", "the input is not changed", repeat.untouched),
    Check("state", "a call leaves nothing behind", repeat.stateless),
    Check("masks", "masks that are given hide what they should", masks.heard),
    Check("future", "no token sees a later one, on any path", leaks.future),
    Check("window", "a query sees as many keys as the window says", leaks.window),
    Check(
        "definition",
        "the output is that of the definition with the code's weights",
        explained.explained,
    ),
    Check(
        "long texts",
        "the definition holds at 293 tokens, and with more keys than queries",
        explained.long,
    ),
    Check("keys", "every key that may be seen is used", leaks.keys),
    Check("batch", "rows of a batch do not mix", leaks.rows),
    Check("mask rows", "each row of a batch has its own mask", masks.rows),
    Check("padding", "what stands in padding reaches no token", padding.content),
    Check("left padding", "padding in front changes nothing", padding.left),
    Check("garbage", "NaN behind a mask reaches nobody", padding.garbage),
    Check("empty rows", "a query that may see nothing gives numbers", padding.empty),
    Check("weights", "returned weights sum to 1", weights.sums),
    Check("positions", "shifting all positions changes nothing", places.shift),
    Check("cache", "cached chunks equal one pass", cached.differs),
    Check("cache size", "the cache of a window stops growing", cached.grows),
    Check("large scores", "large scores do not overflow", numbers.overflow),
    Check("parameters", "every weight is finite", numbers.finite),
    Check("state dict", "no mask or cache is saved with the weights", numbers.saved),
)
"""Every other check. A new one is a function here or in a file of its own, and one line of this
table.
"""
