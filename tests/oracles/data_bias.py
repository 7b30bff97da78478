"""Biases from data and from distances, from their definitions: loops over single numbers of type
float, and nothing of regard.
"""

from __future__ import annotations

import math

from tests.oracles.heads import dot

Vector = list[float]
Matrix = list[Vector]


def forget(log_gates: Vector, i: int, j: int) -> float:
    """The logarithm of the product of the gates after key j up to query i."""
    if j <= i:
        return math.fsum(log_gates[j + 1 : i + 1])
    return -math.fsum(log_gates[i + 1 : j + 1])


def log_sigmoid(f: float) -> float:
    return -math.log1p(math.exp(-f)) if f > 0 else f - math.log1p(math.exp(f))


def kerple(r1: float, r2: float, i: int, j: int) -> float:
    return -abs(r1) * math.log(1 + abs(r2) * abs(i - j))


def fire_argument(c: float, L: float, i: int, j: int) -> float:
    return math.log(abs(c) * abs(i - j) + 1) / math.log(abs(c) * max(i, abs(L)) + 1)


def fire(
    c: float, L: float, w1: Vector, b1: Vector, w2: Vector, b2: float, i: int, j: int
) -> float:
    x = fire_argument(c, L, i, j)
    hidden = [max(0.0, w * x + b) for w, b in zip(w1, b1, strict=True)]
    return dot(w2, hidden) + b2


def shaw(q: Vector, vectors: Matrix, left: int, right: int, i: int, j: int) -> float:
    """vectors[n] belongs to the distance j - i = right - n."""
    distance = max(-left, min(right, j - i))
    return dot(q, vectors[right - distance]) / math.sqrt(len(q))


def relative(profile: Vector, i: int, j: int) -> float:
    return profile[i - j] if 0 <= i - j < len(profile) else 0.0


def sinusoid(
    q: Vector, u: Vector, w: Vector, k: Vector, W: Matrix, base: float, i: int, j: int
) -> float:
    """What Transformer-XL adds to q . k, without the scale: u . k + (q + w) . W r[i - j]."""
    size = len(W[0])
    angles = [(i - j) / base ** (2 * m / size) for m in range(size // 2)]
    r = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    mapped = [dot(row, r) for row in W]
    return dot(u, k) + dot([a + b for a, b in zip(q, w, strict=True)], mapped)


def deberta_bucket(distance: int, buckets: int, longest: int) -> int:
    m = buckets // 2
    d = abs(distance)
    if d > m:
        d = m + math.ceil(math.log(d / m) / math.log((longest - 1) / m) * (m - 1))
    return d if distance >= 0 else -d


def disentangled(
    q: Vector, k: Vector, K: Matrix, Q: Matrix, buckets: int, longest: int, i: int, j: int
) -> float:
    """q . K_r[d(i - j)] + k . Q_r[d(i - j)], without the scale."""
    bucket = min(max(deberta_bucket(i - j, buckets, longest) + buckets, 0), 2 * buckets - 1)
    return dot(q, K[bucket]) + dot(k, Q[bucket])


def importance(v: Vector, w: Vector, a: float) -> float:
    """exp(a softplus(w . v))."""
    x = dot(w, v)
    return math.exp(a * (max(x, 0) + math.log1p(math.exp(-abs(x)))))


def path_scores(q: Matrix, k: Matrix, w: Matrix, beta: Vector) -> Matrix:
    """q_i^T H_i ... H_{j+1} k_j for j <= i: the key is reflected by one token after the other."""
    rows = []
    for i, query in enumerate(q):
        row = []
        for j in range(i + 1):
            key = list(k[j])
            for t in range(j + 1, i + 1):
                part = beta[t] * dot(w[t], key)
                key = [x - part * y for x, y in zip(key, w[t], strict=True)]
            row.append(dot(query, key))
        rows.append(row)
    return rows


def selective(q: Matrix, k: Matrix) -> Matrix:
    """What tokens before query i take from key j <= i; a token takes nothing from itself, nor from
    the first one.
    """
    scale = 1 / math.sqrt(len(q[0]))
    return [
        [
            -math.fsum(max(0.0, scale * dot(q[m], k[j])) for m in range(j + 1, i)) if j else 0.0
            for j in range(i + 1)
        ]
        for i in range(len(q))
    ]
