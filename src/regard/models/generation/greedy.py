"""The likeliest token at each step, for models that read a source."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError


@torch.no_grad()
def greedy(
    step: Callable[[Tensor], Tensor], first: Int[Tensor, " B"], *, end: int, limit: int
) -> Int[Tensor, "B n"]:
    """Feed each row its own likeliest token until every row has said `end`, or `limit` tokens are
    there.

    y_t = argmax step(y_{t-1})

    Args:
        step: from ids [B,1] to logits [B,1,V]; it keeps what it needs from one call to the next.
        first: the ids that start the rows.
        end: the id that ends a row; a row that has ended is filled with it.
        limit: the most tokens, at least 1.

    Returns:
        [B, n] with n <= limit, without `first`.

    Raises:
        ArgumentError: limit is less than 1, or first is not one id per row.

    >>> def count(ids):  # what follows n is n + 1
    ...     return torch.nn.functional.one_hot(ids + 1, 10).double()
    >>> greedy(count, torch.tensor([0, 2]), end=4, limit=9).tolist()
    [[1, 2, 3, 4], [3, 4, 4, 4]]
    """
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; it must be at least 1")
    if first.ndim != 1:
        raise ArgumentError(f"first is {tuple(first.shape)}; it must be one id per row, [batch]")
    ids, done, found = first, torch.zeros_like(first, dtype=torch.bool), []
    for _ in range(limit):
        ids = step(ids[:, None])[:, -1].argmax(-1).masked_fill(done, end)
        found.append(ids)
        done = done | (ids == end)
        if bool(done.all()):
            break
    return torch.stack(found, 1)
