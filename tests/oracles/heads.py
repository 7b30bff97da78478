"""Vectors, one row of attention, and steps on heads and on their results in plain loops over Python
floats, without code of the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def times(matrix: Sequence[Vector], x: Vector) -> list[float]:
    """W x."""
    return [dot(row, x) for row in matrix]


def normed(x: Vector, weight: Vector, eps: float = 1e-6) -> list[float]:
    """x / rms(x) * weight."""
    rms = math.sqrt(dot(x, x) / len(x) + eps)
    return [y / rms * w for y, w in zip(x, weight, strict=True)]


def attention_row(q: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> list[float]:
    """Softmax attention of one query to all these keys, scale 1/sqrt(D)."""
    scores = [dot(q, k) / math.sqrt(len(q)) for k in keys]
    return weighted(scores, values)


def weighted(scores: Vector, values: Sequence[Vector]) -> list[float]:
    """The values, weighted by the softmax of the scores."""
    largest = max(scores)
    weights = [math.exp(s - largest) for s in scores]
    total = sum(weights)
    return [
        sum(w * v[e] for w, v in zip(weights, values, strict=True)) / total
        for e in range(len(values[0]))
    ]


def without_own_value(z: Vector, v: Vector, share: float = 1.0) -> list[float]:
    """z - share (z . v̂) v̂."""
    length = math.sqrt(dot(v, v))
    unit = [x / length for x in v]
    along = dot(z, unit)
    return [x - share * along * u for x, u in zip(z, unit, strict=True)]


def rotated(x: Vector, position: float, frequencies: Vector) -> list[float]:
    """Rotary positions in the layout "half": pair i is (i, i + n)."""
    out, n = list(x), len(frequencies)
    for i, f in enumerate(frequencies):
        a, b, angle = x[i], x[i + n], position * f
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + n] = b * math.cos(angle) + a * math.sin(angle)
    return out


def turned(x: Vector, position: float, base: float = 10000.0) -> list[float]:
    """The same with frequencies base^(-2i/d)."""
    return rotated(x, position, [base ** (-2 * i / len(x)) for i in range(len(x) // 2)])


def temperature(form: str, i: int, scale: float, length: float) -> float:
    """The factor of the query at position i, from the code of each model."""
    if form == "llama4":
        return 1 + scale * math.log(math.floor((i + 1) / length) + 1)
    if form == "ministral3":
        return 1 + scale * math.log(math.floor(i / length) + 1)
    if form == "inkling":
        return 1 + scale * math.log(max(1.0, (i + 1) / length))
    assert form == "beam"
    return ((i + 1) / length + 1) ** scale
