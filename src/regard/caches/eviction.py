"""Eviction rules: which tokens of a full cache stay, per key/value head, by what attention did with
them; and the cache of a layer that uses one.

Each rule loses the evicted tokens for good: no later query can see them, however well it would
match. The tokens that stay keep their positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_number
from regard.caches.base import Parts
from regard.caches.state import State
from regard.errors import ArgumentError


class HeldTokens(NamedTuple):
    """The tokens of a full cache in the order of their positions; R is batch rows times key/value
    heads. Empty slots come last.

    Attributes:
        keys: `[R, S, D]`, as attention used them; 0 in empty slots.
        is_held: bool `[R, S]`, False in empty slots.
        sums: `[R, S]`, the weights that all queries so far gave to each token, summed; 0 if the
            rule does not accumulate.
        observed: `[R, S]`, the weights that the last queries give, summed over them; 0 if the rule
            observes none.
    """

    keys: Float[Tensor, "R S D"]
    is_held: Tensor
    sums: Float[Tensor, "R S"]
    observed: Float[Tensor, "R S"]


@dataclass(frozen=True)
class EvictionRule(ABC):
    """Base class of rules that score the tokens of a full cache; the largest scores stay.

    Attributes:
        accumulates: whether the rule needs the summed weights of all queries.
    """

    accumulates: ClassVar[bool] = False

    @property
    def observed(self) -> int:
        """How many of the last queries the rule looks at."""
        return 0

    @property
    def recent(self) -> int:
        """How many of the newest tokens always stay."""
        return 0

    @abstractmethod
    def score(self, tokens: HeldTokens) -> Float[Tensor, "R S"]:
        """Return the importance of every token.

        Args:
            tokens: the held tokens.

        Returns:
            The scores `[R, S]`; those of empty slots have no meaning.
        """


@dataclass(frozen=True)
class HeavyHitters(EvictionRule):
    """H2O: the tokens stay that got the most weight so far, and the newest ones.

    score_j = sum of p_ij over all queries i so far

    Old tokens are favoured, because more queries add to their sums.

    Args:
        newest: how many of the newest tokens always stay.

    Raises:
        ArgumentError: newest is negative.

    >>> HeavyHitters(2).recent
    2

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    newest: int
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("newest", self.newest, -1, float("inf"), "at least 0")

    @property
    def recent(self) -> int:
        """The number of newest tokens, as given."""
        return self.newest

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the weights that all queries gave, summed."""
        return tokens.sums


@dataclass(frozen=True)
class LastQuery(EvictionRule):
    """TOVA: the tokens stay to which the last query gives the most weight.

    score_j = p_ij for the last query i, summed over the query heads of the key/value head

    >>> LastQuery().observed
    1

    Source: Oren et al. 2024 (arXiv 2401.06104), section 3.2; the paper takes the mean over all
    heads of the layer.
    """

    @property
    def observed(self) -> int:
        """The number of observed queries, which is one."""
        return 1

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the weights of the last query."""
        return tokens.observed


@dataclass(frozen=True)
class ObservedWindow(EvictionRule):
    """SnapKV: the tokens stay to which the last queries give the most weight, smoothed over
    neighbours, and the tokens of these queries.

    score_j = mean over the `pool` tokens around j of sum of p_ij over the last `window` queries i

    Args:
        window: the number of last queries, whose own tokens stay.
        pool: the number of neighbours in the mean, odd; outside of the text there are zeros.

    Raises:
        ArgumentError: window is less than 1, or pool is not odd and at least 1.

    >>> ObservedWindow(window=2, pool=3).recent
    2

    Source: Li et al. 2024 (arXiv 2404.14469), section 4.
    """

    window: int
    pool: int = 5

    def __post_init__(self) -> None:
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ArgumentError(
                f"ObservedWindow(window={self.window}, pool={self.pool}): window must be at least "
                "1, and pool odd and at least 1"
            )

    @property
    def observed(self) -> int:
        """The queries of the window."""
        return self.window

    @property
    def recent(self) -> int:
        """The tokens of the window."""
        return self.window

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the smoothed weights; the tokens of the window do not enter them."""
        count = tokens.is_held.sum(-1, keepdim=True)
        is_old = torch.arange(tokens.is_held.shape[1], device=count.device) < count - self.window
        old = torch.where(is_old, tokens.observed, 0)
        half = self.pool // 2
        pooled: Tensor = F.avg_pool1d(old[:, None], self.pool, stride=1, padding=half)
        return pooled[:, 0]


@dataclass(frozen=True)
class SmallKeyNorm(EvictionRule):
    """The tokens stay whose keys have the smallest norm, because such keys often get much weight.

    score_j = -|k_j|

    >>> SmallKeyNorm().accumulates
    False

    Source: Devoto et al. 2024 (arXiv 2406.11430), section 3.
    """

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the negative norms of the keys."""
        norms: Tensor = tokens.keys.norm(dim=-1)
        return -norms


