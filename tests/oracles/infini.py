"""Infini-attention and StreamingLLM from their definitions: Python floats and loops, and nothing of
regard.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.heads import attention_row, dot, turned

Vector = list[float]
Matrix = list[Vector]


def sigma(x: float) -> float:
    return x + 1 if x > 0 else math.exp(x)


class Store:
    """M and z of one key/value head."""

    def __init__(self, D: int, E: int) -> None:
        self.M = [[0.0] * E for _ in range(D)]
        self.z = [0.0] * D

    def read(self, query: Vector) -> Vector | None:
        """sigma(q) M / sigma(q) z; None when nothing was written."""
        if not any(self.z):
            return None
        f = [sigma(x) for x in query]
        below = dot(f, self.z)
        return [dot(f, [row[e] for row in self.M]) / below for e in range(len(self.M[0]))]

    def write(self, keys: Matrix, values: Matrix, update: str) -> None:
        """One segment: all keys read before the first one is written."""
        written = []
        for key, value in zip(keys, values, strict=True):
            old = self.read(key) if update == "delta" else None
            written.append([a - b for a, b in zip(value, old, strict=True)] if old else value)
        for key, value in zip(keys, written, strict=True):
            for d, x in enumerate(key):
                self.z[d] += sigma(x)
                for e, y in enumerate(value):
                    self.M[d][e] += sigma(x) * y


def infini(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    segment: int,
    *,
    q_rotated: Tensor | None = None,
    k_rotated: Tensor | None = None,
    update: str = "linear",
    empty: str = "zero",
    positions: list[list[int]] | None = None,
    retrieve_first: bool = True,
) -> Tensor:
    """Segment by segment, head by head, query by query; `retrieve_first=False` is the bug of
    writing before reading.
    """
    (B, H, T, D), (_, G, _, E) = q.shape, v.shape
    ql, kl, vl = (x.detach().double().tolist() for x in (q, k, v))
    qr = ql if q_rotated is None else q_rotated.detach().double().tolist()
    kr = kl if k_rotated is None else k_rotated.detach().double().tolist()
    gates = gate.detach().double().tolist()
    where = positions or [list(range(T))] * B
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    for b in range(B):
        slot_at = {p: i for i, p in enumerate(where[b]) if p >= 0}
        segments: dict[int, list[int]] = {}
        for p in sorted(slot_at):
            segments.setdefault(p // segment, []).append(slot_at[p])
        for g in range(G):
            store = Store(D, E)
            for slots in segments.values():
                keys, values = [kl[b][g][i] for i in slots], [vl[b][g][i] for i in slots]
                if not retrieve_first:
                    store.write(keys, values, update)
                for h in range(g * (H // G), (g + 1) * (H // G)):
                    share = 1 / (1 + math.exp(-gates[h])) if gates[h] > -700 else 0.0
                    for n, i in enumerate(slots):
                        near = [kr[b][g][j] for j in slots[: n + 1]]
                        local = attention_row(qr[b][h][i], near, values[: n + 1])
                        far = store.read(ql[b][h][i])
                        mine = 0.0 if far is None and empty == "skip" else share
                        far = far or [0.0] * E
                        out[b, h, i] = torch.tensor(
                            [mine * x + (1 - mine) * y for x, y in zip(far, local, strict=True)],
                            dtype=torch.float64,
                        )
                if retrieve_first:
                    store.write(keys, values, update)
    return out


def streaming(
    q: Tensor, k: Tensor, v: Tensor, sinks: int, recent: int, base: float, **wrong: Any
) -> Tensor:
    """Token by token, as the paper does it: append to the cache, evict, number the slots from 0,
    rotate all, attend.

    q [T][H][D], k [T][G][D], v [T][G][E], none of them rotated. `original=True` leaves positions as
    they were.
    """
    (T, H, _), (_, G, E) = q.shape, v.shape
    ql, kl, vl = (x.detach().double().tolist() for x in (q, k, v))
    out = torch.zeros(T, H, E, dtype=torch.float64)
    cache: list[int] = []
    for t in range(T):
        cache.append(t)
        if len(cache) > sinks + recent:
            del cache[sinks]
        place = {j: (j if wrong.get("original") else slot) for slot, j in enumerate(cache)}
        for h in range(H):
            g = h // (H // G)
            keys = [turned(kl[j][g], place[j], base) for j in cache]
            query = turned(ql[t][h], place[t], base)
            mean = attention_row(query, keys, [vl[j][g] for j in cache])
            out[t, h] = torch.tensor(mean, dtype=torch.float64)
    return out
