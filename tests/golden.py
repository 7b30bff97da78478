"""The golden numbers of tests/data/golden.json, computed three ways: for tests/test_golden.py.

The ways are the package, the plain formula, and the package with its mask upside down, which must
not agree.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.masks import Causal, Mask

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden.json").read_text(encoding="utf-8")
)
WALK = DATA["walk"]
ENTRIES: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in WALK["entries"]}
# those that change with the mask
CAUSAL = [name for name in ENTRIES if name.startswith("causal.") and "before" not in name] + [
    "CausalAttention",
    "MultiHeadAttentionWrapper",
    "MultiHeadAttention",
]


def tensor(x: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists as a tensor; None is -inf."""

    def fill(y: Any) -> Any:
        return [fill(z) for z in y] if isinstance(y, list) else -math.inf if y is None else y

    return torch.tensor(fill(x), dtype=dtype)


def parameters(name: str, dtype: torch.dtype) -> list[Tensor]:
    """The listed parameters of an entry: fp32 numbers, held in dtype."""
    entry = ENTRIES[name]
    source = ENTRIES[entry.get("parameters_of", name)]["parameters"]
    return [tensor(x, torch.float32).to(dtype) for x in source.values()]


class Route(NamedTuple):
    """q, k, v [B,H,L,d], causal or not, scale or None -> scores, weights, outputs."""

    scores: Callable[..., Tensor]
    weights: Callable[..., Tensor]
    attend: Callable[..., Tensor]


def package(see_the_past: Mask) -> Route:
    def options(causal: bool, scale: float | None) -> dict[str, Any]:
        return {"mask": see_the_past if causal else None, "scale": scale}

    def scores(q: Tensor, k: Tensor, causal: bool, scale: float | None = None) -> Tensor:
        with regard.Trace("scores") as trace:
            regard.attend(q, k, k, **options(causal, scale))
        return trace["scores"]

    def weights(q: Tensor, k: Tensor, causal: bool, scale: float | None = None) -> Tensor:
        return regard.attention_weights(q, k, **options(causal, scale))

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
        return regard.attend(q, k, v, **options(causal, scale))

    return Route(scores, weights, attend)


