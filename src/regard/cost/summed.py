"""Count the layers that are not one mechanism: several that read the same input, and whose results
are added, and none, where a feed-forward layer has the place of a mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.cost.spec import CacheContents, ParameterCounts, Quantity, Spec, SteadySpec


@dataclass(frozen=True)
class SummedSpec(Spec):
    """Several mechanisms beside each other in one layer."""

    mixers: tuple[Spec, ...]

    @classmethod
    def of(cls, mixers: Sequence[Spec]) -> SummedSpec:
        """Return the spec of mechanisms whose results are added."""
        weights = sum((mixer.weights for mixer in mixers), ParameterCounts())
        return cls(weights, tuple(p for mixer in mixers for p in mixer.parts), tuple(mixers))

    @property
    def name(self) -> str:
        """The names of the mechanisms."""
        return " + ".join(mixer.name for mixer in self.mixers)

    @property
    def bounded(self) -> bool:
        """Whether every mechanism drops old tokens."""
        return all(mixer.bounded for mixer in self.mixers)

    @property
    def state(self) -> Quantity:
        """How many cached values do not depend on the length."""
        return _sum([mixer.state for mixer in self.mixers])

    def tokens(self, context: int) -> Quantity:
        """Return how many tokens the mechanism caches that caches the most."""
        return max((mixer.tokens(context) for mixer in self.mixers), key=lambda n: n.value)

    def cached(self, context: int) -> CacheContents:
        """Return the contents of all caches after `context` tokens."""
        return self._joined([mixer.cached(context) for mixer in self.mixers])

    def read(self, context: int) -> CacheContents:
        """Return the parts of all caches that the decoded token reads."""
        return self._joined([mixer.read(context) for mixer in self.mixers])

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of the decoded token in all mechanisms, without linear maps."""
        return _sum([mixer.step(context) for mixer in self.mixers])

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of the first tokens in all mechanisms, without linear maps."""
        return sum(mixer.prefill_flops(context) for mixer in self.mixers)

    def _joined(self, contents: Sequence[CacheContents]) -> CacheContents:
        """Return the contents of several caches as one record."""
        return CacheContents(bounded=self.bounded, others=tuple(contents))


@dataclass(frozen=True)
class TokenwiseSpec(SteadySpec):
    """A layer that mixes no tokens and caches nothing; `used` counts the separately counted matrix
    values, such as experts', that a token multiplies.
    """

    used: int = 0

    @property
    def name(self) -> str:
        """That it is a feed-forward layer."""
        return "feed-forward layer"

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of the matrices that are counted separately."""
        return Quantity(2 * self.used, f"2 x {self.used}" if self.used else "0")


def _sum(quantities: Sequence[Quantity]) -> Quantity:
    """Return the sum of quantities, with the formulas of those that are not 0."""
    formulas = [each.formula for each in quantities if each.value]
    return Quantity(sum(each.value for each in quantities), " + ".join(formulas))
