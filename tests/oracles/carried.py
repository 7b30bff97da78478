"""The time mixing of RWKV-7 in plain loops over tokens, heads and channels, from the paper (Peng et
al. 2025, arXiv 2503.14456): nothing of regard's code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def rwkv7_layer(m: Any, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """One layer over one text x [T, M], with the parameters of m; the result [T, M], and the values
    [H, T, D] of the tokens, which the first layer gives to the later ones.
    """
    T = len(x)
    H, D = m.bonus.shape
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])

    def mixed(share: Tensor) -> Tensor:
        return share * x + (1 - share) * before

    def heads(y: Tensor) -> Tensor:
        return y.reshape(T, H, D)

    def narrow(part: Any, share: Tensor, f: Any) -> Tensor:
        return heads(f(mixed(share) @ part.down.weight.mT) @ part.linear.weight.mT)

    same = lambda y: y  # noqa: E731
    q = heads(mixed(m.mix_q) @ m.q.linear.weight.mT)
    k = heads(mixed(m.mix_k) @ m.k.linear.weight.mT)
    v = heads(mixed(m.mix_v) @ m.v.linear.weight.mT)
    d = narrow(m.decay, m.mix_decay, torch.tanh)
    a = narrow(m.rate, m.mix_rate, same)
    g = narrow(m.gate, m.mix_gate, torch.sigmoid)
    out = torch.zeros(T, H * D, dtype=torch.float64)
    values = torch.zeros(H, T, D, dtype=torch.float64)
    for h in range(H):
        S = [[0.0] * D for _ in range(D)]  # S[key channel][value channel]
        for t in range(T):
            removal = [float(k[t, h, i] * m.removal_scale[h, i]) for i in range(D)]
            size = math.sqrt(sum(r * r for r in removal))
            removal = [r / size for r in removal]
            rate = [_sigmoid(float(m.rate_bias[h, i] + a[t, h, i])) for i in range(D)]
            write = [
                float(k[t, h, i]) * (1 + (rate[i] - 1) * float(m.rate_scale[h, i]))
                for i in range(D)
            ]
            # log w = -exp(-softplus(-y) - 1/2), as the released code writes it
            logits = [float(m.decay_bias[h, i] + d[t, h, i]) for i in range(D)]
            decay = [math.exp(-math.exp(-math.log1p(math.exp(-y)) - 0.5)) for y in logits]
            own = [float(v[t, h, e]) for e in range(D)]
            if first is not None:
                low = mixed(m.mix_v)[t] @ m.first_share.down.weight.mT
                shares = low @ m.first_share.linear.weight.mT
                for e in range(D):
                    s = _sigmoid(float(m.first_share_bias[h, e] + shares[h * D + e]))
                    own[e] = own[e] + s * (float(first[h, t, e]) - own[e])
            values[h, t] = torch.tensor(own, dtype=torch.float64)
            held = [sum(S[i][e] * removal[i] for i in range(D)) for e in range(D)]
            S = [
                [
                    decay[i] * S[i][e] - removal[i] * rate[i] * held[e] + write[i] * own[e]
                    for e in range(D)
                ]
                for i in range(D)
            ]
            z = [sum(S[i][e] * float(q[t, h, i]) for i in range(D)) for e in range(D)]
            mean = sum(z) / D
            spread = math.sqrt(sum((y - mean) ** 2 for y in z) / D + m.norm.eps)
            itself = sum(float(q[t, h, i] * m.bonus[h, i]) * write[i] for i in range(D))
            for e in range(D):
                y = (z[e] - mean) / spread * float(m.norm.weight[h, e]) + float(m.norm.bias[h, e])
                out[t, h * D + e] = (y + itself * own[e]) * float(g[t, h, e])
    return out @ m.output.weight.mT, values
