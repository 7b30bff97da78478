"""The decayed sum in the form that a call asks for."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.linear.call import chunk_of
from regard.ops.linear.decayed_sum.chunk import chunked
from regard.ops.linear.decayed_sum.recurrent import recurrent


def decayed_sum(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
    *,
    form: str,
    chunk: int,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G D E"]]:
    """S <- diag(exp(g)) S + k v^T, o = S^T q, in the dtype of the state; query head h reads state h // (H/G).

    >>> k = torch.ones(1, 1, 3, 1)
    >>> decayed_sum(k, k, k, None, torch.zeros(1, 1, 1, 1), form="auto", chunk=64)[0].flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    G, T = k.shape[1:3]
    queries = q.unflatten(1, (G, -1)).to(state.dtype)
    k, v = k.to(state.dtype), v.to(state.dtype)
    g = None if log_decay is None else log_decay.to(state.dtype)
    size = chunk_of(form, chunk, T)
    with torch.autocast(q.device.type, enabled=False):
        if size is None:
            out, state = recurrent(queries, k, v, g, state)
        else:
            out, state = chunked(queries, k, v, g, state, size)
    return out.flatten(1, 2), state
