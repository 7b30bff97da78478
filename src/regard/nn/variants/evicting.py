"""Constructors of grouped-query attention whose cache has a budget and evicts tokens by a rule."""

from __future__ import annotations

from regard.argument_checks import resolve_head_dim
from regard.caches.eviction import (
    AcrossHeads,
    EvictionRule,
    ExpectedAttention,
    HeavyHitters,
    KeyDifference,
    LastQuery,
    ObservedWindow,
    SmallKeyNorm,
)
from regard.nn.evicting_attention import EvictingAttention
from regard.nn.variants.projections import output_projection, separate_qkv
from regard.nn.variants.registry import variant
from regard.positions import Rotary


def _evicting(
    dim: int,
    heads: int,
    groups: int | None,
    head_dim: int | None,
    base: float,
    rule: EvictionRule,
    budget: int,
    interval: int,
) -> EvictingAttention:
    """Build grouped-query attention with a rule."""
    D, G = resolve_head_dim(dim, heads, head_dim), heads if groups is None else groups
    return EvictingAttention(
        separate_qkv(dim, heads, G, D, Rotary(D, base)),
        output_projection(dim, heads, D),
        rule=rule,
        budget=budget,
        interval=interval,
    )


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; "
    "I = all j > t - n, and the j with the largest sum_t p_tj",
    source="Zhang et al. 2023 (arXiv 2306.14048), algorithm 1",
    groups=2,
    budget=5,
    interval=2,
    newest=2,
)
def h2o(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
    newest: int = 256,
) -> EvictingAttention:
    """H2O: the cache keeps the tokens that got the most attention so far, and the newest ones.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head, and what was
    evicted is lost for all later queries.

    Args:
        dim: the model dim M.
        heads: the query heads H.
        groups: the key/value heads G, which divide H; None is H.
        head_dim: the head dim D; None is M / H.
        base: the base of the rotary positions.
        budget: the number of tokens per key/value head that stay after an eviction.
        interval: the number of tokens between two evictions; 1 evicts one at every step.
        newest: the number n of newest tokens that always stay.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole, or newest is larger than budget.

    >>> h2o(32, 4, groups=2, budget=6, interval=2, newest=2).describe(100).kv_tokens.value
    8

    Source: Zhang et al. 2023 (arXiv 2306.14048), algorithm 1.
    """
    rule = HeavyHitters(newest)
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest p_tj",
    source="Oren et al. 2024 (arXiv 2401.06104), section 3.2",
    groups=2,
    budget=5,
    interval=2,
)
def tova(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
) -> EvictingAttention:
    """TOVA: the cache keeps the tokens to which the last query attends most.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head, and what was
    evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> tova(32, 4, groups=2, budget=6, interval=2).describe(100).kv_tokens.value
    8

    Source: Oren et al. 2024 (arXiv 2401.06104), section 3.2.
    """
    rule = LastQuery()
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; "
    "I = all j > t - w, and the j with the largest mean(sum_t p_tj)",
    source="Li et al. 2024 (arXiv 2404.14469), section 4",
    groups=2,
    budget=5,
    interval=2,
    window=2,
    pool=3,
)
def snapkv(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
    window: int = 32,
    pool: int = 5,
) -> EvictingAttention:
    """SnapKV: the cache keeps the tokens to which the last queries attend most, smoothed over
    neighbours.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head, and what was
    evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.
        window: the number w of last queries, whose own tokens stay.
        pool: the number of neighbours in the mean, odd.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole, or window or pool is out of range.

    >>> snapkv(32, 4, budget=6, interval=2, window=2).describe(100).kv_tokens.value
    8

    Source: Li et al. 2024 (arXiv 2404.14469), section 4.
    """
    rule = ObservedWindow(window, pool)
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; I = the j with the largest -abs(k_j)",
    source="Devoto et al. 2024 (arXiv 2406.11430), section 3",
    groups=2,
    budget=5,
    interval=2,
)
def key_norm(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
) -> EvictingAttention:
    """Small key norms: the cache keeps the tokens whose keys have the smallest norm.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head, and what was
    evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> key_norm(32, 4, groups=2, budget=6, interval=2).describe(100).kv_tokens.value
    8

    Source: Devoto et al. 2024 (arXiv 2406.11430), section 3.
    """
    rule = SmallKeyNorm()
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; "
    "I = the j with the largest -k_j c / abs(k_j), c = mean(k_j / abs(k_j))",
    source="Park et al. 2025 (arXiv 2504.15364), section 3",
    groups=2,
    budget=5,
    interval=2,
)
def keydiff(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
) -> EvictingAttention:
    """KeyDiff: the cache keeps the tokens whose keys differ most in direction from the mean.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head, and what was
    evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole.

    >>> keydiff(32, 4, groups=2, budget=6, interval=2).describe(100).kv_tokens.value
    8

    Source: Park et al. 2025 (arXiv 2504.15364), section 3.
    """
    rule = KeyDifference()
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; "
    "I = all j > t - w, and the j of any head with the largest mean(sum_t p_tj)",
    source="Feng et al. 2024 (arXiv 2407.11550), algorithm 1",
    groups=2,
    budget=5,
    interval=2,
    window=2,
    pool=3,
)
def adakv(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
    window: int = 32,
    pool: int = 5,
    floor: float = 0.2,
) -> EvictingAttention:
    """Ada-KV: SnapKV where the heads of a layer share one budget, so that heads with spread
    attention keep more tokens.

    x [B,T,M] -> [B,T,M]; a cache has G (budget + interval) slots for all heads together, and what
    was evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.
        window: the number w of last queries, whose own tokens stay.
        pool: the number of neighbours in the mean, odd.
        floor: the share of the budget that every head keeps; 1 is `snapkv`.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole, or window, pool or floor is out of range.

    >>> adakv(32, 4, budget=6, interval=2, window=2).describe(100).kv_tokens.value
    8

    Source: Feng et al. 2024 (arXiv 2407.11550), algorithm 1 and section 3.3.
    """
    rule = AcrossHeads(ObservedWindow(window, pool), floor)
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)


@variant(
    family="selected",
    equation="z = softmax(q K[I]^T / sqrt(D)) V[I]; "
    "I = the j with the largest softmax_j(m k_j + k_j C k_j / 2) abs(v_j)",
    source="Devoto et al. 2025 (arXiv 2510.00636), section 3",
    groups=2,
    budget=5,
    interval=2,
    future=8,
    sinks=1,
)
def expected_attention(
    dim: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    budget: int = 960,
    interval: int = 64,
    future: int = 512,
    sinks: int = 4,
) -> EvictingAttention:
    """Expected attention: the cache keeps the tokens whose values should count most for the next
    queries, by the mean and covariance of the queries so far.

    x [B,T,M] -> [B,T,M]; a cache has budget + interval slots per key/value head and H D (D + 1)
    values for the moments, and what was evicted is lost for all later queries.

    Args:
        dim, heads, groups, head_dim, base, budget, interval: as for `h2o`.
        future: the number of next positions for which queries are expected.
        sinks: the number of first tokens that always stay.

    Returns:
        The module.

    Raises:
        ArgumentError: a size is less than 1, groups does not divide heads, or head_dim is None and
            M / H is not whole, or sinks is larger than budget.

    >>> expected_attention(32, 4, budget=6, interval=2).describe(100).kv_tokens.value
    8

    Source: Devoto et al. 2025 (arXiv 2510.00636), section 3.
    """
    rule = ExpectedAttention(future, sinks)
    return _evicting(dim, heads, groups, head_dim, base, rule, budget, interval)
