"""What `explain` found, as plain arrays and strings: nothing here needs torch, and `as_dict` is what pages and files hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
DIGITS = 9  # significant digits that carry a float32 exactly


class Step(NamedTuple):
    """One link of a chain: what was done, its equation, and what came out."""

    name: str
    equation: str
    values: Array


@dataclass(frozen=True, eq=False)
class Explanation:
    """One query token, in one head of one layer: every number from its embedding to the prediction.

    Letters as everywhere: T tokens, M model dim, H query heads, G key/value heads, D and E dims of one head.
    Captured arrays have the model's own values; recomputed ones are float64, and `checks` says how far they are apart.

    Attributes:
        model, text: what was run. `notes`: what a reader should know. `chosen_by`: the rule that chose layer and head.
        layer, head, group, query: where; head h reads key/value head `group` = h // (H/G); `query` is a token index.
        sizes: {"layers", "H", "G", "T", "D", "E", "M"}.
        ids, pieces, positions: the T tokens.
        embedding, entering, normed: [M] of the query token: embedded, entering the layer, after the layer's norm.
        q: steps of the query [D]; k: steps of all keys [T, D]; v: the values [T, E].
        layout, angles: pairs of the rotary embedding and its angles [T, pairs] in radians; "" and [T, 0] without.
        scale, scores: steps from q . k to the masked score, each [T], -inf where masked.
        masked: for each key, why the query may not see it; "" where it may.
        row_max, exps, total, lse, weights: softmax of the row: m, exp(s - m) [T], their sum, ln sum exp(s), and p [T].
        sink: the head's sink logit, one more term of the weights' denominator, or None.
        contributions, z: p_j v_j [T, E], and their sum [E].
        joined: z of all heads [H*E]; head_out, shares: what this head writes [M], and each head's share of `out`
            [H], (out_h . out) / (out . out): together 1, less the share of a bias.
        out, residual: what attention writes [M], and the hidden state with it added [M].
        pattern, visible: weights of the whole head [T, T] (rows are queries, columns are keys) and what the mask allows.
        pool, patterns: all heads of the layer [H, t, t], each cell the largest weight of pool x pool, NaN where masked.
        predictions: the likeliest next tokens after the query: (piece, id, probability).
        checks: what was compared -> largest absolute difference. equations: step -> equation.
    """

    model: str
    text: str
    chosen_by: str
    notes: tuple[str, ...]
    layer: int
    head: int
    group: int
    query: int
    sizes: dict[str, int]
    ids: NDArray[np.integer[Any]]
    pieces: tuple[str, ...]
    positions: NDArray[np.integer[Any]]
    embedding: Array
    entering: Array
    normed: Array
    q: tuple[Step, ...]
    k: tuple[Step, ...]
    v: Array
    layout: str
    angles: Array
    scale: float
    scores: tuple[Step, ...]
    masked: tuple[str, ...]
    row_max: float
    exps: Array
    total: float
    lse: float
    sink: float | None
    weights: Array
    contributions: Array
    z: Array
    joined: Array
    head_out: Array
    shares: Array
    out: Array
    residual: Array
    pattern: Array
    visible: NDArray[np.bool_]
    pool: int
    patterns: Array
    predictions: tuple[tuple[str, int, float], ...]
    checks: dict[str, float]
    equations: dict[str, str]

    @property
    def check(self) -> float:
        """The largest difference between what was recomputed and what the model computed."""
        return max(self.checks.values())

    @property
    def equation(self) -> str:
        """The whole walk on one line."""
        return "out = W_O [z_1 .. z_H],  z_i = sum_j p_ij v_j,  p_i = softmax(q_i k_j scale + mask)"

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values: arrays as lists, numbers to 9 digits, null where masked or not finite.

        In `pattern` a masked cell is null; a visible one is its weight.
        """
        found: dict[str, Any] = {"schema": 1, "check": _plain(self.check)}
        for field in fields(self):
            found[field.name] = _plain(getattr(self, field.name))
        found["pattern"] = _plain(np.where(self.visible, self.pattern, np.nan))
        del found["visible"]
        found["predictions"] = [
            {"piece": piece, "id": index, "probability": _plain(p)}
            for piece, index, p in self.predictions
        ]
        return found


def _plain(x: Any) -> Any:
    """A JSON-ready copy of a value."""
    if isinstance(x, np.ndarray):
        return _plain(x.tolist()) if x.dtype != np.float32 else _plain(x.astype(float).tolist())
    if isinstance(x, Step):
        return {name: _plain(value) for name, value in x._asdict().items()}
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
    return x
