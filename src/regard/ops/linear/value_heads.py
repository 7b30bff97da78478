"""The heads of a recurrence that has more value heads than key heads.

With H query, G key and N value heads, each value head has a state. Value head h uses key head h //
(N/G), and output o of O = max(H, N) reads state o // (O/N) with query head o // (O/H), as in
Qwen3-Next (16 query and key heads, 32 value heads).

Inside, tensors have G key heads and P = N/G value heads as two dimensions, of which the second is 1
where it is shared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class GroupedHeads(NamedTuple):
    """Queries, keys and values with the value heads of a key head as a dimension.

    Attributes:
        q: queries `[B, G, P or 1, R, T, D]`, where R query heads read each state.
        k, v: `[B, G, 1, T, D]` and `[B, G, P, T, E]`.
    """

    q: Float[Tensor, "B G #P R T D"]
    k: Float[Tensor, "B G 1 T D"]
    v: Float[Tensor, "B G P T E"]


def group_heads(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G T D"], v: Float[Tensor, "B N T E"]
) -> GroupedHeads:
    """Split heads into key heads and their value heads, after `check_value_heads`."""
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

    `torch.matmul` would copy a shared a for each value head.
    """
    if a.shape[2] == 1 and b.shape[2] > 1:
        return torch.einsum("bgij,bgpjl->bgpil", a[:, :, 0], b)
    return a @ b
