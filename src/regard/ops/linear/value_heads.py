"""The heads of a recurrence that has more value heads than key heads.

With H query heads, G key heads and N value heads, each value head has a state of its own. Value
head h uses key head h // (N/G), and the O = max(H, N) outputs read the states and the queries in
the same way: output o reads state o // (O/N) with query head o // (O/H). flash-linear-attention
calls this grouped value attention; Qwen3-Next has 16 query and key heads and 32 value heads.

Inside the operations, all tensors have G key heads and P = N/G value heads of each as two
dimensions. What the value heads of a key head share has size 1 in the second, so that a key is
neither repeated nor multiplied more than once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class GroupedHeads(NamedTuple):
    """Queries, keys and values with the value heads of a key head as a dimension.

    Attributes:
        q: queries `[B, G, P or 1, R, T, D]`, where R query heads read each state, and 1 means that
            the states of a key head are read with one query.
        k: keys `[B, G, 1, T, D]`.
        v: values `[B, G, P, T, E]`.
    """

    q: Float[Tensor, "B G #P R T D"]
    k: Float[Tensor, "B G 1 T D"]
    v: Float[Tensor, "B G P T E"]


def group_heads(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G T D"], v: Float[Tensor, "B N T E"]
) -> GroupedHeads:
    """Split heads into key heads and their value heads, after `check_value_heads`.

    >>> q, v = torch.zeros(1, 2, 5, 4), torch.zeros(1, 6, 5, 3)
    >>> [tuple(x.shape) for x in group_heads(q, q, v)]
    [(1, 2, 1, 1, 5, 4), (1, 2, 1, 5, 4), (1, 2, 3, 5, 3)]
    """
    H, G, N = q.shape[1], k.shape[1], v.shape[1]
    if H == G:
        queries = q[:, :, None, None]
    else:
        repeated = q.repeat_interleave(N // H, 1) if H < N else q
        queries = torch.unflatten(torch.unflatten(repeated, 1, (N, -1)), 1, (G, -1))
    return GroupedHeads(queries, k[:, :, None], split_value_heads(v, G))


def split_value_heads(x: Tensor, groups: int) -> Tensor:
    """Split the dimension of N value heads: `[B, N, ...]` to `[B, G, P, ...]`."""
    return torch.unflatten(x, 1, (groups, -1))


def shared_matmul(
    a: Float[Tensor, "B G #P i j"], b: Float[Tensor, "B G P j l"]
) -> Float[Tensor, "B G P i l"]:
    """Return the matrix products a @ b, where the value heads of a key head may share a.

    `torch.matmul` would copy a shared a for each value head; here the columns of b are joined.

    >>> shared_matmul(torch.ones(1, 1, 1, 2, 3), torch.ones(1, 1, 4, 3, 5)).shape
    torch.Size([1, 1, 4, 2, 5])
    """
    if a.shape[2] == 1 and b.shape[2] > 1:
        return torch.einsum("bgij,bgpjl->bgpil", a[:, :, 0], b)
    return a @ b
