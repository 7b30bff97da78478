"""LongRoPE: divisors for each rotary pair that were found by search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.arguments import check_number
from regard.errors import ArgumentError
from regard.positions.scalings import RopeFrequencies, Scaling, Unscaled, needed, positive


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """A searched divisor for each pair, one list up to the trained length L and another beyond it.

    theta'_i = theta_i / ext_i,  ext = short if length <= L else long;  rotary factor sqrt(1 + ln s / ln L)

    Args:
        short_factor, long_factor: d/2 numbers each.
        original_length: L.
        factor: s, usually max_position_embeddings / L.
        attention_factor: the rotary factor, if not the one above.

    Raises:
        ArgumentError: a number is not above 0, or the lists differ in length; when used, no length, or lists that are
            not as long as there are pairs.

    >>> from regard.positions import rope_frequencies
    >>> scaling = LongRoPE((1.0, 2.0), (4.0, 8.0), 4096, 32.0)
    >>> rope_frequencies(4, scaling=scaling, length=4097).inv_freq.tolist()
    [0.25, 0.00125]

    Source: Ding et al. 2024 (arXiv 2402.13753); the rotary factor: the code released with Phi-3.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_length: int
    factor: float
    attention_factor: float | None = None
    needs_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # hashable, also from a list
            for i, value in enumerate(getattr(self, name)):
                positive(f"{name}[{i}]", value)
        positive("original_length", self.original_length, above=1)
        positive("factor", self.factor)
        check_number("attention_factor", self.attention_factor, 0, math.inf, "above 0")

    def scale(self, rope: Unscaled) -> RopeFrequencies:
        """theta / ext, with the list that the length asks for."""
        long = needed(self, rope.length) > self.original_length
        name, ext = (
            ("long_factor", self.long_factor) if long else ("short_factor", self.short_factor)
        )
        if len(ext) != len(rope.theta):
            raise ArgumentError(
                f"{name} has {len(ext)} numbers and there are {len(rope.theta)} rotary pairs; give one number per pair"
            )
        ratio = torch.tensor(ext, dtype=torch.float64, device="cpu")
        return RopeFrequencies(rope.theta / ratio, self.rotary_factor, 1.0)

    @property
    def rotary_factor(self) -> float:
        """sqrt(1 + ln s / ln L), 1 where s <= 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + max(0.0, math.log(self.factor)) / math.log(self.original_length))