def formula() -> Route:
    def scores(q: Tensor, k: Tensor, causal: bool, scale: float | None = None) -> Tensor:
        s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        return s.masked_fill(future, -math.inf) if causal else s

    def weights(*args: Any, **options: Any) -> Tensor:
        return torch.softmax(scores(*args, **options), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return weights(q, k, *args, **options) @ v

    return Route(scores, weights, attend)


ROUTES = {"regard": package(Causal()), "formula": formula(), "inverted": package(~Causal())}


@functools.cache
def computed(route: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every entry of the walk, by one route, in one dtype."""
    r = ROUTES[route]
    x = tensor(WALK["inputs"], dtype)
    return {
        **simple(r, x),
        **trainable(r, x),
        **causal(r, x),
        **dropped(r, x),
        **heads(r, torch.stack([x, x])),
    }


def one(x: Tensor) -> Tensor:
    """[L,d] as one batch row and one head."""
    return x[None, None]


def simple(r: Route, x: Tensor) -> dict[str, Tensor]:
    q = one(x)
    scores = r.scores(q, q, False, 1.0)[0, 0]
    weights = r.weights(q, q, False, 1.0)[0, 0]
    contexts = r.attend(q, q, q, False, 1.0)[0, 0]
    # softmax(ln s) = s / sum(s): a normalization by the sum is a softmax over logarithms
    shares = r.weights(one(scores.log()), one(torch.eye(6, dtype=x.dtype)), False, 1.0)[0, 0]
    return {
        "simple.scores_of_x2": scores[1],
        "simple.weights_of_x2.divide_by_sum": shares[1],
        "simple.weights_of_x2.naive_softmax": weights[1],
        "simple.weights_of_x2.softmax": weights[1],
        "simple.context_of_x2": contexts[1],
        "simple.scores": scores,
        "simple.weights": weights,
        "simple.contexts": contexts,
    }


def trainable(r: Route, x: Tensor) -> dict[str, Tensor]:
    q, k, v = (one(x @ w) for w in parameters("SelfAttention_v1", x.dtype))
    q2, k2, v2 = (one(x @ w.T) for w in parameters("SelfAttention_v2", x.dtype))
    row = q[:, :, 1:2]
    return {
        "trainable.query_2": q[0, 0, 1],
        "trainable.scores_of_x2": r.scores(row, k, False, 1.0)[0, 0, 0],
        "trainable.weights_of_x2": r.weights(row, k, False)[0, 0, 0],
        "trainable.context_of_x2": r.attend(row, k, v, False)[0, 0, 0],
        "SelfAttention_v1": r.attend(q, k, v, False)[0, 0],
        "SelfAttention_v2": r.attend(q2, k2, v2, False)[0, 0],
    }


def causal(r: Route, x: Tensor) -> dict[str, Tensor]:
    q, k, _ = (one(x @ w.T) for w in parameters("SelfAttention_v2", x.dtype))
    # which of six equal keys each query sees, whatever the route calls a mask
    mask = (r.weights(0 * q, 0 * k, True)[0, 0] > 0).to(x.dtype)
    before = r.weights(q, k, False)[0, 0]
    kept = before * mask
    return {
        "causal.weights_before_mask": before,
        "causal.mask": mask,
        "causal.weights_times_mask": kept,
        "causal.weights_renormalized": kept / kept.sum(-1, keepdim=True),
        "causal.masked_scores": r.scores(q, k, True, 1.0)[0, 0],
        "causal.weights": r.weights(q, k, True)[0, 0],
    }


def dropped(r: Route, x: Tensor) -> dict[str, Tensor]:
    """Values that are the identity matrix show the weights, dropout included."""
    q, k, _ = (one(x @ w.T) for w in parameters("SelfAttention_v2", x.dtype))
    eye = one(torch.eye(6, dtype=x.dtype))
    if r is ROUTES["formula"]:
        weights = r.weights(q, k, True)
        draw = seeded_dropout(x.dtype)
        return {"dropout.of_ones": draw, "dropout.of_causal_weights": (weights * draw)[0, 0]}
    mask = Causal() if r is ROUTES["regard"] else ~Causal()
    torch.manual_seed(123)
    # 36 queries over one key: each weight is 1
    one_key = torch.zeros(1, 1, 1, 1, dtype=x.dtype)
    ones = regard.attend(
        one_key.expand(1, 1, 36, 1), one_key, one_key + 1, dropout=0.5, backend="reference"
    )
    torch.manual_seed(123)
    of_weights = regard.attend(q, k, eye, mask=mask, dropout=0.5, backend="reference")
    return {"dropout.of_ones": ones.view(6, 6), "dropout.of_causal_weights": of_weights[0, 0]}


def seeded_dropout(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(123)
    return F.dropout(torch.ones(6, 6, dtype=dtype), 0.5)


def heads(r: Route, x: Tensor) -> dict[str, Tensor]:
    first, second = (
        [(x @ w.T)[:, None] for w in group]
        for group in (
            parameters("MultiHeadAttentionWrapper", x.dtype)[:3],
            parameters("MultiHeadAttentionWrapper", x.dtype)[3:],
        )
    )
    single = [(x @ w.T)[:, None] for w in parameters("CausalAttention", x.dtype)]
    *three, out, bias = parameters("MultiHeadAttention", x.dtype)
    split = [(x @ w.T).unflatten(-1, (2, 1)).transpose(1, 2) for w in three]
    joined = r.attend(*split, True).transpose(1, 2).flatten(2)
    return {
        "CausalAttention": r.attend(*single, True)[:, 0],
        "MultiHeadAttentionWrapper": torch.cat(
            [r.attend(*first, True)[:, 0], r.attend(*second, True)[:, 0]], -1
        ),
        "MultiHeadAttention": joined @ out.T + bias,
    }


def difference(x: Tensor, y: Tensor) -> float:
    """The largest difference in fp64; infinities must be in the same places."""
    assert x.shape == y.shape
    x, y = x.detach().double(), y.detach().double()
    if not torch.equal(x.isinf(), y.isinf()) or bool(x.isnan().any()):
        return math.inf
    return float((x - y).masked_fill(x.isinf(), 0).abs().max())


def expected(name: str, field: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """A field of an entry; where torch draws another dropout mask on this platform, with that
    mask.
    """
    draw = seeded_dropout(dtype).double()
    if not ENTRIES[name].get("platform_dependent") or torch.equal(
        draw, tensor(ENTRIES["dropout.of_ones"]["printed"])
    ):
        return tensor(ENTRIES[name][field])
    return draw if name == "dropout.of_ones" else tensor(ENTRIES["causal.weights"]["value"]) * draw
