"""The records of an explanation: plain arrays and strings that need no torch, and their JSON."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

EQUATIONS: dict[str, str] = {
    "tokens": "text → token ids, and their positions",
    "hidden": "x_i = norm(h_i),  h_i = embedding + what the layers before have added",
    "project": "q_i = W_Q x_i,  k_j = W_K x_j,  v_j = W_V x_j",
    "rotate": "(a, b) → (a cos φ - b sin φ, b cos φ + a sin φ),  φ = position × θ",
    "dot": "q_i · k_j = Σ q_i[d] k_j[d]  over dims d",
    "scaled": "s_ij = scale × q_i · k_j,  scale = 1/√D unless the model says otherwise",
    "capped": "s_ij ← c tanh(s_ij / c)",
    "biased": "s_ij ← s_ij + b_ij",
    "masked": "s_ij ← -∞ where the mask says no",
    "additive": "s_ij = w · tanh(q_i + k_j) = Σ w[d] tanh(q_i[d] + k_j[d])  over dims d",
    "effective": "z_i = Σ a_ij v_j,  a_ij: what the recurrence has left of v_j when q_i reads it",
    "softmax": "p_ij = exp(s_ij - m_i) / Σ exp(s_ij - m_i) = exp(s_ij - lse_i),  m_i = max s_ij",
    "online": "m' = max(m, s), r = e^(m-m'), l' = r l + Σ e^(s-m'), o' = r o + Σ e^(s-m') v",
    "mix": "z_i = Σ p_ij v_j  over keys j",
    "output": "out_i = W_O [z¹ … zᴴ] = Σ W_Oʰ zʰ over heads h,  h_i ← h_i + out_i",
    "pattern": "row i = query, column j = key, cell = p_ij; a row sums to 1",
    "predict": "softmax(W_vocabulary norm(h_i)) after the last layer",
    "cost": "one query: 2 n D + 2 n E FLOPs over n keys; a cache keeps S tokens",
    "elsewhere": "p'_ij, z'_i from the same q_i, k_j, v_j under another rule",
}


Array = NDArray[np.floating[Any]]
DIGITS = 9  # significant digits that carry a float32 exactly


class Step(NamedTuple):
    """One link of a chain: what was done, its equation, and what came out."""

    name: str
    equation: str
    values: Array


class Tensors(NamedTuple):
    """A tensor in numbers: what it is, its shape, mean and deviation, and the seconds that it took,
    None where nobody knows.
    """

    name: str
    equation: str
    shape: tuple[int, ...]
    mean: float
    std: float
    seconds: float | None


class Block(NamedTuple):
    """The online softmax behind keys start to stop: the maximum m, what the older sums were
    multiplied by, l and o.
    """

    start: int
    stop: int
    top: float
    kept: float
    total: float
    output: Array


class State(NamedTuple):
    """What a recurrence keeps of one head: the matrix S behind the query, and its norm in front of
    and behind it.
    """

    shape: tuple[int, ...]
    numbers: int
    bytes: int
    norm: float
    norm_before: float
    rank: float
    matrix: Array


class Term(NamedTuple):
    """One pattern of a mix: its factor, the sum of its row, and whether it is the one that is
    explained.
    """

    name: str
    factor: float
    row_sum: float
    here: bool


class Mixture(NamedTuple):
    """Several patterns that make one head: in words, in terms, and the row [S] that comes out, if
    there is one.
    """

    text: str
    terms: tuple[Term, ...]
    row: Array | None


class Elsewhere(NamedTuple):
    """The same q, k and v under another mechanism.

    p: of the key. top, p_top: the strongest key and its weight. effective: exp(entropy), how many
        keys it amounts to. moved: half the sum of |p' - p|, the share of the weight that moves.
        apart: |z' - z| / |z|. row: all weights [n].
    """

    name: str
    equation: str
    p: float
    top: int
    p_top: float
    effective: float
    moved: float
    apart: float
    row: Array


class Held(NamedTuple):
    """What a cache would keep for this layer: numbers for a token, tokens, and bytes; `here` is
    what it does keep.
    """

    name: str
    numbers: int
    tokens: int
    bytes: int
    here: bool


class Cost(NamedTuple):
    """What the row costs: FLOPs of scores and mix of this head, of the layer for one token, bytes
    read, and caches.
    """

    keys: int
    flops: int
    layer_flops: int
    formula: str
    bytes: int
    kept: tuple[Held, ...]


def plain(x: Any) -> Any:
    """A JSON-ready copy of a value.

    >>> plain((np.array([1.0, np.inf]), Term("a", 0.1, 1.0, True)))
    [[1.0, None], {'name': 'a', 'factor': 0.1, 'row_sum': 1.0, 'here': True}]
    """
    if isinstance(x, np.ndarray):
        return plain(x.astype(float).tolist() if x.dtype == np.float32 else x.tolist())
    if hasattr(x, "_asdict"):
        return {name: plain(value) for name, value in x._asdict().items()}
    if is_dataclass(x) and not isinstance(x, type):
        return {each.name: plain(getattr(x, each.name)) for each in fields(x)}
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (float, np.floating)):
        return float(f"{float(x):.{DIGITS}g}") if math.isfinite(x) else None
    return bool(x) if isinstance(x, np.bool_) else int(x) if isinstance(x, np.integer) else x


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
