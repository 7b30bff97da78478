"""The fixed example of the mechanisms: one head, four tokens, from formulas anyone can type.

q[t, d] = sin(t + 2d + 1), k[t, d] = cos(2t + d), v[t, e] = sin(3t + e + 1), g[t, d] = -(t + 1)
(d + 1) / 10, beta[t] = 1 / (t + 2), w[t, d] = cos(t - d); D = 3, E = 2, all in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def example(T: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [1,1,T,3] and v [1,1,T,2]."""
    t, d, e = torch.arange(float(T)).double()[:, None], torch.arange(3), torch.arange(2)
    return (
        torch.sin(t + 2 * d + 1)[None, None],
        torch.cos(2 * t + d)[None, None],
        torch.sin(3 * t + e + 1)[None, None],
    )


def decays(T: int = 4, *, channels: bool = False) -> Tensor:
    """g [1,1,T] or [1,1,T,3]."""
    t = torch.arange(float(T)).double()
    if not channels:
        return (-(t + 1) / 10)[None, None]
    return (-(t[:, None] + 1) * (torch.arange(3) + 1) / 10)[None, None]


def strengths(T: int = 4) -> Tensor:
    """beta [1,1,T]."""
    return (1 / (torch.arange(float(T)).double() + 2))[None, None]


def vectors(T: int = 4) -> Tensor:
    """w [1,1,T,3]."""
    return torch.cos(torch.arange(float(T)).double()[:, None] - torch.arange(3))[None, None]
