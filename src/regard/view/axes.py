"""The axes of charts: the unit in the name of an axis, the text of a value and of a tick, the
limits, and round tick values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from regard import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


UNITS = {
    "share": r"^share|比例",
    "seconds": r"\bseconds\b|(?<![毫微每])秒",
    "bytes": r"\bbytes\b|字节",
    "FLOPs": r"\bFLOPs\b",
}
"""Each unit with the words for it in the name of an axis, in every language of figures."""
TOKENS = re.compile("token|词元")
"""The words for a number of tokens, likewise."""


def unit_in(words: str) -> str:
    """Return the unit that the name of an axis contains, or "" for none.

    >>> [unit_in(words) for words in ("cache, bytes", "share correct", "milliseconds", "nats")]
    ['bytes', 'share', '', '']
    >>> unit_in("缓存，字节")
    'bytes'
    """
    return next((unit for unit, name in UNITS.items() if re.search(name, words)), "")


def value_formatter(unit: str) -> Callable[[float], str]:
    """Return the function that formats a value of a unit in a tooltip."""
    known: dict[str, Callable[[float], str]] = {
        "bytes": units.size,
        "seconds": units.seconds,
        "FLOPs": lambda x: units.count(x, "FLOP"),
        "share": lambda x: f"{100 * x:.4g} %",
    }
    return known.get(unit, format_number)


def format_number(x: float) -> str:
    """Format a number without a unit in few characters.

    >>> format_number(0.25), format_number(4096), format_number(12345678.0)
    ('0.25', '4096', '1.2e7')
    """
    if abs(x) < 1e5:
        return f"{x:.4g}" if x != int(x) else f"{x:.0f}"
    return f"{x:.2g}".replace("e+0", "e").replace("e+", "e")


def tick_formatter(unit: str, *, tokens: bool) -> Callable[[float], str]:
    """Return the function that formats a round value of a unit beside an axis."""

    def words(x: float) -> str:
        if unit == "share":
            return f"{100 * x:g} %"
        if unit == "ratio":
            return f"{x:g}x"
        if unit == "FLOPs" and x > 0:
            step = min(int(math.log10(x) + 1e-9) // 3, 6)
            return f"{x / 1000**step:g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[step]}".rstrip()
        if unit == "bytes" and x >= 1:
            step = min(int(math.log2(x) + 1e-9) // 10, 5)
            return f"{x / 1024**step:g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[step]}"
        if unit == "seconds" and x > 0:
            scale, name = next(
                ((s, n) for s, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if x >= 0.999 * s),
                (1e-9, "ns"),
            )
            return f"{x / scale:.4g} {name}"
        if tokens and x == int(x):
            return units.tokens(int(x))
        return format_number(x)

    return words


def set_scale(
    axes: Axes,
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    log: bool,
    room: float = 0.04,
    tokens: bool = False,
    most: int = 9,
) -> None:
    """Set the limits of an axis, with a margin around the values, and round tick values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        wide = max((math.log(high) - math.log(low)) * room, 0.12)
        low, high = low * math.exp(-wide), high * math.exp(wide)
    else:
        wide = (high - low) * room or max(abs(high) * 0.05, 0.05)
        low, high = low - wide, high + wide
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis = axes.xaxis if name == "x" else axes.yaxis
    words = tick_formatter(unit, tokens=tokens)
    axis.set_major_locator(FixedLocator(round_ticks(low, high, values, unit, log=log, most=most)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_locator(NullLocator())


def round_ticks(
    low: float, high: float, values: Sequence[float], unit: str, *, log: bool, most: int
) -> list[float]:
    """Return round tick values within the limits, at most `most` on logarithmic axes, as
    proposed by matplotlib.
    """
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator

    whole = all(v == int(v) for v in values)
    plain = MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole and unit != "share")
    locators: list[Locator] = []
    if log and (unit == "bytes" or all(v > 0 and math.log2(v) % 1 == 0 for v in values)):
        locators = [LogLocator(2, numticks=most)]
    elif log:
        locators = [LogLocator(10, subs, numticks=most) for subs in ((1.0,), (1.0, 2.0, 5.0))]
    candidates = [
        [float(t) for t in locator.tick_values(low, high) if low <= t <= high]
        for locator in (*locators, plain)
    ]
    # prefer powers to linear steps, unless there are too few of them
    few = min(3, len({*values}))
    return max(
        (t for t in candidates[:-1] if few <= len(t) <= most), key=len, default=candidates[-1]
    )
