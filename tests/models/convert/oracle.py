"""One attention layer of a checkpoint, from the definition, by loops over heads and positions in
fp64 numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float64]


def maps(block: Any) -> dict[str, Array]:
    """q [H,D,M], k [G,D,M], v [G,E,M], o [M,H,E], as the parameters have them; biases are left
    out.
    """
    project, found = block.attention.project, {}
    for name in "qkv":
        heads = getattr(project, name)
        weight = heads.linear.weight.detach().double().numpy()
        found[name] = weight.reshape(heads.heads, heads.head_dim, -1)
    H = project.q.heads
    o = block.attention.output.weight.detach().double().numpy()
    return found | {"o": o.reshape(o.shape[0], H, -1)}


def gain(block: Any) -> Array:
    return np.asarray(block.attention_residual.norm.weight.detach().double().numpy())


def turned(x: Array, position: int, freq: Array, layout: str) -> Array:
    """A head turned by its position, pair by pair."""
    y, n = x.copy(), len(freq)
    for i in range(n):
        a, b = (i, i + n) if layout == "half" else (2 * i, 2 * i + 1)
        c, s = np.cos(position * freq[i]), np.sin(position * freq[i])
        y[a], y[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return y


def attention(
    x: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    *,
    freq: Array,
    layout: str = "half",
    scale: float | None = None,
) -> Array:
    """x [T,M] -> [T,M]: causal, query head h reads key/value head h // (H/G)."""
    T, H, D = len(x), len(q), q.shape[1]
    scale = D**-0.5 if scale is None else scale
    out = np.zeros_like(x)
    for h in range(H):
        g = h // (H // len(k))
        keys = [turned(k[g] @ x[s], s, freq, layout) for s in range(T)]
        for t in range(T):
            query = turned(q[h] @ x[t], t, freq, layout)
            scores = np.array([scale * float(query @ keys[s]) for s in range(t + 1)])
            p = np.exp(scores - scores.max())
            p /= p.sum()
            z = sum(p[s] * (v[g] @ x[s]) for s in range(t + 1))
            out[t] += o[:, h] @ z
    return out


def set_maps(block: Any, **given: Array) -> None:
    """Write maps into a block's parameters."""
    import torch

    for name, value in given.items():
        if name == "o":
            target: nn.Parameter = block.attention.output.weight
            rows = value.reshape(len(value), -1)
        else:
            target = getattr(block.attention.project, name).linear.weight
            rows = value.reshape(-1, value.shape[-1])
        target.data = torch.from_numpy(np.ascontiguousarray(rows)).to(target.dtype)
