"""Formatting of numbers with units: memory is binary (1 KiB is 1024 bytes), all other units
decimal; three significant digits, exact numbers in JSON.
"""

from __future__ import annotations

import math

ABSENT = "-"
"""The text in a table where there is no number."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def digits(x: float) -> str:
    """Format a number with three significant digits, or all before the point."""
    if x == 0 or not math.isfinite(x):
        return f"{x:.0f}"
    exponent = int(f"{abs(x):.2e}".partition("e")[2])
    return f"{x:,.{max(0, 2 - exponent)}f}"


def per_second(x: float) -> str:
    """Format a rate with four significant digits, or all before the point."""
    return f"{x:,.0f}" if x >= 9999.5 else f"{x:,.4g}"


def size(n: float | None) -> str:
    """Format a memory size in bytes, KiB, MiB, GiB and so on; None is a dash."""
    if n is None:
        return ABSENT
    step = 0
    while abs(n) >= 1024 and step < len(_BINARY) - 1:
        n, step = n / 1024, step + 1
    return f"{digits(n) if step else f'{n:,.0f}'} {_BINARY[step]}"


def count(n: float | None, unit: str = "") -> str:
    """Format a count with a decimal prefix and a unit; None is a dash."""
    if n is None:
        return ABSENT
    step = 0
    while abs(n) >= 999.5 and step < len(_DECIMAL) - 1:
        n, step = n / 1000, step + 1
    number = f"{n:g}" if not step and n == int(n) else digits(n)
    return f"{number} {_DECIMAL[step]}{unit}".rstrip()


def rate(bytes_per_second: float | None) -> str:
    """Format a bandwidth in GB/s, whatever its size; 1 GB is 1e9 bytes, and None is a dash."""
    return ABSENT if bytes_per_second is None else f"{digits(bytes_per_second / 1e9)} GB/s"


def seconds(t: float | None) -> str:
    """Format a duration in s, ms, µs or ns, such that the number is at least 1; None is a dash."""
    if t is None:
        return ABSENT
    if t == 0:
        return "0 s"
    scale, unit = _unit_of(t)
    return f"{digits(t / scale)} {unit}"


def span(low: float, high: float) -> str:
    """Format two durations in the unit of the larger one, with at most two decimals."""
    scale, unit = _unit_of(high)
    first = digits(low / scale) if low >= scale else f"{low / scale:.2f}"
    return f"{first}..{digits(high / scale)} {unit}"


def plural(n: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun, in the singular for exactly 1."""
    if nouns is None:
        consonant_y = noun.endswith("y") and noun[-2:-1] not in "aeiou"
        nouns = f"{noun[:-1]}ies" if consonant_y else f"{noun}s"
    return f"{n:,} {noun if n == 1 else nouns}"


def tokens(n: int) -> str:
    """Format a number of tokens; multiples of 1024 are written in k = 1024 or M = 1024 k."""
    for scale, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= scale and n % scale == 0:
            return f"{n // scale:,}{letter}"
    return f"{n:,}"


def _unit_of(t: float) -> tuple[float, str]:
    """Return the unit in which a rounded duration is at least 1."""
    return next(((s, unit) for s, unit in _SECONDS if abs(t) >= 0.9995 * s), _SECONDS[-1])
