"""The delta rule as it is defined: one token after the other."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def recurrent(
    q: Float[Tensor, "B G R T D"],
    k: Float[Tensor, "B G T D"],
    v: Float[Tensor, "B G T E"],
    beta: Float[Tensor, "B G T 1"],
    log_decay: Float[Tensor, "B G T #D"] | None,
    state: Float[Tensor, "B G D E"],
) -> tuple[Float[Tensor, "B G R T E"], Float[Tensor, "B G D E"]]:
    """Decay the state, read what it holds under the key, write the difference, answer the queries.

    S <- diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = S^T q_t

    Args:
        q: the R queries of each key/value head, scaled; all tensors in the dtype of the state.
        k, v, beta: keys, values and writing strengths.
        log_decay: g, one number per key channel, or one for all of them; None is 0 everywhere.
        state: S in front of the first token; it is not changed.

    >>> k = torch.eye(2)[None, None]
    >>> v = torch.tensor([[3.0], [5.0]])[None, None]
    >>> out, state = recurrent(k[:, :, None], k, v, torch.ones(1, 1, 2, 1), None, torch.zeros(1, 1, 2, 1))
    >>> state.flatten().tolist()  # two orthogonal keys: both values are held exactly
    [3.0, 5.0]

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 2; with decay: Yang et al. 2024 (arXiv 2412.06464), equation 10;
    a decay per channel: Kimi Team 2025 (arXiv 2510.26692), equation 1.
    """
    S, answers = state.clone(), []
    for t in range(k.shape[2]):
        key = k[:, :, t, :, None]  # [B,G,D,1]
        if log_decay is not None:
            S = S * log_decay[:, :, t, :, None].exp()
        held = key.transpose(-1, -2) @ S  # [B,G,1,E]
        S = S + key * (beta[:, :, t, None] * (v[:, :, t, None] - held))
        answers.append(q[:, :, :, t] @ S)  # [B,G,R,E]
    return (torch.stack(answers, 3) if answers else q @ S[:, :, None]), S
