"""Ids that show what a head does, whatever the words mean."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError


def repeated_ids(
    vocabulary: int, length: int, *, batch: int = 4, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Random ids, each row written twice: [batch, 2 length]; the first half of a row has no token
    twice if it can.

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
