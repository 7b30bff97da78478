"""Attention with factored, tied or grouped memory from the papers' equations: Python floats and
loops, and nothing of regard. Every function takes one sequence x [T][M] at positions 0, 1, ...
"""

from __future__ import annotations

import math

from tests.oracles.heads import attention_row, normed, times

Vector = list[float]
Matrix = list[Vector]


def turned(x: Vector, position: int, *, interleaved: bool = False) -> Vector:
    """Pairs turned by position * 10000^(-2i/d): (i, i + d/2), or (2i, 2i + 1)."""
    d, out = len(x), list(x)
    for i in range(d // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        angle = position * 10000.0 ** (-2 * i / d)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def products(
    x: Vector, a: Matrix, b: Matrix, heads: int, rank: int, position: int | None
) -> Matrix:
    """Heads 1/R sum_r a_rh b_r; row r H + h of W_A gives a_rh, and D rows of W_B give b_r."""
    first, second = times(a, x), times(b, x)
    D = len(second) // rank
    factors = [second[r * D : (r + 1) * D] for r in range(rank)]
    if position is not None:
        factors = [turned(y, position) for y in factors]
    return [
        [
            math.fsum(first[r * heads + h] * factors[r][d] for r in range(rank)) / rank
            for d in range(D)
        ]
        for h in range(heads)
    ]


def tensor_products(x: Matrix, w: dict[str, Matrix], heads: int, q_rank: int, rank: int) -> Matrix:
    """TPA: arXiv 2501.06425, section 3, with the factor 1/R of its code."""
    sides = [
        [products(y, w["qa"], w["qb"], heads, q_rank, t) for t, y in enumerate(x)],
        [products(y, w["ka"], w["kb"], heads, rank, t) for t, y in enumerate(x)],
        [products(y, w["va"], w["vb"], heads, rank, None) for y in x],
    ]
    q, k, v = sides
    out = []
    for i in range(len(x)):
        z = [
            y
            for h in range(heads)
            for y in attention_row(
                q[i][h], [k[j][h] for j in range(i + 1)], [v[j][h] for j in range(i + 1)]
            )
        ]
        out.append(times(w["out"], z))
    return out


def low_rank_queries(x: Matrix, w: dict[str, Matrix], norm: Vector, heads: int) -> Matrix:
    """MFA: arXiv 2412.19255, section 3.2: one key and value head."""
    k = [turned(times(w["k"], y), t) for t, y in enumerate(x)]
    v = [times(w["v"], y) for y in x]
    D, out = len(k[0]), []
    for i, y in enumerate(x):
        q = times(w["up"], normed(times(w["down"], y), norm))
        z: Vector = []
        for h in range(heads):
            z += attention_row(turned(q[h * D : (h + 1) * D], i), k[: i + 1], v[: i + 1])
        out.append(times(w["out"], z))
    return out


def tied(x: Matrix, w: dict[str, Matrix], heads: int, groups: int) -> Matrix:
    """GTA: arXiv 2505.21487, section 3.3.1: key = [first half of the value, rotated half]."""
    D = len(w["v"]) // groups
    half, out = D // 2, []
    values = [times(w["v"], y) for y in x]
    rotated = [turned(times(w["r"], y), t) for t, y in enumerate(x)]
    for i, y in enumerate(x):
        q, z = times(w["q"], y), []
        for h in range(heads):
            g = h // (heads // groups)
            v = [value[g * D : (g + 1) * D] for value in values[: i + 1]]
            k = [a[:half] + b for a, b in zip(v, rotated, strict=False)]
            own = q[h * D : (h + 1) * D]
            z += attention_row(own[:half] + turned(own[half:], i), k, v)
        out.append(times(w["out"], z))
    return out


def grouped_latents(
    x: Matrix,
    w: dict[str, Matrix],
    norms: Matrix,
    ups: list[Matrix],
    *,
    heads: int,
    branches: int,
    nope: int,
    rope: int,
    value: int,
) -> Matrix:
    """Grouped latents and MLRA: branch j and head h read latent (j H + h) // (b H / n)."""
    n = len(ups)
    r, each, width = len(norms[1]), branches * heads // n, nope + value
    down = [times(w["down"], y) for y in x]
    shared = [turned(y[n * r :], t, interleaved=True) for t, y in enumerate(down)]
    latents = [[normed(y[i * r : (i + 1) * r], norms[1 + i]) for i in range(n)] for y in down]
    expanded = [[times(ups[i], c[i]) for i in range(n)] for c in latents]
    out = []
    for t, y in enumerate(x):
        q, z = times(w["q_up"], normed(times(w["q_down"], y), norms[0])), []
        for h in range(heads):
            own = q[h * (nope + rope) : (h + 1) * (nope + rope)]
            own = own[:nope] + turned(own[nope:], t, interleaved=True)
            total = [0.0] * value
            for j in range(branches):
                i, place = divmod(j * heads + h, each)
                rows = [e[i][place * width : (place + 1) * width] for e in expanded[: t + 1]]
                keys = [row[:nope] + rotated for row, rotated in zip(rows, shared, strict=False)]
                found = attention_row(own, keys, [row[nope:] for row in rows])
                total = [a + b / math.sqrt(branches) for a, b in zip(total, found, strict=True)]
            z += total
        out.append(times(w["out"], z))
    return out
