"""Hashed n-grams of Qwen4-Exp: the sizes of their tables, and the cost of what a block adds.
Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextNGramEmbedding`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from regard.cost.fixed_state import ShortConvolution
from regard.cost.spec import Quantity, SteadySpec
from regard.units import plural

LARGEST_ID = 1 << 24
"""Ids below it are whole numbers in fp32, in which a cache keeps the last ones."""
_WORD = (1 << 64) - 1


class NGramSizes(NamedTuple):
    """The sizes of hashed n-grams.

    Attributes:
        dim: the width P of all embeddings of a token together.
        length: the largest n; n-grams have 2 to n tokens.
        heads: how many tables each n has.
        rows: no table has fewer rows.
        multiple: the rows of all tables together are a multiple of it.
        vocabulary: the number of token ids.
        end: the id that ends a text; no n-gram reaches over it.
        order: the number of the layer among those with n-grams, from 0.
        seed: the seed of the multipliers.
        parts: in how many tensors files have the rows of all tables.
    """

    dim: int
    length: int
    heads: int
    rows: int
    multiple: int
    vocabulary: int
    end: int
    order: int
    seed: int
    parts: int = 1

    @property
    def tables(self) -> int:
        """The number of tables of a layer."""
        return (self.length - 1) * self.heads

    def table_rows(self) -> tuple[int, ...]:
        """Return the rows of each table: primes, of which no two tables of a model share one."""
        skipped = self.order * self.tables
        return _primes(self.rows, skipped + self.tables)[skipped:]

    def all_rows(self) -> int:
        """Return the rows of all tables together, with those that only fill up."""
        return math.ceil(sum(self.table_rows()) / self.multiple) * self.multiple

    def part_rows(self) -> list[int]:
        """Return the rows of each part: as many in all but the last one."""
        rows = self.all_rows()
        size = math.ceil(rows / self.parts)
        return [min(size, rows - first) for first in range(0, rows, size)]

    def multipliers(self) -> list[int]:
        """Return the odd factor of each token of an n-gram, by the generator splitmix64."""
        golden = 0x9E3779B97F4A7C15
        bound = max(1, ((1 << 63) - 1) // max(self.vocabulary, 1) // 2)
        start = self.seed + 10007 * self.order
        numbers = [_splitmix64(start + golden * (i + 1) & _WORD) for i in range(self.length)]
        return [2 * (number % bound) + 1 for number in numbers]


def _splitmix64(x: int) -> int:
    """Return the number that splitmix64 makes of a state. Source: Steele et al. 2014."""
    x = x + 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


@cache
def _primes(least: int, count: int) -> tuple[int, ...]:
    """Return the first primes that are not below `least`."""
    numbers = (n for n in itertools.count(max(2, least)) if n == 2 or n % 2)
    primes = (n for n in numbers if all(n % d for d in range(3, math.isqrt(n) + 1, 2)))
    return tuple(itertools.islice(primes, count))


@dataclass(frozen=True)
class NGramSpec(SteadySpec):
    """What a block adds to its streams for the n-grams that end at a token: embeddings of width P
    are read, their tables not counted here, and a convolution follows.
    """

    convolution: ShortConvolution
    length: int

    @property
    def name(self) -> str:
        """The longest n-gram and the convolution."""
        c, k, d = self.convolution.channels, self.convolution.kernel, self.convolution.dilation
        return f"hashed {self.length}-grams, {plural(c, 'channel')}, {k} taps, each {d} apart"

    @property
    def state(self) -> Quantity:
        """The number of values of the past inputs of the convolution, and of the last ids."""
        c, k, d, n = *vars(self.convolution).values(), self.length
        formula = f"c (k - 1) d + (n - 1) n = {c} x {k - 1} x {d} + {n - 1} x {n}"
        return Quantity(self.convolution.past + (n - 1) * n, formula)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one token: products of keys and streams, their gates, and the sum."""
        c = self.convolution.channels
        return Quantity(4 * c, f"4 c = 4 x {c}")
