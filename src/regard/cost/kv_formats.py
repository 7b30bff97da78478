"""Number formats of a KV cache and the bytes that a cache takes in them: plain formats, and
quantised formats with scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from regard.cost.spec import CacheContents
from regard.errors import ArgumentError

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}
"""Bits per value, without scales."""
QUANTIZED = ("int8", "int4", "int2")
"""Formats that store a scale and a zero point for each group of values."""
STATE_BYTES = 4
"""Bytes per value of a recurrent state, which is stored in fp32 whatever the format of the KV
cache.
"""


def bits_per_value(bits: int, group: int, scale_bits: int = 16) -> Fraction:
    """Return the bits of a quantised value: its code, and its share of the scale and the zero point
    of its group, b + 2 s / g.

    Args:
        bits: b, the bits of a code.
        group: g, the number of values that share a scale and a zero point.
        scale_bits: s, the bits of a scale and of a zero point.

    >>> [float(bits_per_value(b, g)) for b, g in ((2, 32), (2, 128), (4, 64))]
    [3.0, 2.25, 4.5]

    Source: Liu et al. 2024 (arXiv 2402.02750), section 3.
    """
    return bits + Fraction(2 * scale_bits, group)


@dataclass(frozen=True)
class KVFormat:
    """The number format of a KV cache.

    Integer codes are grouped as in `regard.caches.Quantised`: groups of tokens for the first of
    several parts (keys have a scale per channel), groups of channels for the other parts (values
    have a scale per token). The most recent tokens are not quantised, and neither are layers with a
    window, whose caches are small.

    Attributes:
        name: a name in `BITS`.
        exact: the format of values that are not quantised, and of scales.
        residual: the minimum number of most recent tokens that are not quantised.
        group: the maximum number of values that share a scale.

    Raises:
        ArgumentError: a format name is not known.

    >>> KVFormat("int8").bytes_per_token(CacheContents(((8, 128), (8, 128)), 1))  # 9 bits per value
    Fraction(2304, 1)
    """

    name: str = "bf16"
    exact: str = "bf16"
    residual: int = 128
    group: int = 32

    def __post_init__(self) -> None:
        for name in (self.name, self.exact):
            if name not in BITS:
                raise ArgumentError(
                    f"{name!r} is not a number format; it must be one of {', '.join(BITS)}"
                )

    def bytes_per_token(self, cached: CacheContents) -> Fraction:
        """Return the bytes that a token takes once it is quantised."""
        if self.name not in QUANTIZED or cached.bounded:
            return Fraction(cached.values_per_token * self._exact_bits(), 8)
        return self._quantized_bytes(cached)

    def total_bytes(self, cached: CacheContents) -> int:
        """Return the bytes of the whole cache, the recurrent state included."""
        state = STATE_BYTES * cached.state
        if self.name not in QUANTIZED or cached.bounded:
            return -(-cached.values_per_token * cached.tokens * self._exact_bits() // 8) + state
        group = self._group(cached)
        coded = max(0, cached.tokens - self.residual) // group * group
        rest = (cached.tokens - coded) * cached.values_per_token * BITS[self.exact]
        total = self._quantized_bytes(cached) * coded + Fraction(rest, 8)
        return -(-total.numerator // total.denominator) + state

    def _exact_bits(self) -> int:
        """Return the bits of a value that is not quantised."""
        return BITS[self.exact if self.name in QUANTIZED else self.name]

    def _group(self, cached: CacheContents) -> int:
        """Return the largest group size that divides the width of every part with scales per
        token.
        """
        widths = [dims for _, dims in cached.parts]
        per_token_widths = widths[1:] if len(widths) > 1 else widths
        sizes = range(1, self.group + 1)
        return max(g for g in sizes if all(w % min(g, w) == 0 for w in per_token_widths))

    def _quantized_bytes(self, cached: CacheContents) -> Fraction:
        """Return the bytes of one quantised token."""
        group, bits = self._group(cached), Fraction(0)
        for i, (heads, dims) in enumerate(cached.parts):
            by_channel = i == 0 and len(cached.parts) > 1
            each = bits_per_value(
                BITS[self.name], group if by_channel else min(group, dims), BITS[self.exact]
            )
            bits += heads * dims * each
        return bits / 8
