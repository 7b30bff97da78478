"""Mixture of experts and block formats from their definitions: Python floats and loops, and nothing
of regard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Row = list[float]


def linear(w: Sequence[Row], x: Row, b: Row | None = None) -> Row:
    return [
        math.fsum([*(c * a for c, a in zip(row, x, strict=True)), 0.0 if b is None else b[i]])
        for i, row in enumerate(w)
    ]


def softmax(logits: Row) -> Row:
    most = max(logits)
    parts = [math.exp(x - most) for x in logits]
    return [x / math.fsum(parts) for x in parts]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def best(scores: Row, k: int, among: Sequence[int] | None = None) -> list[int]:
    """The places of the k largest, the best first, of equal ones the first."""
    places = range(len(scores)) if among is None else among
    return sorted(places, key=lambda i: (-scores[i], i))[:k]


def in_groups(scores: Row, count: int, kept: int, speak: int) -> list[int]:
    """The experts of the groups whose `speak` best scores sum highest."""
    size = len(scores) // count
    groups = [scores[g * size : (g + 1) * size] for g in range(count)]
    totals = [math.fsum(sorted(group, reverse=True)[:speak]) for group in groups]
    chosen = set(best(totals, kept))
    return [e for e in range(len(scores)) if e // size in chosen]


def softmax_routing(
    logits: Row, k: int, *, normalize: bool, scale: float, groups: tuple[int, int, int] | None
) -> dict[int, float]:
    """Expert -> weight: softmax over all, choose, and divide by the sum of the chosen if asked
    to.
    """
    shares = softmax(logits)
    among = None if groups is None else in_groups(shares, *groups)
    chosen = best(logits, k, among)
    total = math.fsum(shares[e] for e in chosen) if normalize else 1.0
    return {e: scale * shares[e] / total for e in chosen}


def sigmoid_routing(
    logits: Row,
    correction: Row,
    k: int,
    *,
    normalize: bool,
    scale: float,
    groups: tuple[int, int, int] | None,
) -> dict[int, float]:
    """Expert -> weight: scores of their own, corrected for the choice alone."""
    scores = [sigmoid(x) for x in logits]
    corrected = [s + c for s, c in zip(scores, correction, strict=True)]
    among = None if groups is None else in_groups(corrected, *groups)
    chosen = best(corrected, k, among)
    total = math.fsum(scores[e] for e in chosen) + 1e-20 if normalize else 1.0
    return {e: scale * scores[e] / total for e in chosen}


def swiglu(x: Row, gate: list[Row], up: list[Row], down: list[Row]) -> Row:
    hidden = [g * sigmoid(g) * u for g, u in zip(linear(gate, x), linear(up, x), strict=True)]
    return linear(down, hidden)


def clipped_swiglu(
    x: Row, weights: dict[str, list[Row]], biases: dict[str, Row], limit: float, alpha: float
) -> Row:
    hidden = []
    for g, u in zip(
        linear(weights["gate"], x, biases["gate"]),
        linear(weights["up"], x, biases["up"]),
        strict=True,
    ):
        g, u = min(g, limit), max(-limit, min(u, limit))
        hidden.append((u + 1) * g * sigmoid(alpha * g))
    return linear(weights["down"], hidden, biases["down"])


def mixture(
    x: Row,
    routing: dict[int, float],
    experts: Sequence[Callable[[Row], Row]],
    shared: Callable[[Row], Row] | None = None,
) -> Row:
    parts = [[w * y for y in experts[e](x)] for e, w in routing.items()]
    if shared is not None:
        parts.append(shared(x))
    return [math.fsum(column) for column in zip(*parts, strict=True)]


def e2m1(nibble: int) -> float:
    """A sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if nibble & 8 else size


def mxfp4_row(blocks: list[list[int]], scales: list[int]) -> Row:
    """Blocks [G][16] of bytes and scales [G] -> 32 G numbers."""
    out = []
    for block, s in zip(blocks, scales, strict=True):
        factor = math.nan if s == 255 else 2.0 ** (s - 127)
        for byte in block:
            out += [e2m1(byte & 15) * factor, e2m1(byte >> 4) * factor]
    return out


def e4m3(byte: int) -> float:
    """A sign, four bits of exponent with bias 7, three of mantissa; no infinities, and two NaN."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def fp8(weight: list[list[int]], scale_inv: list[Row], block: int) -> list[Row]:
    return [
        [e4m3(byte) * scale_inv[i // block][j // block] for j, byte in enumerate(row)]
        for i, row in enumerate(weight)
    ]
