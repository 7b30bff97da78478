"""Which pairs of a query and a key mean something, as lists: T ids are compared, not T x T
cells.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def copies(ids: Int[Tensor, " T"]) -> Int[Tensor, "n 2"]:
    """Pairs (i, j): id_j = id_i and j < i, in the order of i.

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
    """Queries, and the keys behind earlier copies; a key that is the query itself says nothing, and
    is left out.

    >>> after_copies(torch.tensor([7, 8, 7, 7])).tolist()
    [[2, 1], [3, 1]]
    """
    pairs = copies(ids)
    pairs = torch.stack([pairs[:, 0], pairs[:, 1] + 1], 1)
    return pairs[pairs[:, 1] < pairs[:, 0]]
