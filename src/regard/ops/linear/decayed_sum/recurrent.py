"""The decayed sum as it is defined: one token after the other."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def recurrent(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    log_decay: Float[Tensor, "#B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Decay the state, write the token, answer the queries.

    S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = S^T q_t

    Args:
        q: the R queries of each key/value head, scaled; all tensors in the dtype of the state.
        k, v: keys and values.
        log_decay: g, one number per key channel, or one for all of them; None is 0 everywhere.
        state: S in front of the first token; it is not changed.

    >>> k, v = torch.tensor([[1.0], [1.0]])[None, None], torch.tensor([[3.0], [5.0]])[None, None]
    >>> half = torch.full((1, 1, 2, 1), 0.5).log()
    >>> recurrent(k[:, :, None], k, v, half, torch.zeros(1, 1, 1, 1))[0].flatten().tolist()
    [3.0, 6.5]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 to 20; with decay: Yang et al. 2023
    (arXiv 2312.06635), equation 3.
    """
    S, answers = state.clone(), []
    for t in range(k.shape[2]):
        if log_decay is not None:
            S = S * log_decay[:, :, t, :, None].exp()
        S = S + k[:, :, t, :, None] * v[:, :, t, None]
        answers.append(q[:, :, :, t] @ S)  # [B,G,R,E]
    return (torch.stack(answers, 3) if answers else q @ S[:, :, None]), S
