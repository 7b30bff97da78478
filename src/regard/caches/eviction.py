"""Eviction rules, which choose the tokens of a full cache that stay, and the cache of a layer.

What is evicted is lost for all later queries; the tokens that stay keep their positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.argument_checks import check_number
from regard.caches.base import bytes_of
from regard.caches.state import State
from regard.errors import ArgumentError


class QueryMoments(NamedTuple):
    """The moments `[R, n, D]`, `[R, n, D, D]` of expected queries, times the factor on scores."""

    mean: Float[Tensor, "R n D"]
    covariance: Float[Tensor, "R n D D"]


class HeldTokens(NamedTuple):
    """The tokens of a full cache by position, empty slots last; R is batch rows times G heads.

    Attributes:
        keys, is_held: `[R, S, D]` as attention used them, and bool `[R, S]`.
        sums, observed: `[R, S]`, the summed weights that all queries so far, or the last ones, gave
            to each token; 0 if the rule uses none.
        values: `[R, S, E]`, 0 in empty slots; None if the rule is not given them.
        positions: `[R, S]`, -1 in empty slots; None stands for 0, 1, 2 and so on.
    """

    keys: Float[Tensor, "R S D"]
    is_held: Tensor
    sums: Float[Tensor, "R S"]
    observed: Float[Tensor, "R S"]
    values: Float[Tensor, "R S E"] | None = None
    positions: Int[Tensor, "R S"] | None = None
    expected: QueryMoments | None = None


@dataclass(frozen=True)
class EvictionRule(ABC):
    """Base class of rules that score the tokens of a full cache; the largest scores stay."""

    @property
    def accumulates(self) -> bool:
        """Whether the rule needs the summed weights of all queries."""
        return False

    @property
    def observed(self) -> int:
        """How many of the last queries the rule looks at."""
        return 0

    @property
    def recent(self) -> int:
        """How many of the newest tokens always stay."""
        return 0

    @property
    def sinks(self) -> int:
        """Below which position tokens always stay."""
        return 0

    @property
    def future(self) -> int:
        """For how many of the next positions the rule expects queries by their moments; 0: none."""
        return 0

    @property
    def floor(self) -> float:
        """Which share of the budget stays in every head; the rest goes to the largest scores."""
        return 1.0

    @abstractmethod
    def score(self, tokens: HeldTokens) -> Float[Tensor, "R S"]:
        """Return the importance of every token."""


@dataclass(frozen=True)
class HeavyHitters(EvictionRule):
    """H2O: the tokens stay that got the most weight so far, and the newest ones.

    score_j = sum of p_ij over all queries i so far

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    newest: int

    def __post_init__(self) -> None:
        check_number("newest", self.newest, -1, float("inf"), "at least 0")

    @property
    def accumulates(self) -> bool:
        """True: the rule sums the weights of all queries."""
        return True

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

    Source: Oren et al. 2024 (arXiv 2401.06104), section 3.2.
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
    """SnapKV: the tokens stay to which the last queries give the most weight, and their own.

    score_j = mean over the `pool` tokens around j of sum of p_ij over the last `window` queries i

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

    Source: Park et al. 2025 (arXiv 2504.15364), section 3.
    """

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the negative cosines with the mean direction."""
        unit = F.normalize(tokens.keys, dim=-1)
        count = tokens.is_held.sum(-1)[:, None, None].clamp(min=1)
        mean = unit.sum(1, keepdim=True) / count
        return -F.cosine_similarity(tokens.keys, mean, dim=-1)


@dataclass(frozen=True)
class ExpectedAttention(EvictionRule):
    """Expected attention: the tokens stay whose values should count most for the next queries.

    a_j = softmax_j(m . k_j + k_j C k_j / 2),  score_j = (mean of a_j over query heads + e) |v_j|

    m = s R mean(q) and C = s^2 R cov(q) R^T, where s is the factor on the scores, q are the queries
    before their rotation, and R is the mean of the rotations at the next positions.

    Source: Devoto et al. 2025 (arXiv 2510.00636), section 3; its published code, kvpress.
    """

    positions: int = 512
    first: int = 4
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.positions < 1 or self.first < 0 or not self.epsilon >= 0:
            raise ArgumentError(
                f"ExpectedAttention(positions={self.positions}, first={self.first}, "
                f"epsilon={self.epsilon}): positions must be at least 1, first and epsilon at "
                "least 0"
            )

    @property
    def sinks(self) -> int:
        """The first positions, as given."""
        return self.first

    @property
    def future(self) -> int:
        """The number of next positions, as given."""
        return self.positions

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the weights that are expected, times the norms of the values."""
        if tokens.values is None or tokens.positions is None or tokens.expected is None:
            raise ArgumentError(
                "ExpectedAttention needs values, positions and expected queries; "
                "EvictingAttention gives them"
            )
        mean, covariance = tokens.expected
        keys = tokens.keys.to(mean.dtype)[:, None]  # [R,1,S,D]
        logits = (keys @ mean[..., None])[..., 0]  # [R,n,S]
        logits = logits + 0.5 * ((keys @ covariance) * keys).sum(-1)
        counts = tokens.is_held & (tokens.positions >= self.first)
        weights = logits.masked_fill(~counts[:, None], -torch.inf).softmax(-1).mean(1)
        norms: Tensor = tokens.values.to(mean.dtype).norm(dim=-1)
        return (weights + self.epsilon) * norms