@dataclass(frozen=True)
class KeyDifference(EvictionRule):
    """KeyDiff: the tokens stay whose keys differ most in direction from the mean direction.

    score_j = -cos(k_j, mean of k_l / |k_l| over the held tokens l)

    >>> KeyDifference().recent
    0

    Source: Park et al. 2025 (arXiv 2504.15364), section 3.
    """

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the negative cosines with the mean direction."""
        unit = F.normalize(tokens.keys, dim=-1)
        count = tokens.is_held.sum(-1)[:, None, None].clamp(min=1)
        mean = unit.sum(1, keepdim=True) / count
        return -F.cosine_similarity(tokens.keys, mean, dim=-1)


class Evicting(State):
    """The cache of a layer that evicts tokens by a rule: a fixed number of slots per key/value
    head, each with a token of its own.

    `regard.nn.EvictingAttention` reads and replaces the contents. As a state, it cannot take the
    last tokens back, because what they displaced is gone.

    >>> Evicting().bytes
    0

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    @property
    def bytes(self) -> int:
        """Bytes of keys, values, sums and observed queries, without positions."""
        parts: Parts = self.state or ()
        return sum(x.numel() * x.element_size() for x in parts if x.is_floating_point())

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule for a number of tokens that stay.

        Args:
            budget: the number of tokens that stay after an eviction.

        Returns:
            The rule.

        Raises:
            NotImplementedError: the class has no rule.
        """
        raise NotImplementedError(f"{cls.__name__} has no rule for {budget}")


class _NamedEviction(Evicting):
    """A cache that generation offers by the name of its rule."""

    evicts: ClassVar[bool] = True
    min_context: ClassVar[int] = 8


class HeavyHitterCache(_NamedEviction):
    """The cache "h2o": half of the budget for the tokens with the most weight so far, half for the
    newest.

    >>> HeavyHitterCache.rule_for(64)
    HeavyHitters(newest=32)
    """

    kind: ClassVar[str | None] = "h2o"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule with half of the budget for the newest tokens."""
        return HeavyHitters(budget // 2)


class LastQueryCache(_NamedEviction):
    """The cache "tova": the tokens to which the last query gives the most weight.

    >>> LastQueryCache.rule_for(64)
    LastQuery()
    """

    kind: ClassVar[str | None] = "tova"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:  # noqa: ARG003
        """Return the rule, which has no sizes."""
        return LastQuery()


class ObservedWindowCache(_NamedEviction):
    """The cache "snapkv": the tokens to which the last queries give the most weight, and their own.

    >>> ObservedWindowCache.rule_for(64)
    ObservedWindow(window=16, pool=5)
    """

    kind: ClassVar[str | None] = "snapkv"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule with a window of a quarter of the budget, at most 32."""
        return ObservedWindow(min(32, max(1, budget // 4)))


class SmallKeyNormCache(_NamedEviction):
    """The cache "key_norm": the tokens whose keys have the smallest norm.

    >>> SmallKeyNormCache.rule_for(64)
    SmallKeyNorm()
    """

    kind: ClassVar[str | None] = "key_norm"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:  # noqa: ARG003
        """Return the rule, which has no sizes."""
        return SmallKeyNorm()


class KeyDifferenceCache(_NamedEviction):
    """The cache "keydiff": the tokens whose keys differ most from the mean direction.

    >>> KeyDifferenceCache.rule_for(64)
    KeyDifference()
    """

    kind: ClassVar[str | None] = "keydiff"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:  # noqa: ARG003
        """Return the rule, which has no sizes."""
        return KeyDifference()


def tokens_to_keep(
    rule: EvictionRule, tokens: HeldTokens, budget: int
) -> tuple[Tensor, Int[Tensor, " R"]]:
    """Return which of the held tokens stay.

    Args:
        rule: the rule.
        tokens: the held tokens.
        budget: how many stay in each row.

    Returns:
        A bool tensor `[R, S]`, True for at most `budget` tokens in each row, and the number of held
        tokens `[R]`.

    >>> keys = torch.tensor([[[3.0], [1.0], [2.0]]])
    >>> zeros = torch.zeros(1, 3)
    >>> tokens = HeldTokens(keys, torch.ones(1, 3, dtype=torch.bool), zeros, zeros)
    >>> tokens_to_keep(SmallKeyNorm(), tokens, 2)[0].tolist()
    [[False, True, True]]
    """
    is_held, count = tokens.is_held, tokens.is_held.sum(-1)
    index = torch.arange(is_held.shape[1], device=is_held.device)
    score = rule.score(tokens).double()
    score = score.masked_fill(score.isnan(), torch.inf)  # NaN stays, so that it shows
    score = torch.where(index >= (count - rule.recent)[:, None], torch.inf, score)
    score = torch.where(is_held, score, -torch.inf)
    # among equal scores the newest stay, so that the recent ones do
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter(1, order, index.expand_as(order)).flip(-1)
    return is_held & (rank < budget), count
