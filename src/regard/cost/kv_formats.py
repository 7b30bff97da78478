"""Number formats of a KV cache, and the bytes that it has in them: plain ones, and quantised ones
with scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from regard.cost.spec import CacheContents
from regard.errors import ArgumentError

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}
"""Bits of a number, without scales."""
QUANTIZED = ("int8", "int4", "int2")
"""Formats that keep a scale and a zero for each group."""
STATE_BYTES = 4
"""Bytes of a value of a state of fixed size: it is held in fp32, whatever the format of the
rest.
"""


def bits_per_value(bits: int, group: int, scale_bits: int = 16) -> Fraction:
    """Bits of a quantised number: its code, and its share of a scale and a zero: b + 2 s / g.

    >>> [float(bits_per_value(b, g)) for b, g in ((2, 32), (2, 128), (4, 64))]
    [3.0, 2.25, 4.5]

    Source: Liu et al. 2024 (arXiv 2402.02750), section 3.
    """
    return bits + Fraction(2 * scale_bits, group)


@dataclass(frozen=True)
class KVFormat:
    """The format in which a cache holds its values.

    Integer codes stand in groups: of tokens for the first of several parts (keys: a scale per
    channel), of channels for the others (a scale per token), as `regard.caches.Quantised` has them.
    The last tokens stay as they are, and so do layers with a window, whose caches are small.

    Attributes:
        name: a name in `BITS`.
        exact: the format of what is not quantised, and of scales.
        residual: how many of the last tokens stay as they are, at least.
        group: the most numbers that share a scale.

    Raises:
        ArgumentError: a name is not known.

    >>> KVFormat("int8").bytes_per_token(CacheContents(((8, 128), (8, 128)), 1))  # 9 bits each
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
                    f"{name!r} is no format of numbers; known are {', '.join(BITS)}"
                )

    def bytes_per_token(self, cached: CacheContents) -> Fraction:
        """Bytes that a token takes for good, once it is quantised."""
        if self.name not in QUANTIZED or cached.bounded:
            return Fraction(cached.values_per_token * self._plain(), 8)
        return self._coded(cached)

    def total_bytes(self, cached: CacheContents) -> int:
        """Bytes of the whole cache."""
        state = STATE_BYTES * cached.state
        if self.name not in QUANTIZED or cached.bounded:
            return -(-cached.values_per_token * cached.tokens * self._plain() // 8) + state
        group = self._group(cached)
        coded = max(0, cached.tokens - self.residual) // group * group
        rest = (cached.tokens - coded) * cached.values_per_token * BITS[self.exact]
        total = self._coded(cached) * coded + Fraction(rest, 8)
        return -(-total.numerator // total.denominator) + state

    def _plain(self) -> int:
        return BITS[self.exact if self.name in QUANTIZED else self.name]

    def _group(self, cached: CacheContents) -> int:
        """The largest group that divides every part with scales per token."""
        widths = [dims for _, dims in cached.parts]
        tokens = widths[1:] if len(widths) > 1 else widths
        sizes = range(1, self.group + 1)
        return max(g for g in sizes if all(w % min(g, w) == 0 for w in tokens))

    def _coded(self, cached: CacheContents) -> Fraction:
        """Bytes of one quantised token."""
        group, bits = self._group(cached), Fraction(0)
        for i, (heads, dims) in enumerate(cached.parts):
            by_channel = i == 0 and len(cached.parts) > 1
            each = bits_per_value(
                BITS[self.name], group if by_channel else min(group, dims), BITS[self.exact]
            )
            bits += heads * dims * each
        return bits / 8
