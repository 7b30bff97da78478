"""Why scores are divided by the root of d_k: the spread of the scores, the gradients, and what
training does without it.

q, k ~ N(0, 1):  std(q.k) = sqrt(d)
of the scores:   dp/ds = diag(p) - p p^T; its norm is at most 1/2, and 0 where one key takes all
of the weights:  ds_ij/dq_i = scale k_j; its norm is scale sqrt(d), which grows without the scale
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from regard import attention_weights
from regard.claims.claim import (
    ATTN_JOURNEY,
    DEEPSEEK_NOTE,
    OUTLINE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
    num_seeds,
    num_steps,
)
from regard.claims.small_training import BYTES, byte_loss, gradient_norms, small_decoder
from regard.compare.experiment import Numbers
from regard.nn import Attention, Separate
from regard.view.charts import Line, Picture

DIMS = (4, 16, 64, 256, 1024, 4096)
KEYS = 64
WAYS = ("unscaled", "scaled")


def _scale(way: str, dim: int) -> float:
    return 1.0 if way == "unscaled" else dim**-0.5


def _measure(budget: float, seed: int) -> Numbers:
    rows = num_steps(budget, 256, least=256)
    make = torch.Generator().manual_seed(seed)
    found = []
    for dim in DIMS:
        q = torch.randn(1, 1, rows, dim, generator=make, dtype=torch.float64)
        k = torch.randn(1, 1, KEYS, dim, generator=make, dtype=torch.float64)
        row: dict[str, Any] = {"dim": dim, "spread": float((q @ k.mT).std())}
        for way in WAYS:
            p = attention_weights(q, k, scale=_scale(way, dim))[0, 0]
            row[way] = {
                "entropy": float(torch.special.entr(p).sum(-1).mean()),
                "largest": float(p.amax(-1).mean()),
            }
        found.append(row)
    return {"rows": rows, "keys": KEYS, "by_dim": found}


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows, last = numbers["by_dim"], numbers["by_dim"][-1]
    n, m = numbers["rows"], numbers["keys"]

    def off(row: Mapping[str, Any]) -> float:
        """From sqrt(d), in standard errors: of n m products, whose queries and keys have lengths of
        their own.
        """
        error = math.sqrt(2 / (n * m) + (2 / n + 2 / m) / row["dim"]) / 2
        return float(abs(row["spread"] / row["dim"] ** 0.5 - 1) / error)

    entropy = [r["scaled"]["entropy"] for r in rows]
    return [
        Criterion(
            "std(q.k) is sqrt(d) at every d: largest distance, in standard errors",
            max(map(off, rows)),
            high=5.0,
        ),
        Criterion(
            "without the scale one key takes nearly all at the largest d: mean largest weight",
            last["unscaled"]["largest"],
            low=0.9,
        ),
        Criterion(
            "with it the entropy of the weights is the same at every d: largest by smallest",
            max(entropy) / min(entropy),
            high=1.1,
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(f"{what}, {way}", tuple((r["dim"], r[way][what]) for r in numbers["by_dim"]))
        for what in ("entropy", "largest")
        for way in WAYS
    )
    title = "Entropy of the weights (nats), and the largest weight of a row"
    return Picture(title, "head dim d", "log scale", lines, "xy")


_FRESH = (
    "Random tokens and maps in fp64, 64 keys: the statistics of a fresh layer, not of a "
    "trained one, whose weights may undo any scale."
)

CLAIM = Claim(
    id="scale",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.3"),
        NoteSection(ATTN_JOURNEY, "3.1"),
        NoteSection(RASCHKA_NOTES, "5.1"),
    ),
    statement="Without the division by sqrt(d_k), and only without it, the scores grow with d_k and "
    "the softmax saturates.",
    prediction="A spread of sqrt(d); without the scale nearly all weight on one key at a large d, "
    "with it the same entropy at every d.",
    scope=_FRESH,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="A product of d terms of variance 1 has variance d: the division takes out what is due "
    "to the size of the head alone.",
)

GRADIENT_DIMS, TOKENS, DRAWS = (16, 64, 256, 1024), 64, 5


def _gradients(
    dim: int, make: torch.Generator, tokens: int = TOKENS
) -> dict[str, dict[str, float]]:
    """Norms of the gradients of one layer on random tokens, under a random gradient of its output,
    both ways.
    """
    x, target = torch.randn(2, tokens, dim, generator=make, dtype=torch.float64)
    maps = torch.randn(3, dim, dim, generator=make, dtype=torch.float64) * dim**-0.5
    q, k, v = x @ maps
    found = {}
    for way in WAYS:
        own = q.clone().requires_grad_()
        with torch.enable_grad():
            p = (own @ k.mT * _scale(way, dim)).softmax(-1)
            torch.autograd.backward((p @ v * target).sum())
        assert own.grad is not None
        per_query, few = own.grad.norm(dim=-1), p.detach()[:16]
        jacobian = torch.diag_embed(few) - few[:, :, None] * few[:, None, :]
        slopes = torch.linalg.eigvalsh(jacobian)[:, -1]
        found[way] = {
            "weights": float((x.mT @ own.grad).norm()),  # of W_q, since q = x W_q
            "per_query_median": float(per_query.median()),
            "per_query_largest": float(per_query.max()),
            "slope": float(slopes.median()),
            "steepest": float(slopes.max()),
        }
    return found


def _measure_gradients(_budget: float, seed: int) -> Numbers:
    found = []
    for dim in GRADIENT_DIMS:
        draws = [
            _gradients(dim, torch.Generator().manual_seed(1000 * seed + i)) for i in range(DRAWS)
        ]
        row: dict[str, Any] = {"dim": dim}
        for way in WAYS:
            row[way] = {name: [one[way][name] for one in draws] for name in draws[0][way]}
        found.append(row)
    return {"tokens": TOKENS, "draws": DRAWS, "by_dim": found}


def _by(row: Mapping[str, Any], name: str) -> list[float]:
    """Without the scale by with it, draw by draw."""
    return [a / b for a, b in zip(row["unscaled"][name], row["scaled"][name], strict=True)]


def _checks_vanish(numbers: Mapping[str, Any]) -> list[Criterion]:
    last = numbers["by_dim"][-1]
    return [
        median_criterion(
            "the slope of the softmax at the largest d, the norm of d weights / d scores: median "
            "over the rows, by that with the scale",
            _by(last, "slope"),
            high=0.2,
        ),
        median_criterion(
            "the gradient of a query, there: median over the queries, by that with the scale",
            _by(last, "per_query_median"),
            high=0.2,
        ),
        median_criterion(
            "the gradient of W_q as a whole vanishes too: its norm, by that with the scale",
            _by(last, "weights"),
            high=0.2,
            role="limit",
        ),
    ]


def _checks_explode(numbers: Mapping[str, Any]) -> list[Criterion]:
    first, last = numbers["by_dim"][0], numbers["by_dim"][-1]
    grows = [b / a for a, b in zip(_by(first, "weights"), _by(last, "weights"), strict=True)]
    most = max(x for row in numbers["by_dim"] for way in WAYS for x in row[way]["steepest"])
    return [
        median_criterion(
            "the gradient of W_q at the largest d: its norm, by that with the scale",
            _by(last, "weights"),
            low=5.0,
        ),
        median_criterion(
            "... and that factor grows with d: at the largest by at the smallest", grows, low=2.0
        ),
        median_criterion(
            "the largest gradient of a query, there: by that with the scale",
            _by(last, "per_query_largest"),
            low=5.0,
        ),
        Criterion(
            "the gradient of the scores explodes too: the steepest slope of the softmax, which is "
            "1/2 at most",
            most,
            low=0.5 + 1e-12,
            role="limit",
        ),
    ]


def _picture_gradients(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            f"{title}, {way}",
            tuple((float(r["dim"]), median(r[way][name])) for r in numbers["by_dim"]),
        )
        for name, title in (
            ("weights", "W_q"),
            ("per_query_median", "a query (median)"),
            ("slope", "softmax (median slope)"),
        )
        for way in WAYS
    )
    return Picture("Norms of gradients in a fresh layer", "head dim d", "norm", lines, "xy")


VANISH = Claim(
    id="scale-vanish",
    sources=(
        NoteSection(ATTN_JOURNEY, "3.1"),
        NoteSection(OVERVIEW, "3.2"),
        NoteSection(OUTLINE, "1"),
    ),
    statement="Without the scale gradients vanish, because the softmax saturates.",
    prediction="At a large d softmax lets next to no gradient through, and the queries, the scores "
    "and the weights get next to none.",
    scope=_FRESH,
    measure=_measure_gradients,
    checks=_checks_vanish,
    picture=_picture_gradients,
    measured_with="scale-vanish",
    takeaway="True of the scores and of most queries; the few queries that are not saturated get so "
    "much that the sum over all is larger, not smaller.",
)

EXPLODE = Claim(
    id="scale-explode",
    sources=(NoteSection(ATTN_JOURNEY, "3.1"),),
    statement="Without the scale gradients explode.",
    prediction="At a large d the gradients of the scores, of the queries and of the weights are "
    "many times those with the scale.",
    scope=_FRESH,
    measure=_measure_gradients,
    checks=_checks_explode,
    picture=_picture_gradients,
    measured_with="scale-vanish",
    takeaway="The gradient of the scores never does: softmax has a slope of at most 1/2. That of "
    "the weights has the factor d score / d q = k, which the scale would divide by sqrt(d).",
)

TRAINED_DIMS, WIDTH, SEEDS, STEPS = (16, 256), 64, 3, 100


def _trained(dim: int, way: str, seed: int, count: int) -> dict[str, float]:
    """Two layers of one head, trained on bytes, with or without the scale: the loss, and the norms
    of the gradients on the way.
    """
    _, model = small_decoder(BYTES, dim=WIDTH, heads=1, options={"head_dim": dim}, seed=seed)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        project = attention.project
        assert isinstance(project, Separate)
        attention.scale = _scale(way, dim)
        with (
            torch.no_grad()
        ):  # queries and keys of variance 1, as the reason for the scale supposes
            for part in (project.q, project.k):
                part.linear.weight.normal_(std=WIDTH**-0.5)
    norms = gradient_norms(model, count, context=64, batch=8, seed=seed)
    counted = norms[len(norms) // 10 :]
    return {
        "loss": byte_loss(model, 64, rows=16),
        "largest": max(counted),
        "median": median(counted),
    }


def _measure_training(budget: float, seed: int) -> Numbers:
    count, found = num_steps(budget, STEPS, least=4), []
    seeds = range(seed, seed + num_seeds(budget, SEEDS))
    for dim in TRAINED_DIMS:
        row: dict[str, Any] = {"dim": dim}
        for way in WAYS:
            runs = [_trained(dim, way, trial, count) for trial in seeds]
            row[way] = {name: [one[name] for one in runs] for name in runs[0]}
        found.append(row)
    return {"steps": count, "width": WIDTH, "seeds": len(seeds), "by_dim": found}


def _checks_training(numbers: Mapping[str, Any]) -> list[Criterion]:
    small, large = numbers["by_dim"]

    def lost(row: Mapping[str, Any]) -> list[float]:
        return [a - b for a, b in zip(row["unscaled"]["loss"], row["scaled"]["loss"], strict=True)]

    return [
        median_criterion(
            "the largest gradient norm of a run at a large d: without the scale by with it",
            _by(large, "largest"),
            low=1.1,
        ),
        median_criterion(
            "the same steps learn less there: nats per byte lost without the scale",
            lost(large),
            low=0.05,
        ),
        median_criterion(
            "the median gradient norm there: without the scale by with it",
            _by(large, "median"),
            role="reported",
        ),
        median_criterion(
            "at a small d it is so as well: nats per byte lost", lost(small), low=0.05, role="limit"
        ),
    ]


def _picture_training(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            f"{way}, d {row['dim']}",
            tuple((float(i), x) for i, x in enumerate(row[way]["largest"])),
        )
        for row in numbers["by_dim"]
        for way in WAYS
    )
    return Picture(
        "The largest norm of a gradient in training, the first tenth left out",
        "seed",
        "norm",
        lines,
        "y",
    )


TRAINING = Claim(
    id="scale-training",
    sources=(NoteSection(ATTN_JOURNEY, "3.1"),),
    statement="Without the scale training becomes unstable.",
    prediction="The same model on the same data, without the scale: gradients spike higher, and as "
    "many steps learn less; at a small d hardly.",
    scope="Two layers of width 64 with one head of 16 or 256, three seeds, a hundred steps on "
    "text. No run diverged: AdamW takes the size out of a gradient.",
    measure=_measure_training,
    checks=_checks_training,
    picture=_picture_training,
    takeaway="Most queries learn nothing and a few learn too much: training goes on, with "
    "spikes and slower.",
)

CLAIMS = (CLAIM, VANISH, EXPLODE, TRAINING)
