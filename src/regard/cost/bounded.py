"""Count softmax attention whose cache evicts tokens by a rule (H2O, TOVA, SnapKV and others)."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.softmax import attention_flops, causal_pairs
from regard.cost.spec import CacheContents, HeadShape, Quantity, Spec


def held_tokens(context: int, budget: int, interval: int) -> int:
    """Return how many tokens the last token sees, itself included: all until budget + interval,
    then between budget + 1 and budget + interval.
    """
    full = budget + interval
    return context if context <= full else budget + (context - full - 1) % interval + 1


def held_pairs(context: int, budget: int, interval: int) -> int:
    """Return the query-key pairs of the first `context` tokens: the sum of `held_tokens`."""
    full = budget + interval
    if context <= full:
        return causal_pairs(context, context)
    cycles, rest = divmod(context - full, interval)
    later = cycles * causal_pairs(interval, full) + rest * budget + causal_pairs(rest, rest)
    return causal_pairs(full, full) + later


@dataclass(frozen=True)
class EvictingSpec(Spec):
    """Softmax attention with a cache of budget + interval tokens per head, from which a rule evicts
    `interval` tokens when it is full.

    Attributes:
        budget: the tokens that stay.
        observed: the number of last queries that the rule looks at; the cache stores them.
        accumulates: whether every query adds its weights to sums, which the cache stores.
        expects: whether the cache stores the mean and the covariance of the queries.

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    shape: HeadShape
    budget: int
    interval: int
    observed: int
    accumulates: bool
    expects: bool = False

    @property
    def name(self) -> str:
        """The heads and the budget."""
        return f"{self.shape.label}, budget {self.budget:,} + {self.interval:,}"

    @property
    def bounded(self) -> bool:
        """Whether old tokens are dropped, which they are."""
        return True

    def tokens(self, context: int) -> Quantity:
        """Return the number of slots, which are allocated at once."""
        return Quantity(self.budget + self.interval, "budget + interval")

    @property
    def state(self) -> Quantity:
        """The queries that the rule looks at, w H D values, and the moments of all queries."""
        H, D, w = self.shape.heads, self.shape.head_dim, self.observed
        moments = H * D * (D + 1) if self.expects else 0
        formulas = [f"w H D = {w} x {H} x {D}"] if w else []
        formulas += [f"H D (D + 1) = {H} x {D} x ({D} + 1)"] if moments else []
        return Quantity(w * H * D + moments, " + ".join(formulas))

    def read(self, context: int) -> CacheContents:
        """Return the keys and values of the held tokens."""
        n = held_tokens(context, self.budget, self.interval)
        return CacheContents(self.parts, n, bounded=True)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of attention to held tokens, summed weights, and a share of an
        eviction.
        """
        n = held_tokens(context, self.budget, self.interval)
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        formula = f"2 H n (D + E) = 2 x {H} x {n} x ({D} + {E})"
        again = int(self.accumulates) + self.observed / self.interval
        weights = int(2 * H * n * D * again)
        if self.expects:  # an outer product for each query, and a quadratic form for each key
            full = self.budget + self.interval
            weights += 2 * H * D * D + 2 * H * full * D * (D + 2) // self.interval
        if not weights:
            return Quantity(attention_flops(H * n, D, E), formula)
        return Quantity(attention_flops(H * n, D, E) + weights, f"{formula} + {weights} (scores)")

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of attention over all pairs, and of the scores of all evictions."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        pairs, full = held_pairs(context, self.budget, self.interval), self.budget + self.interval
        evictions = 0 if context < full else 1 + (context - full) // self.interval
        again = pairs * int(self.accumulates) + evictions * self.observed * full
        moments = context * D + evictions * full * (D + 2) if self.expects else 0
        return attention_flops(H * pairs, D, E) + 2 * H * D * (again + moments)