@dataclass(frozen=True)
class AcrossHeads(EvictionRule):
    """Ada-KV: another rule, whose scores are compared across the key/value heads of a layer.

    Each head keeps its best int(floor budget) tokens, then any head the best of the rest.
    Source: Feng et al. 2024 (arXiv 2407.11550), algorithm 1 and section 3.3.
    """

    rule: EvictionRule
    least: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1 or isinstance(self.rule, AcrossHeads):
            raise ArgumentError(
                f"AcrossHeads({self.rule}, least={self.least}): least must be from 0 to 1, and the "
                "rule one that scores the tokens of a head"
            )

    @property
    def accumulates(self) -> bool:
        """Whether the rule needs the summed weights of all queries."""
        return self.rule.accumulates

    @property
    def observed(self) -> int:
        """The queries at which the rule looks."""
        return self.rule.observed

    @property
    def recent(self) -> int:
        """The newest tokens, which the rule keeps in every head."""
        return self.rule.recent

    @property
    def sinks(self) -> int:
        """The first positions, which the rule keeps in every head."""
        return self.rule.sinks

    @property
    def future(self) -> int:
        """The next positions for which the rule expects queries."""
        return self.rule.future

    @property
    def floor(self) -> float:
        """The share of the budget that stays in every head, as given."""
        return self.least

    def score(self, tokens: HeldTokens) -> Tensor:
        """Return the scores of the rule."""
        return self.rule.score(tokens)


def pyramid_budget(
    budget: int, layer: int, layers: int, *, window: int, steepness: float = 20.0
) -> int:
    """Return the number of tokens that stay in one layer, where lower layers keep more.

    budget_l = w + (2 - 1/b) m - l (2 - 2/b) m / (L - 1),  m = budget - w, rounded

    Source: Cai et al. 2024 (arXiv 2406.02069), section 4.2.
    """
    if not 0 <= layer < layers or not 0 <= window <= budget or not steepness >= 1:
        raise ArgumentError(
            f"pyramid_budget(budget={budget}, layer={layer}, layers={layers}, window={window}, "
            f"steepness={steepness}): layer must be below layers, window at most budget, and "
            "steepness at least 1"
        )
    if layers == 1:
        return budget
    mean = budget - window
    smallest = mean / steepness
    largest = 2 * mean - smallest
    return max(1, window + round(largest - layer * (largest - smallest) / (layers - 1)))


class Evicting(State):
    """The cache of a layer that evicts tokens by a rule, with slots per key/value head.

    `regard.nn.EvictingAttention` replaces the contents; the last tokens cannot be taken back.

    >>> Evicting().bytes
    0

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """

    static_step_refusal: ClassVar[str | None] = (
        "Python counts the tokens of a row, to know when some of them are evicted"
    )

    @property
    def bytes(self) -> int:
        """Bytes of keys, values, sums and observed queries, without positions."""
        return bytes_of(x for x in self.state or () if x.is_floating_point())

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule for a number of tokens that stay.

        Args:
            budget: the number of tokens that stay after an eviction.

        Returns:
            The rule.
        """
        raise NotImplementedError(f"{cls.__name__} has no rule for {budget}")

    @classmethod
    def layer_budget(cls, budget: int, layer: int, layers: int) -> int:  # noqa: ARG003
        """Return the number of tokens that stay in one layer of a model.

        Args:
            budget: the number that stay, on average over the layers.
            layer: the number of the layer among those that evict, from 0.
            layers: how many layers evict.

        Returns:
            The budget of the layer.
        """
        return budget


class _NamedEviction(Evicting):
    """A cache that generation offers by the name of its rule."""

    evicts: ClassVar[bool] = True
    min_context: ClassVar[int] = 8
    rule: ClassVar[Callable[[int], EvictionRule]]

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule for a number of tokens that stay."""
        return cls.rule(budget)


