"""What a head does, as numbers, from its pattern: rows are queries, columns are keys.

A pattern is [..., T, T], each row non-negative with sum 1 (less with a sink). `head_scores` sees one layer at a time and
keeps numbers only, so that the memory does not grow with the layers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.model import Model
from regard.tap import Trace

SINKS = 4
"""How many first keys count as sinks."""


def previous_token_score(pattern: Float[Tensor, "*H T T"]) -> Float[Tensor, "*H"]:
    """The mean weight on the key just before the query.

    mean over i >= 1 of p_{i,i-1}

    Raises:
        ArgumentError: the pattern is not square, or has fewer than 2 rows.

    >>> previous_token_score(torch.eye(4).roll(-1, 1)[None]).tolist()
    [1.0]

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    _check(pattern, least=2)
    return pattern.diagonal(-1, -2, -1).mean(-1)


def induction_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """The mean weight on what followed an earlier copy of the query's token.

    mean over i of sum_j p_{i,j+1}, over all j < i - 1 with id_j = id_i; rows i without such a j are left out

    It works by lists of indices: T ids, not T x T cells, are compared.

    Raises:
        ArgumentError: no token occurs twice, at least two apart, or ids and pattern differ in length.

    >>> pattern = torch.zeros(4, 4)
    >>> pattern[2, 1], pattern[3, 2] = 0.75, 0.25  # a b a b: the second a looks at the first b
    >>> induction_score(pattern, torch.tensor([7, 8, 7, 8])).item()
    0.5

    Source: Olsson et al. 2022 (arXiv 2209.11895), section "definition: prefix matching".
    """
    _check(pattern, least=1, ids=ids)
    rows, keys = _after_copies(ids)
    return _mass(pattern, rows, keys)


def duplicate_score(
    pattern: Float[Tensor, "*H T T"], ids: Int[Tensor, " T"]
) -> Float[Tensor, "*H"]:
    """The mean weight on earlier copies of the query's token.

    mean over i of sum_j p_ij, over all j < i with id_j = id_i; rows i without such a j are left out

    Raises:
        ArgumentError: no token occurs twice, or ids and pattern differ in length.

    >>> duplicate_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([3, 3])).item()
    0.5

    Source: Wang et al. 2022 (arXiv 2211.00593), section 3.1.
    """
    _check(pattern, least=1, ids=ids)
    copies = _copies(ids)
    return _mass(pattern, [i for i, _ in copies], [j for _, j in copies])


def entropy(pattern: Float[Tensor, "*H T S"]) -> Float[Tensor, "*H T"]:
    """The entropy of each row, in nats: 0 for one key, ln n for n keys alike.

    H_i = - sum_j p_ij ln p_ij

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).exp().tolist()
    [1.0, 2.0]
    """
    return torch.special.entr(pattern).sum(-1)


def sink_share(pattern: Float[Tensor, "*H T T"], first: int = SINKS) -> Float[Tensor, "*H"]:
    """The mean weight on the first keys, over the queries behind them.

    mean over i >= first of sum over j < first of p_ij

    Raises:
        ArgumentError: there is no query behind the first keys, or first is less than 1.

    >>> sink_share(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), first=1).item()
    0.5

    Source: Xiao et al. 2023 (arXiv 2309.17453), section 3.1.
    """
    if first < 1:
        raise ArgumentError(f"first is {first}; it must be at least 1")
    _check(pattern, least=first + 1)
    return pattern[..., first:, :first].sum(-1).mean(-1)


def head_scores(model: Model, ids: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "layers H"]]:
    """Every score of every head, as means over the rows of a batch.

    Keys: previous_token, induction, duplicate, entropy (of a row, over ln of the keys that it may see: 0 to 1),
    sink (the share of the first key). The reference kernel runs, one layer's patterns are held at a time.

    Args:
        model: a model.
        ids: token ids; random ids repeated (`repeated_ids`) show what a head does whatever the words mean.

    Raises:
        ArgumentError: ids are shorter than 2, or a row repeats no token.

    >>> import regard
    >>> model = regard.load("tiny")
    >>> scores = head_scores(model, repeated_ids(model.config.vocab_size, 16, batch=2))
    >>> sorted(scores)
    ['duplicate', 'entropy', 'induction', 'previous_token', 'sink']
    """
    found: dict[str, list[Tensor]] = {}
    seen: list[Tensor] = []

    def note_visible(scores: Tensor) -> Tensor:
        seen[:] = [(~scores.isneginf()).sum(-1)]
        return scores

    def score(pattern: Tensor) -> Tensor:
        for name, value in _scores(pattern, seen[0], ids).items():
            found.setdefault(name, []).append(value)
        return pattern

    with torch.inference_mode(), Trace(edit={"scores": note_visible, "pattern": score}):
        model.forward(ids, backend="reference")
    return {name: torch.stack(values) for name, values in found.items()}


def repeated_ids(
    vocabulary: int, length: int, *, batch: int = 4, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Random ids, each row written twice: [batch, 2 length]; the first half of a row has no token twice if it can.

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


def _scores(pattern: Tensor, visible: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Scores [H] of one layer's patterns [B,H,T,T]; visible [B,H,T] counts the keys that each query may see."""
    several = visible[..., :] > 1  # one key alone has no entropy to speak of
    spread = entropy(pattern) / visible.clamp(min=2).log()
    return {
        "previous_token": previous_token_score(pattern).mean(0),
        "induction": _over_rows(induction_score, pattern, ids),
        "duplicate": _over_rows(duplicate_score, pattern, ids),
        "entropy": (spread * several).sum((0, 2)) / several.sum((0, 2)).clamp(min=1),
        "sink": sink_share(pattern, first=1).mean(0),
    }


def _over_rows(score: object, pattern: Tensor, ids: Tensor) -> Tensor:
    assert callable(score)
    return torch.stack([score(p, row) for p, row in zip(pattern, ids, strict=True)]).mean(0)


def _copies(ids: Tensor) -> list[tuple[int, int]]:
    """Pairs (i, j): id_j = id_i and j < i."""
    earlier: dict[int, list[int]] = {}
    pairs = []
    for i, index in enumerate(ids.tolist()):
        pairs += [(i, j) for j in earlier.get(index, [])]
        earlier.setdefault(index, []).append(i)
    return pairs


def _after_copies(ids: Tensor) -> tuple[list[int], list[int]]:
    """Queries, and the keys behind earlier copies; a key that is the query itself says nothing, and is left out."""
    pairs = [(i, j + 1) for i, j in _copies(ids) if j + 1 < i]
    return [i for i, _ in pairs], [j for _, j in pairs]


def _mass(pattern: Tensor, rows: list[int], keys: list[int]) -> Tensor:
    if not rows:
        raise ArgumentError(
            "no token occurs twice, far enough apart, in ids; give a text that repeats itself, such as repeated_ids(...)"
        )
    return pattern[..., rows, keys].sum(-1) / len(set(rows))


def _check(pattern: Tensor, least: int, ids: Tensor | None = None) -> None:
    if pattern.ndim < 2 or pattern.shape[-1] != pattern.shape[-2]:
        raise ArgumentError(f"pattern is {tuple(pattern.shape)}; it must be [..., T, T]")
    if pattern.shape[-1] < least:
        raise ArgumentError(
            f"pattern has {pattern.shape[-1]} rows; this score needs at least {least}"
        )
    if ids is not None and tuple(ids.shape) != (pattern.shape[-1],):
        raise ArgumentError(
            f"ids are {tuple(ids.shape)}; the pattern has {pattern.shape[-1]} rows, one per id"
        )
