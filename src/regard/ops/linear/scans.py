"""Running maxima, sums and log-sum-exps in which each token decays what came before it.

Each is computed over all tokens at once, in log2(T) steps that join neighbouring spans. A token
reads only earlier ones, so that NaN never reaches an earlier token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

FLOOR = -1e30
"""A finite number that stands for the logarithm of 0: its difference from itself is not NaN."""


def _earlier(x: Tensor, step: int, fill: float) -> Tensor:
    """Return x `[..., T, d]` as it was `step` tokens before; `fill` before the first token."""
    return torch.cat([torch.full_like(x[..., :step, :], fill), x[..., :-step, :]], -2)


def running_maximum(
    log_decay: Float[Tensor, "*L T d"], x: Float[Tensor, "*L T d"]
) -> Float[Tensor, "*L T d"]:
    """Return m_t = max(g_t + m_{t-1}, x_t), where m before the first token is minus infinity.

    >>> g, x = torch.tensor([[0.0], [-1.0], [-1.0]]), torch.tensor([[5.0], [1.0], [9.0]])
    >>> running_maximum(g, x).flatten().tolist()
    [5.0, 4.0, 9.0]
    """
    step = 1
    while step < x.shape[-2]:
        x = torch.maximum(x, log_decay + _earlier(x, step, FLOOR))
        log_decay = log_decay + _earlier(log_decay, step, 0.0)
        step *= 2
    return x


def decayed_sum(
    decay: Float[Tensor, "*L T d"], x: Float[Tensor, "*L T e"]
) -> Float[Tensor, "*L T e"]:
    """Return s_t = a_t s_{t-1} + x_t, where s before the first token is 0.

    >>> decayed_sum(torch.full((3, 1), 0.5), torch.ones(3, 1)).flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    step = 1
    while step < x.shape[-2]:
        x = x + decay * _earlier(x, step, 0.0)
        decay = decay * _earlier(decay, step, 1.0)
        step *= 2
    return x


def running_log_sum_exp(x: Float[Tensor, "*L T d"]) -> Float[Tensor, "*L T d"]:
    """Return log(exp(x_1) + ... + exp(x_t)) for each token t.

    >>> running_log_sum_exp(torch.zeros(4, 1)).exp().round(decimals=5).flatten().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    step = 1
    while step < x.shape[-2]:
        x = torch.logaddexp(x, _earlier(x, step, FLOOR))
        step *= 2
    return x
