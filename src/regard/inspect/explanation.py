"""What `explain` found, as plain arrays and strings: nothing here needs torch, and `as_dict` is
what pages and files hold.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.inspect.parts import (
    Array,
    Block,
    Cost,
    Elsewhere,
    Mixture,
    State,
    Step,
    Tensors,
    plain,
)

SCHEMA = 2


@dataclass(frozen=True, eq=False)
class Explanation:
    """One query and one key, in one head of one layer: every number from the embedding to the
    prediction.

    Letters as everywhere: T queries, n keys of the call, M model dim, H query heads, G key/value
    heads, D and E dims of one head. Recorded arrays have the model's own values; recomputed ones
    are float64, and `checks` says how far they are apart.

    Attributes:
        model, text: what was run. `notes`: what a reader should know. `chosen_by`, `key_chosen_by`:
            the rules that chose.
        kind: "softmax", "additive" (another score), or "linear" (no softmax: `weights` are what a
            recurrence applies).
        place, mechanism, kernel, dtype, keys_are: where, by what module, on which kernel, and what
            its keys are.
        layer, head, group, query, key, call: where; head h reads key/value head `group` = h //
            (H/G); `query` is a token of the row side, `key` an index of the call's keys, `call`
            which of `calls` (branches, passes).
        sizes: {"layers", "H", "G", "T", "S", "D", "E", "M"}.
        ids, pieces, positions: of the n keys. query_piece, query_position: of the query.
            row_pieces: of all queries.
        embedding, entering, normed: [M] of the query token: embedded, entering the layer, and what
            attention was given.
        q: steps of the query [D]; k: steps of all keys [n, D]; values: steps of the values; v: the
            values [n, E].
        layout, angles, angle: pairs of the rotary embedding and their angles of keys [n, pairs] and
            of the query, in radians.
        pairs: for each dim the pair that it belongs to, -1 where it is not turned.
        scale, scores: steps from q . k to the masked score, each [n], -inf where masked.
        products: [D], the terms of q . k of the key. masked: for each key, why the query may not
            see it; "" where it may.
        row_max, exps, total, lse, weights: softmax of the row: m, exp(s - m) [n], their sum, ln sum
            exp(s), and p [n].
        sink: the head's sink logit, one more term of the weights' denominator, or None. online: the
            same, block by block.
        contributions, mixed, z: p_j v_j [n, E], their sum [E], and the head behind what finishes it
            [E'].
        joined: z of all heads; head_out, shares: what this head writes [M], and each head's share
            of `out`, (out_h . out) / (out . out): together 1, less the share of a bias.
        out, residual: what attention writes [M], and the hidden state behind its path [M].
        pattern, visible: weights of the whole head [T, n], NaN where masked; [0, 0] for long texts.
        pool, patterns: heads of the layer [H, t, s], each cell the largest weight of pool x pool,
            NaN where masked.
        mixture, state, cost, elsewhere: of mixed heads; of recurrences; what it costs; the same
            under other mechanisms.
        predictions: the likeliest tokens: (piece, id, probability).
        tensors: of the whole layer: each stage's name, equation, shape, mean, std and seconds; None
            where nobody timed it.
        checks: what was compared -> largest absolute difference. equations: step -> equation.
    """

    model: str
    text: str
    place: str
    layer: int
    head: int
    group: int
    query: int
    key: int
    sizes: dict[str, int]
    ids: NDArray[np.integer[Any]]
    pieces: tuple[str, ...]
    positions: NDArray[np.integer[Any]]
    query_piece: str
    query_position: int
    row_pieces: tuple[str, ...]
    q: tuple[Step, ...]
    k: tuple[Step, ...]
    values: tuple[Step, ...]
    v: Array
    layout: str
    angles: Array
    angle: Array
    pairs: tuple[int, ...]
    scale: float
    scores: tuple[Step, ...]
    products: Array
    masked: tuple[str, ...]
    row_max: float
    exps: Array
    total: float
    lse: float
    sink: float | None
    weights: Array
    online: tuple[Block, ...]
    contributions: Array
    mixed: Array
    z: Array
    joined: Array
    head_out: Array
    shares: Array
    out: Array
    pattern: Array
    pool: int
    patterns: Array
    elsewhere: tuple[Elsewhere, ...]
    cost: Cost | None
    predictions: tuple[tuple[str, int, float], ...]
    checks: dict[str, float]
    equations: dict[str, str]
    embedding: Array = field(default_factory=lambda: np.zeros(0))
    entering: Array = field(default_factory=lambda: np.zeros(0))
    normed: Array = field(default_factory=lambda: np.zeros(0))
    residual: Array = field(default_factory=lambda: np.zeros(0))
    kind: str = "softmax"
    mechanism: str = ""
    kernel: str = ""
    dtype: str = "float32"
    keys_are: str = "keys"
    call: int = 0
    calls: tuple[str, ...] = ("",)
    chosen_by: str = ""
    key_chosen_by: str = ""
    notes: tuple[str, ...] = ()
    mixture: Mixture | None = None
    state: State | None = None
    tensors: tuple[Tensors, ...] = ()

    @property
    def check(self) -> float:
        """The largest difference between what was recomputed and what the model computed."""
        return max(self.checks.values())

    @property
    def equation(self) -> str:
        """The whole walk on one line."""
        return "out = W_O [z_1 .. z_H],  z_i = sum_j p_ij v_j,  p_i = softmax(q_i k_j scale + mask)"

    @property
    def chain(self) -> tuple[tuple[str, str, float], ...]:
        """The score of the key, link by link: (name, equation, value)."""
        return tuple(
            (step.name, step.equation, float(step.values[self.key])) for step in self.scores
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values: arrays as lists, numbers to 9 digits, null where masked
        or not finite.
        """
        found: dict[str, Any] = {"schema": SCHEMA, "check": plain(self.check)}
        for each in fields(self):
            found[each.name] = plain(getattr(self, each.name))
        found["chain"] = [{"name": n, "equation": e, "value": plain(x)} for n, e, x in self.chain]
        found["predictions"] = [
            {"piece": piece, "id": index, "probability": plain(p)}
            for piece, index, p in self.predictions
        ]
        return found

    def _repr_html_(self) -> str:
        """The terminal page as inert text, for a notebook."""
        from regard.view.explanation import page

        text = "\n".join(line.plain for line in page(self.as_dict()))
        return f'<pre style="line-height:1.2">{html.escape(text)}</pre>'
