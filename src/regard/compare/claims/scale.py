"""Why scores are divided by the root of d_k: how wide they spread, how sharp the weights become, what gradient is left.

q, k ~ N(0, 1):  std(q.k) = sqrt(d);  p = softmax(scores);  dp/ds = diag(p) - p p^T, whose norm is at most 1/2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regard import attention_weights
from regard.compare.claims.base import Check, Claim, steps
from regard.compare.experiment import Numbers
from regard.view.curves import Line, Picture

DIMS = (4, 16, 64, 256, 1024, 4096)
KEYS = 64


def _measure(budget: float, seed: int) -> Numbers:
    rows = steps(budget, 256, least=256)
    make = torch.Generator().manual_seed(seed)
    found = []
    for dim in DIMS:
        q = torch.randn(1, 1, rows, dim, generator=make, dtype=torch.float64)
        k = torch.randn(1, 1, KEYS, dim, generator=make, dtype=torch.float64)
        row: dict[str, Any] = {"dim": dim, "spread": float((q @ k.mT).std())}
        for name, scale in (("unscaled", 1.0), ("scaled", dim**-0.5)):
            p = attention_weights(q, k, scale=scale)[0, 0]
            few = p[: steps(budget, 64, least=16)]
            jacobian = torch.diag_embed(few) - few[:, :, None] * few[:, None, :]
            row[name] = {
                "entropy": float(torch.special.entr(p).sum(-1).mean()),
                "largest": float(p.amax(-1).mean()),
                "gradient": float(torch.linalg.matrix_norm(jacobian, ord=2).median()),
                "steepest": float(torch.linalg.matrix_norm(jacobian, ord=2).max()),
            }
        found.append(row)
    return {"rows": rows, "keys": KEYS, "by_dim": found}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    *_, last = numbers["by_dim"]
    n, m = numbers["rows"], numbers["keys"]

    def off(row: Mapping[str, Any]) -> float:
        """From sqrt(d), in standard errors: of n m products, whose queries and keys have lengths of their own."""
        error = math.sqrt(2 / (n * m) + (2 / n + 2 / m) / row["dim"]) / 2
        return abs(row["spread"] / row["dim"] ** 0.5 - 1) / error

    steepest = max(
        r[name]["steepest"] for r in numbers["by_dim"] for name in ("unscaled", "scaled")
    )
    return [
        Check("std(q.k) is sqrt(d) at every d: largest distance, in standard errors", max(map(off, numbers["by_dim"])), high=5.0),
        Check("without the scale one key takes nearly all at the largest d: mean largest weight", last["unscaled"]["largest"], low=0.9),
        Check("... and the median gradient through softmax is nearly gone: its share of that with the scale",
              last["unscaled"]["gradient"] / last["scaled"]["gradient"], high=0.1),
        Check("with the scale the entropy does not depend on d: largest by smallest",
              max(r["scaled"]["entropy"] for r in numbers["by_dim"]) / min(r["scaled"]["entropy"] for r in numbers["by_dim"]), high=1.1),
        Check("no gradient explodes, scaled or not: the largest norm of d weights / d scores", steepest, high=0.5 + 1e-12),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(f"{what}, {name}", tuple((r["dim"], r[name][what]) for r in numbers["by_dim"]))
        for what in ("entropy", "gradient")
        for name in ("unscaled", "scaled")
    )
    title = "Entropy of the weights (nats), and the gradient through softmax (median norm)"
    return Picture(title, "head dim d", "log scale", lines, "xy")


CLAIM = Claim(
    id="scale",
    seeds=("S1.10", "S2.3", "S3.18", "E2.1", "X3"),
    says="Scores are divided by sqrt(d_k), because large ones saturate the softmax and training becomes unstable.",
    predicts="Spread sqrt(d); without the scale weights become one-hot and the gradient vanishes with d; with it nothing depends on d.",
    scale="Random queries and keys in fp64, 64 keys: the statistics of a fresh layer, not of a trained one, whose weights may undo any scale.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="Saturation makes gradients vanish; it never makes them explode (E2.1).",
)
"""S2.3."""
