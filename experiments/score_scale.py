"""Claims about the scale 1/sqrt(d_k) of the scores: their spread, the gradients, and training.

q, k ~ N(0, 1):  std(q.k) = sqrt(d)
dp/ds = diag(p) - p p^T:  its norm is at most 1/2, and 0 where one key has all the weight
ds_ij/dq_i = scale k_j:  its norm is scale sqrt(d), which grows with d without the scale
"""

from __future__ import annotations

import math
from statistics import median

import torch

from experiments.claim import (
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
from experiments.small_training import BYTES, byte_loss, gradient_norms, small_decoder
from regard import attention_weights
from regard.compare.experiment import Numbers
from regard.nn import Attention, SeparateQKV
from regard.view.charts import Line, Picture

DIMS = (4, 16, 64, 256, 1024, 4096)
KEYS = 64
WAYS = ("unscaled", "scaled")


def _scale(way: str, dim: int) -> float:
    """Return the scale of the scores: 1 for "unscaled", 1/sqrt(d) for "scaled"."""
    return 1.0 if way == "unscaled" else dim**-0.5


def _measure(budget: float, seed: int) -> Numbers:
    rows = num_steps(budget, 256, least=256)
    generator = torch.Generator().manual_seed(seed)
    rows_by_dim = []
    for dim in DIMS:
        q = torch.randn(1, 1, rows, dim, generator=generator, dtype=torch.float64)
        k = torch.randn(1, 1, KEYS, dim, generator=generator, dtype=torch.float64)
        row: Numbers = {"dim": dim, "spread": float((q @ k.mT).std())}
        for way in WAYS:
            weights = attention_weights(q, k, scale=_scale(way, dim))[0, 0]
            row[way] = {
                "entropy": float(torch.special.entr(weights).sum(-1).mean()),
                "largest": float(weights.amax(-1).mean()),
            }
        rows_by_dim.append(row)
    return {"rows": rows, "keys": KEYS, "by_dim": rows_by_dim}


def _checks(numbers: Numbers) -> list[Criterion]:
    rows, last = numbers["by_dim"], numbers["by_dim"][-1]
    n, m = numbers["rows"], numbers["keys"]

    def standard_errors(row: Numbers) -> float:
        """Return the difference of the spread from sqrt(d), in errors of n m random products."""
        error = math.sqrt(2 / (n * m) + (2 / n + 2 / m) / row["dim"]) / 2
        return float(abs(row["spread"] / row["dim"] ** 0.5 - 1) / error)

    entropy = [r["scaled"]["entropy"] for r in rows]
    return [
        Criterion(
            "std(q.k): largest difference from sqrt(d) over all d, in standard errors",
            max(map(standard_errors, rows)),
            high=5.0,
        ),
        Criterion(
            "largest weight of a row without the scale, at the largest d: mean over the rows",
            last["unscaled"]["largest"],
            low=0.9,
        ),
        Criterion(
            "entropy of the weights with the scale: largest / smallest over all d",
            max(entropy) / min(entropy),
            high=1.1,
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(f"{quantity}, {way}", tuple((r["dim"], r[way][quantity]) for r in numbers["by_dim"]))
        for quantity in ("entropy", "largest")
        for way in WAYS
    )
    title = "Entropy of the weights (nats), and the largest weight of a row"
    return Picture(title, "head dim d", "log scale", lines, "xy")


_UNTRAINED = (
    "Random tokens and weights in fp64, 64 keys: the statistics of an untrained layer. The weights "
    "of a trained layer may compensate for any scale."
)

CLAIM = Claim(
    id="scale",
    sources=(
        NoteSection(DEEPSEEK_NOTE, "1.1.3"),
        NoteSection(ATTN_JOURNEY, "3.1"),
        NoteSection(RASCHKA_NOTES, "5.1"),
    ),
    statement="Without the division by sqrt(d_k), and only without it, the scores grow with d_k "
    "and the softmax saturates.",
    prediction="The standard deviation of the scores is sqrt(d). Without the scale nearly all "
    "weight is on one key at a large d; with it the entropy is the same at every d.",
    scope=_UNTRAINED,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    takeaway="A sum of d products of variance 1 has variance d; the division removes this effect "
    "of the size of the head.",
)

GRADIENT_DIMS, TOKENS, DRAWS = (16, 64, 256, 1024), 64, 5


def _gradients(
    dim: int, generator: torch.Generator, tokens: int = TOKENS
) -> dict[str, dict[str, float]]:
    """Return the gradient norms of one layer on random numbers, with and without the scale."""
    x, target = torch.randn(2, tokens, dim, generator=generator, dtype=torch.float64)
    maps = torch.randn(3, dim, dim, generator=generator, dtype=torch.float64) * dim**-0.5
    q, k, v = x @ maps
    norms = {}
    for way in WAYS:
        queries = q.clone().requires_grad_()
        with torch.enable_grad():
            weights = (queries @ k.mT * _scale(way, dim)).softmax(-1)
            torch.autograd.backward((weights @ v * target).sum())
        assert queries.grad is not None
        query_norms, some_weights = queries.grad.norm(dim=-1), weights.detach()[:16]
        jacobian = (
            torch.diag_embed(some_weights) - some_weights[:, :, None] * some_weights[:, None, :]
        )
        slopes = torch.linalg.eigvalsh(jacobian)[:, -1]
        norms[way] = {
            "weights": float((x.mT @ queries.grad).norm()),  # of W_q, since q = x W_q
            "per_query_median": float(query_norms.median()),
            "per_query_largest": float(query_norms.max()),
            "slope": float(slopes.median()),
            "steepest": float(slopes.max()),
        }
    return norms


def _measure_gradients(_budget: float, seed: int) -> Numbers:
    rows = []
    for dim in GRADIENT_DIMS:
        draws = [
            _gradients(dim, torch.Generator().manual_seed(1000 * seed + i)) for i in range(DRAWS)
        ]
        row: Numbers = {"dim": dim}
        for way in WAYS:
            row[way] = {name: [norms[way][name] for norms in draws] for name in draws[0][way]}
        rows.append(row)
    return {"tokens": TOKENS, "draws": DRAWS, "by_dim": rows}


def _unscaled_to_scaled(row: Numbers, name: str) -> list[float]:
    """Return the value without the scale divided by the value with it, for each draw."""
    return [a / b for a, b in zip(row["unscaled"][name], row["scaled"][name], strict=True)]


def _checks_vanish(numbers: Numbers) -> list[Criterion]:
    last = numbers["by_dim"][-1]
    return [
        median_criterion(
            "largest d: norm of d weights / d scores, median over the rows, without the scale / "
            "with it",
            _unscaled_to_scaled(last, "slope"),
            high=0.2,
        ),
        median_criterion(
            "largest d: gradient norm of a query, median over the queries, without the scale / "
            "with it",
            _unscaled_to_scaled(last, "per_query_median"),
            high=0.2,
        ),
        median_criterion(
            "largest d: gradient norm of W_q, without the scale / with it",
            _unscaled_to_scaled(last, "weights"),
            high=0.2,
            role="limit",
        ),
    ]


def _checks_explode(numbers: Numbers) -> list[Criterion]:
    first, last = numbers["by_dim"][0], numbers["by_dim"][-1]
    grows = [
        b / a
        for a, b in zip(
            _unscaled_to_scaled(first, "weights"), _unscaled_to_scaled(last, "weights"), strict=True
        )
    ]
    most = max(x for row in numbers["by_dim"] for way in WAYS for x in row[way]["steepest"])
    return [
        median_criterion(
            "largest d: gradient norm of W_q, without the scale / with it",
            _unscaled_to_scaled(last, "weights"),
            low=5.0,
        ),
        median_criterion("the same factor at the largest d / at the smallest d", grows, low=2.0),
        median_criterion(
            "largest d: largest gradient norm of a query, without the scale / with it",
            _unscaled_to_scaled(last, "per_query_largest"),
            low=5.0,
        ),
        Criterion(
            "largest norm of d weights / d scores over all d (at most 1/2 for a softmax)",
            most,
            low=0.5 + 1e-12,
            role="limit",
        ),
    ]


def _picture_gradients(numbers: Numbers) -> Picture:
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
    return Picture("Gradient norms in an untrained layer", "head dim d", "norm", lines, "xy")


VANISH = Claim(
    id="scale-vanish",
    sources=(
        NoteSection(ATTN_JOURNEY, "3.1"),
        NoteSection(OVERVIEW, "3.2"),
        NoteSection(OUTLINE, "1"),
    ),
    statement="Without the scale gradients vanish, because the softmax saturates.",
    prediction="At a large d the gradients of the scores, of the queries and of the weights are "
    "nearly zero.",
    scope=_UNTRAINED,
    measure=_measure_gradients,
    checks=_checks_vanish,
    picture=_picture_gradients,
    measured_with="scale-vanish",
    takeaway="True of the scores and of most queries. The few queries that are not saturated get "
    "gradients so large that the sum over all queries is larger, not smaller.",
)

EXPLODE = Claim(
    id="scale-explode",
    sources=(NoteSection(ATTN_JOURNEY, "3.1"),),
    statement="Without the scale gradients explode.",
    prediction="At a large d the gradients of the scores, of the queries and of the weights are "
    "many times those with the scale.",
    scope=_UNTRAINED,
    measure=_measure_gradients,
    checks=_checks_explode,
    picture=_picture_gradients,
    measured_with="scale-vanish",
    takeaway="The gradient of the scores does not explode, since the slope of the softmax is at "
    "most 1/2. The gradient of the weights has the factor d score / d q = k, which the scale "
    "divides by sqrt(d).",
)

TRAINED_DIMS, WIDTH, SEEDS, STEPS = (16, 256), 64, 3, 100


def _trained(dim: int, way: str, seed: int, count: int) -> dict[str, float]:
    """Train two layers of one head; return the loss, and largest and median gradient norm."""
    _, model = small_decoder(BYTES, dim=WIDTH, heads=1, options={"head_dim": dim}, seed=seed)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        project = attention.project
        assert isinstance(project, SeparateQKV)
        attention.scale = _scale(way, dim)
        with torch.no_grad():  # queries and keys of variance 1, which the scale assumes
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
    count, rows = num_steps(budget, STEPS, least=4), []
    seeds = range(seed, seed + num_seeds(budget, SEEDS))
    for dim in TRAINED_DIMS:
        row: Numbers = {"dim": dim}
        for way in WAYS:
            runs = [_trained(dim, way, trial, count) for trial in seeds]
            row[way] = {name: [result[name] for result in runs] for name in runs[0]}
        rows.append(row)
    return {"steps": count, "width": WIDTH, "seeds": len(seeds), "by_dim": rows}


def _checks_training(numbers: Numbers) -> list[Criterion]:
    small, large = numbers["by_dim"]

    def extra_loss(row: Numbers) -> list[float]:
        return [a - b for a, b in zip(row["unscaled"]["loss"], row["scaled"]["loss"], strict=True)]

    return [
        median_criterion(
            "large d: largest gradient norm of a run, without the scale / with it",
            _unscaled_to_scaled(large, "largest"),
            low=1.1,
        ),
        median_criterion(
            "large d: loss without the scale minus loss with it, nats per byte",
            extra_loss(large),
            low=0.05,
        ),
        median_criterion(
            "large d: median gradient norm, without the scale / with it",
            _unscaled_to_scaled(large, "median"),
            role="reported",
        ),
        median_criterion(
            "small d: loss without the scale minus loss with it, nats per byte",
            extra_loss(small),
            low=0.05,
            role="limit",
        ),
    ]


def _picture_training(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            f"{way}, d {row['dim']}",
            tuple((float(i), x) for i, x in enumerate(row[way]["largest"])),
        )
        for row in numbers["by_dim"]
        for way in WAYS
    )
    return Picture(
        "Largest gradient norm in training, without the first tenth of the steps",
        "seed",
        "norm",
        lines,
        "y",
    )


TRAINING = Claim(
    id="scale-training",
    sources=(NoteSection(ATTN_JOURNEY, "3.1"),),
    statement="Without the scale training becomes unstable.",
    prediction="Without the scale the same model on the same data has higher gradient peaks and a "
    "higher loss after as many steps; at a small d the effect is small.",
    scope="Two layers of width 64 with one head of 16 or 256, three seeds, a hundred steps on "
    "text. No run diverged, since AdamW normalizes the size of a gradient.",
    measure=_measure_training,
    checks=_checks_training,
    picture=_picture_training,
    takeaway="Most queries get no gradient and a few get too much: training is slower and has "
    "gradient peaks, but does not fail.",
)

CLAIMS = (CLAIM, VANISH, EXPLODE, TRAINING)
