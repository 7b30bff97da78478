"""Linear attention, retention and gated linear attention as sums over pairs: Python floats and
loops, nothing of regard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.oracles.heads import dot

Vector = list[float]


class Answer(NamedTuple):
    """out [B,H,T,E], and behind the last token S [B,G,D,E] and z [B,G,D]; float64."""

    out: Tensor
    S: Tensor
    z: Tensor


def _elu_1(x: Vector) -> Vector:
    return [y + 1 if y > 0 else math.exp(y) for y in x]


def _softmax(x: Vector) -> Vector:
    total = math.fsum(math.exp(y - max(x)) for y in x)
    return [math.exp(y - max(x)) / total for y in x]


MAPS: dict[str, Callable[[Vector], Vector]] = {
    "elu+1": _elu_1,
    "exp": lambda x: [math.exp(y) for y in x],
    "identity": lambda x: x,
    "relu": lambda x: [max(y, 0.0) for y in x],
    "relu^2": lambda x: [max(y, 0.0) ** 2 for y in x],
    "softmax": _softmax,
}


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    feature_map: str = "identity",
    normalize: bool = False,
    scale: float = 1.0,
    S: Tensor | None = None,
    z: Tensor | None = None,
    real: Tensor | None = None,
) -> Answer:
    """o_t = sum_j w_tj v_j, w_tj = sum_d phi(q_t)_d phi(k_j)_d a_{j+1,d} ... a_{t,d}; divided by
    sum_j w_tj if normalized.

    log_decay [B,G,T,D], a = exp of it; real [B,T] is False where a slot is no token: there a is 1
    and nothing is written. S [B,G,D,E] and z [B,G,D] stand in front of the first token, like one
    more pair.
    """
    (B, H, T, D), (G, E) = q.shape, (v.shape[1], v.shape[3])
    phi, n = MAPS[feature_map], H // G
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    last, sums = torch.zeros(B, G, D, E).double(), torch.zeros(B, G, D).double()
    for b in range(B):
        tokens = [t for t in range(T) if real is None or bool(real[b, t])]
        for g in range(G):
            row = Row(
                {t: phi(k[b, g, t].tolist()) for t in tokens},
                {t: v[b, g, t].tolist() for t in tokens},
                {
                    t: [0.0] * D if log_decay is None else log_decay[b, g, t].tolist()
                    for t in tokens
                },
                [[0.0] * E] * D if S is None else S[b, g].tolist(),
                [0.0] * D if z is None else z[b, g].tolist(),
            )
            for t in tokens:
                matrix, vector = row.behind(t)
                for h in range(g * n, (g + 1) * n):
                    query = [x * scale for x in phi(q[b, h, t].tolist())]
                    total = dot(query, vector)
                    for e in range(E):
                        found = dot(query, [row[e] for row in matrix])
                        out[b, h, t, e] = (found / total if total else 0.0) if normalize else found
            matrix, vector = row.behind(T)
            last[b, g], sums[b, g] = (
                torch.tensor(x, dtype=torch.float64) for x in (matrix, vector)
            )
    return Answer(out, last, sums)


class Row(NamedTuple):
    """One key/value head of one row of the batch: by token, and what stood in front of the
    first.
    """

    keys: dict[int, Vector]
    values: dict[int, Vector]
    g: dict[int, Vector]
    S: list[Vector]
    z: Vector

    def behind(self, t: int) -> tuple[list[Vector], Vector]:
        """The state behind token t, each number as one sum over all tokens up to it."""
        past = [j for j in self.keys if j <= t]
        matrix, vector = [], []
        for d in range(len(self.z)):
            left = {
                j: math.exp(math.fsum(self.g[i][d] for i in past if i > j)) for j in (-1, *past)
            }
            weights = {j: left[j] * self.keys[j][d] for j in past}
            vector.append(math.fsum([left[-1] * self.z[d], *weights.values()]))
            matrix.append(
                [
                    math.fsum([left[-1] * first, *(weights[j] * self.values[j][e] for j in past)])
                    for e, first in enumerate(self.S[d])
                ]
            )
        return matrix, vector


def retained(
    q: Tensor, k: Tensor, v: Tensor, gamma: Sequence[float], *, scale: float | None = None
) -> Tensor:
    """o_t = scale sum_{j <= t} gamma_h^(t - j) (q_t . k_j) v_j: the parallel form of the paper, H =
    G; float64.
    """
    B, H, T, D = q.shape
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    scale = 1 / math.sqrt(D) if scale is None else scale
    for b in range(B):
        for h in range(H):
            ql, kl, vl = (x[b, h].tolist() for x in (q, k, v))
            for t in range(T):
                for e in range(v.shape[3]):
                    out[b, h, t, e] = scale * math.fsum(
                        gamma[h] ** (t - j) * dot(ql[t], kl[j]) * vl[j][e] for j in range(t + 1)
                    )
    return out


def plain_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *, ahead: bool = False) -> Tensor:
    """The recurrence as somebody would type it, in the dtype of its inputs; H = G.

    With `ahead` each query first gets its part of the new token, then that of the state: another
    order of the same sum.
    """
    S = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    rows = []
    for t in range(q.shape[2]):
        key, value, query = k[:, :, t, :, None], v[:, :, t, None], q[:, :, t, None]
        S = S if g is None else S * torch.exp(g[:, :, t, :, None])
        if ahead:
            rows.append((query @ key) * value + query @ S)
            S = S + key * value
        else:
            S = S + key * value
            rows.append(query @ S)
    return torch.cat(rows, 2)


def plain_matrix(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *, differences: bool = False
) -> Tensor:
    """All weights, then times values, as somebody would type it, in the dtype of its inputs; H = G.

    With `differences`, decays come from differences of one running sum: exact only relative to that
    sum, a known mistake.
    """
    T = q.shape[2]
    products = q[:, :, :, None] * k[:, :, None]  # [B,H,T,T,D]
    if g is not None:
        total, left = g.cumsum(2), torch.zeros_like(products)
        for i in range(T):
            for j in range(i + 1):
                between = (
                    total[:, :, i] - total[:, :, j]
                    if differences
                    else g[:, :, j + 1 : i + 1].sum(2)
                )
                left[:, :, i, j] = torch.exp(between)
        products = products * left
    return products.sum(-1).tril() @ v