def _named(name: str, kind: str, rule: Callable[[int], EvictionRule]) -> type[_NamedEviction]:
    """Return the cache class `kind`, with a rule that depends on the budget."""
    members = {"kind": kind, "rule": staticmethod(rule), "__module__": __name__}
    return type(name, (_NamedEviction,), members)


def _window_rule(budget: int) -> ObservedWindow:
    """Return the rule with a window of a quarter of the budget, at most 32."""
    return ObservedWindow(min(32, max(1, budget // 4)))


HeavyHitterCache = _named("HeavyHitterCache", "h2o", lambda budget: HeavyHitters(budget // 2))
LastQueryCache = _named("LastQueryCache", "tova", lambda _: LastQuery())
ObservedWindowCache = _named("ObservedWindowCache", "snapkv", _window_rule)
SmallKeyNormCache = _named("SmallKeyNormCache", "key_norm", lambda _: SmallKeyNorm())
KeyDifferenceCache = _named("KeyDifferenceCache", "keydiff", lambda _: KeyDifference())
AdaptiveHeadCache = _named(
    "AdaptiveHeadCache", "adakv", lambda budget: AcrossHeads(_window_rule(budget))
)
ExpectedAttentionCache = _named(
    "ExpectedAttentionCache",
    "expected_attention",
    lambda budget: ExpectedAttention(first=min(4, budget // 2)),
)


class PyramidCache(_NamedEviction):
    """The cache "pyramidkv": as "snapkv", with more tokens in lower layers."""

    kind: ClassVar[str | None] = "pyramidkv"

    @classmethod
    def rule_for(cls, budget: int) -> EvictionRule:
        """Return the rule of "snapkv" with a window of a quarter of the budget, at most 8."""
        return ObservedWindow(cls._window(budget))

    @classmethod
    def layer_budget(cls, budget: int, layer: int, layers: int) -> int:
        """Return the budget of a layer by `pyramid_budget`."""
        return pyramid_budget(budget, layer, layers, window=cls._window(budget))

    @staticmethod
    def _window(budget: int) -> int:
        """Return the number of observed queries, that of the paper or fewer."""
        return min(8, max(1, budget // 4))


def tokens_to_keep(
    rule: EvictionRule, tokens: HeldTokens, budget: int, heads: int = 1
) -> tuple[Tensor, Int[Tensor, " R"]]:
    """Return which of the held tokens stay."""
    is_held, count = tokens.is_held, tokens.is_held.sum(-1)
    index = torch.arange(is_held.shape[1], device=is_held.device)
    score = rule.score(tokens).double()
    score = score.masked_fill(score.isnan(), torch.inf)  # NaN stays, so that it shows
    score = torch.where(index >= (count - rule.recent)[:, None], torch.inf, score)
    positions = index.expand_as(score) if tokens.positions is None else tokens.positions
    score = torch.where(positions < rule.sinks, torch.inf, score)
    score = torch.where(is_held, score, -torch.inf)
    if rule.floor >= 1:
        return is_held & (_rank(score) < budget), count
    score = torch.where(_rank(score) < int(rule.floor * budget), torch.inf, score)
    score = torch.where(is_held, score, -torch.inf)
    # [B, G, S] -> one row for all heads of a layer
    layer = torch.unflatten(score, 0, (-1, heads)).flatten(1)
    stays = (_rank(layer) < heads * budget).view(score.shape)
    return is_held & stays, count


def _rank(score: Tensor) -> Tensor:
    """Return the place of each number of a row [R,S] in descending order, of equals last first."""
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    index = torch.arange(score.shape[1], device=score.device)
    return torch.empty_like(order).scatter(1, order, index.expand_as(order)).flip(-1)
