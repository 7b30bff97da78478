"""Scores of heads from dense patterns `[*H, T, T]`, and token ids that reveal them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.units import plural

NUM_SINKS = 4
"""Number of first keys that count as sinks."""


def copies(ids: Int[Tensor, " T"]) -> Int[Tensor, "n 2"]:
    """Return the pairs (i, j) with id_j = id_i and j < i, in the order of i.

    >>> copies(torch.tensor([7, 8, 7, 7])).tolist()
    [[2, 0], [3, 0], [3, 2]]
    """
    earlier: dict[int, list[int]] = {}
    pairs = []
    for i, index in enumerate(ids.tolist()):
        pairs += [(i, j) for j in earlier.get(index, [])]
        earlier.setdefault(index, []).append(i)
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def after_copies(ids: Int[Tensor, " T"]) -> Int[Tensor, "n 2"]:
    """Return the pairs (i, j + 1) for which id_j = id_i and j + 1 < i, in the order of i.

    A key that is the query itself is left out, because it says nothing about induction.

    >>> after_copies(torch.tensor([7, 8, 7, 7])).tolist()
    [[2, 1], [3, 1]]
    """
    pairs = copies(ids)
    pairs = torch.stack([pairs[:, 0], pairs[:, 1] + 1], 1)
    return pairs[pairs[:, 1] < pairs[:, 0]]


def repeated_ids(
    vocabulary: int, length: int, *, batch: int = 4, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Draw random ids and write each row twice.

    The first half of a row has no token twice if the vocabulary is large enough.

    Args:
        vocabulary: number of tokens to draw from.
        length: number of ids before the repetition.
        batch: number of rows.
        seed: random seed.

    Returns:
        Ids, `[batch, 2 length]`.

    Raises:
        ArgumentError: a number is less than 1.

    >>> repeated_ids(9, 3, batch=1).shape
    torch.Size([1, 6])
    """
    if min(vocabulary, length, batch) < 1:
        raise ArgumentError(
            f"repeated_ids({vocabulary}, {length}, batch={batch}): each number must be at least 1"
        )
    own = torch.Generator().manual_seed(seed)
    if length <= vocabulary:
        rows = [torch.randperm(vocabulary, generator=own)[:length] for _ in range(batch)]
        half = torch.stack(rows)
    else:
        half = torch.randint(vocabulary, (batch, length), generator=own)
    return half.repeat(1, 2)


def previous_token_score(pattern: Float[Tensor, "*H T T"]) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the key just before the query.

    mean over i >= 1 of p_{i,i-1}

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: the pattern is not square, or has fewer than 2 rows.

    >>> previous_token_score(torch.eye(4).roll(-1, 1)[None]).tolist()
    [1.0]

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    _check_pattern(pattern, least=2)
    return pattern.diagonal(-1, -2, -1).mean(-1)


def induction_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the tokens that followed earlier copies of the query's token.

    mean over i of sum_j p_{i,j+1}, over all j < i - 1 with id_j = id_i; rows i without such a j are
    left out

    The pairs are found from lists of indices, in T steps rather than T x T comparisons.

    Args:
        pattern: attention weights, each row a query and each column a key.
        ids: token id of each row.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: no token occurs twice, at least two apart, or `ids` and `pattern` differ in
            length.

    >>> pattern = torch.zeros(4, 4)
    >>> pattern[2, 1], pattern[3, 2] = 0.75, 0.25  # a b a b: the second a attends to the first b
    >>> induction_score(pattern, torch.tensor([7, 8, 7, 8])).item()
    0.5

    Source: Olsson et al. 2022 (arXiv 2209.11895), section "definition: prefix matching".
    """
    _check_pattern(pattern, least=1, ids=ids)
    return _mean_weight(pattern, after_copies(ids))


def duplicate_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """Compute the mean weight on earlier copies of the query's token.

    mean over i of sum_j p_ij, over all j < i with id_j = id_i; rows i without such a j are left out

    Args:
        pattern: attention weights, each row a query and each column a key.
        ids: token id of each row.

    Returns:
        The score of each head.

    Raises:
        ArgumentError: no token occurs twice, or `ids` and `pattern` differ in length.

    >>> duplicate_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([3, 3])).item()
    0.5

    Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1.
    """
    _check_pattern(pattern, least=1, ids=ids)
    return _mean_weight(pattern, copies(ids))


def entropy(pattern: Float[Tensor, "*H T S"]) -> Float[Tensor, "*H T"]:
    """Compute the entropy of each row, in nats: 0 for one key, ln n for n keys of equal weight.

    H_i = - sum_j p_ij ln p_ij

    Args:
        pattern: attention weights, each row a query and each column a key.

    Returns:
        The entropy of each row.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).exp().tolist()
    [1.0, 2.0]
    """
    terms: Tensor = torch.special.entr(pattern)
    return terms.sum(-1)


def sink_share(pattern: Float[Tensor, "*H T T"], first: int = NUM_SINKS) -> Float[Tensor, "*H"]:
    """Compute the mean weight on the first keys, over the queries after them.

    mean over i >= first of sum over j < first of p_ij

    Args:
        pattern: attention weights, each row a query and each column a key.
        first: number of first keys.

    Returns:
        The share of each head.

    Raises:
        ArgumentError: there is no query after the first keys, or `first` is less than 1.

    >>> sink_share(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), first=1).item()
    0.5

    Source: Xiao et al. 2023 (arXiv 2309.17453), section 3.1.
    """
    if first < 1:
        raise ArgumentError(f"first is {first}; it must be at least 1")
    _check_pattern(pattern, least=first + 1)
    return pattern[..., first:, :first].sum(-1).mean(-1)


def _mean_weight(pattern: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean over rows of the total weight of the listed pairs."""
    if not len(pairs):
        raise ArgumentError(
            "in ids no token occurs twice, far enough apart; use ids with repetitions, such as "
            "repeated_ids(...)"
        )
    rows, keys = pairs.T
    return pattern[..., rows, keys].sum(-1) / len(torch.unique(rows))


def _check_pattern(pattern: Tensor, least: int, ids: Tensor | None = None) -> None:
    """Refuse a pattern that is not square or too small, or ids of another length."""
    if pattern.ndim < 2 or pattern.shape[-1] != pattern.shape[-2]:
        raise ArgumentError(f"pattern is {tuple(pattern.shape)}; it must be [..., T, T]")
    if pattern.shape[-1] < least:
        raise ArgumentError(
            f"pattern has {plural(pattern.shape[-1], 'row')}; this score needs at least {least}"
        )
    if ids is not None and tuple(ids.shape) != (pattern.shape[-1],):
        raise ArgumentError(
            f"ids are {tuple(ids.shape)}; the pattern has {plural(pattern.shape[-1], 'row')}, "
            "and there must be one id for each"
        )
