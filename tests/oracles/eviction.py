"""Attention with a cache that evicts, token by token, from the papers' definitions: Python floats
and loops, and nothing of regard. One head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.oracles.heads import turned

Vector = list[float]
Matrix = list[Vector]
Score = Callable[["Run"], list[float]]


class Run:
    """A head that reads one token after the other.

    Attributes:
        held: the positions in the cache, in order.
        sums: for each of them the weights of all queries so far.
    """

    def __init__(self, q: Matrix, k: Matrix, v: Matrix, scale: float | None = None) -> None:
        self.q, self.k, self.v = q, k, v
        self.scale = 1 / math.sqrt(len(k[0])) if scale is None else scale
        self.held: list[int] = []
        self.sums: list[float] = []

    def weights(self, i: int) -> list[float]:
        """The weights of query i on the held tokens up to itself; 0 on later ones."""
        s = [
            self.scale * math.fsum(a * b for a, b in zip(self.q[i], self.k[j], strict=True))
            for j in self.held
        ]
        seen = [x for x, j in zip(s, self.held, strict=True) if j <= i]
        top = max(seen)
        total = math.fsum(math.exp(x - top) for x in seen)
        return [
            math.exp(x - top) / total if j <= i else 0.0 for x, j in zip(s, self.held, strict=True)
        ]

    def read(self, i: int) -> Vector:
        """Add token i, and return the output of its query."""
        self.held.append(i)
        self.sums.append(0.0)
        p = self.weights(i)
        self.sums = [a + b for a, b in zip(self.sums, p, strict=True)]
        return [
            math.fsum(w * self.v[j][d] for w, j in zip(p, self.held, strict=True))
            for d in range(len(self.v[0]))
        ]

    def evict(self, scores: list[float], budget: int, recent: int) -> None:
        """Keep the `recent` newest tokens and those with the largest scores."""
        n = len(self.held)
        order = sorted(range(n), key=lambda x: (x < n - recent, -scores[x], -x))
        kept = sorted(order[:budget])
        self.held, self.sums = [self.held[x] for x in kept], [self.sums[x] for x in kept]


def heavy_hitters(run: Run) -> list[float]:
    """H2O."""
    return run.sums


def last_query(run: Run) -> list[float]:
    """TOVA."""
    return run.weights(run.last)  # type: ignore[attr-defined]


def observed_window(window: int, pool: int) -> Score:
    """SnapKV: the mean over neighbours among the tokens before the window, 0 outside."""

    def score(run: Run) -> list[float]:
        last = run.last  # type: ignore[attr-defined]
        rows = [run.weights(i) for i in range(max(0, last - window + 1), last + 1)]
        n = len(run.held)
        old = [math.fsum(row[x] for row in rows) if x < n - window else 0.0 for x in range(n)]
        half = pool // 2
        return [math.fsum(old[max(0, x - half) : x + half + 1]) / pool for x in range(n)]

    return score


def key_norm(run: Run) -> list[float]:
    """The smallest norms stay."""
    return [-math.sqrt(math.fsum(y * y for y in run.k[j])) for j in run.held]


def key_difference(run: Run) -> list[float]:
    """KeyDiff: minus the cosine with the mean of the unit keys."""
    keys = [run.k[j] for j in run.held]
    unit = [[y / math.sqrt(math.fsum(z * z for z in k)) for y in k] for k in keys]
    mean = [math.fsum(u[d] for u in unit) / len(unit) for d in range(len(keys[0]))]
    size = math.sqrt(math.fsum(y * y for y in mean))
    return [-math.fsum(a * b for a, b in zip(u, mean, strict=True)) / size for u in unit]


def evicting(
    q: Matrix, k: Matrix, v: Matrix, score: Score, budget: int, interval: int, recent: int = 0
) -> tuple[Matrix, list[int]]:
    """The outputs of all queries, and the positions that are held at the end."""
    run, out = Run(q, k, v), []
    for i in range(len(q)):
        out.append(run.read(i))
        run.last = i  # type: ignore[attr-defined]
        if len(run.held) >= budget + interval:
            run.evict(score(run), budget, recent)
    return out, run.held


def expected_attention(future: int, sinks: int, epsilon: float = 0.0) -> Score:
    """Expected attention: the queries so far, turned back, have a mean and a covariance; both are
    turned by the mean of the rotations at the next positions.
    """

    def score(run: Run) -> list[float]:
        last, D = run.last, len(run.k[0])  # type: ignore[attr-defined]
        plain = [turned(run.q[i], -i) for i in range(sinks, last + 1)]
        mean = [math.fsum(x[d] for x in plain) / len(plain) for d in range(D)]
        apart = [[a - b for a, b in zip(x, mean, strict=True)] for x in plain]
        cov = [
            [math.fsum(x[a] * x[b] for x in apart) / len(plain) for b in range(D)] for a in range(D)
        ]
        units = [[float(a == b) for b in range(D)] for a in range(D)]
        # column d of R is the mean of the turned unit vector d
        turn = [
            [
                math.fsum(turned(unit, last + f)[a] for f in range(1, future + 1)) / future
                for unit in units
            ]
            for a in range(D)
        ]
        m = [math.fsum(turn[a][b] * mean[b] for b in range(D)) for a in range(D)]
        c = [
            [
                math.fsum(turn[a][x] * cov[x][y] * turn[b][y] for x in range(D) for y in range(D))
                for b in range(D)
            ]
            for a in range(D)
        ]
        logits = {}
        for j in run.held:
            k = [run.scale * y for y in run.k[j]]
            square = math.fsum(k[a] * c[a][b] * k[b] for a in range(D) for b in range(D))
            if j >= sinks:
                logits[j] = math.fsum(a * b for a, b in zip(m, k, strict=True)) + square / 2
        top = max(logits.values(), default=0.0)
        total = math.fsum(math.exp(x - top) for x in logits.values())
        found = []
        for j in run.held:
            size = math.sqrt(math.fsum(y * y for y in run.v[j]))
            weight = math.exp(logits[j] - top) / total if j >= sinks else math.inf
            found.append((weight + epsilon) * size)
        return found

    return score


def evicting_across_heads(
    qs: list[Matrix],
    ks: list[Matrix],
    vs: list[Matrix],
    score: Score,
    budget: int,
    interval: int,
    recent: int,
    floor: float,
) -> tuple[list[Matrix], list[list[int]]]:
    """Ada-KV: the heads of a layer evict together. Each keeps its int(floor budget) best tokens,
    and the heads keep as many budgets as there are heads.
    """
    runs = [Run(q, k, v) for q, k, v in zip(qs, ks, vs, strict=True)]
    out: list[Matrix] = [[] for _ in runs]
    for i in range(len(qs[0])):
        for run, z in zip(runs, out, strict=True):
            z.append(run.read(i))
            run.last = i  # type: ignore[attr-defined]
        if sum(len(run.held) for run in runs) < len(runs) * (budget + interval):
            continue
        ranked = []
        for h, run in enumerate(runs):
            scores, n = score(run), len(run.held)
            order = sorted(range(n), key=lambda x: (x < n - recent, -scores[x], -x))
            for place, x in enumerate(order):
                safe = place < int(floor * budget) or x >= n - recent
                ranked.append((not safe, -scores[x], -h, -x, h, x))
        kept = [(h, x) for *_, h, x in sorted(ranked)[: len(runs) * budget]]
        for h, run in enumerate(runs):
            mine = sorted(x for head, x in kept if head == h)
            run.held, run.sums = [run.held[x] for x in mine], [run.sums[x] for x in mine]
    return out, [run.held for run in runs]
