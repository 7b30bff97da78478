"""The records of an explanation: plain arrays and strings that need no torch, and their JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from regard.deprecation import renamed_attribute

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
    "counterfactuals": "p'_ij, z'_i from the same q_i, k_j, v_j under another rule",
}


Array = NDArray[np.floating[Any]]
DIGITS = 9  # significant digits that carry a float32 exactly


class ComputationStep(NamedTuple):
    """One link of a chain: what was done, its equation, and what came out."""

    name: str
    equation: str
    values: Array


class TensorSummary(NamedTuple):
    """A tensor in numbers: what it is, its shape, mean and deviation, and the seconds that it took,
    None where nobody knows.
    """

    name: str
    equation: str
    shape: tuple[int, ...]
    mean: float
    std: float
    seconds: float | None


class SoftmaxBlock(NamedTuple):
    """The online softmax behind keys start to stop: the maximum m, what the older sums were
    multiplied by, l and o.
    """

    start: int
    stop: int
    running_max: float
    rescale: float
    running_sum: float
    running_output: Array


class RecurrentState(NamedTuple):
    """What a recurrence keeps of one head: the matrix S behind the query, and its norm in front of
    and behind it.
    """

    shape: tuple[int, ...]
    num_values: int
    bytes: int
    norm: float
    norm_before: float
    rank: float
    matrix: Array


class MixtureTerm(NamedTuple):
    """One pattern of a mix: its factor, the sum of its row, and whether it is the one that is
    explained.
    """

    name: str
    factor: float
    row_sum: float
    is_explained: bool


class Mixture(NamedTuple):
    """Several patterns that make one head: in words, in terms, and the row [S] that comes out, if
    there is one.
    """

    text: str
    terms: tuple[MixtureTerm, ...]
    row: Array | None


class Counterfactual(NamedTuple):
    """The same q, k and v under another mechanism.

    p: of the key. top, p_top: the strongest key and its weight. effective: exp(entropy), how many
        keys it amounts to. moved: half the sum of |p' - p|, the share of the weight that moves.
        apart: |z' - z| / |z|. row: all weights [n].
    """

    name: str
    equation: str
    weight: float
    top_key: int
    top_weight: float
    effective_keys: float
    total_variation: float
    relative_change: float
    weights: Array


class CacheCost(NamedTuple):
    """What a cache would keep for this layer: numbers for a token, tokens, and bytes; `here` is
    what it does keep.
    """

    name: str
    values_per_token: int
    tokens: int
    bytes: int
    is_this_layer: bool


class RowCost(NamedTuple):
    """What the row costs: FLOPs of scores and mix of this head, of the layer for one token, bytes
    read, and caches.
    """

    keys: int
    flops: int
    layer_flops: int
    formula: str
    bytes: int
    caches: tuple[CacheCost, ...]


def to_json_value(x: Any) -> Any:
    """A JSON-ready copy of a value.

    >>> to_json_value((np.array([1.0, np.inf]), MixtureTerm("a", 0.1, 1.0, True)))
    [[1.0, None], {'name': 'a', 'factor': 0.1, 'row_sum': 1.0, 'is_explained': True}]
    """
    if isinstance(x, np.ndarray):
        return to_json_value(x.astype(float).tolist() if x.dtype == np.float32 else x.tolist())
    if hasattr(x, "_asdict"):
        return {name: to_json_value(value) for name, value in x._asdict().items()}
    if is_dataclass(x) and not isinstance(x, type):
        return {each.name: to_json_value(getattr(x, each.name)) for each in fields(x)}
    if isinstance(x, dict):
        return {key: to_json_value(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [to_json_value(value) for value in x]
    if isinstance(x, (float, np.floating)):
        return float(f"{float(x):.{DIGITS}g}") if math.isfinite(x) else None
    return bool(x) if isinstance(x, np.bool_) else int(x) if isinstance(x, np.integer) else x


SCHEMA_VERSION = 3


def _nothing() -> Array:
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class Location:
    """What was run, and which query, key and head are explained.

    Attributes:
        model, text: what was run. notes: what a reader should know.
        place, mechanism, kernel, dtype, key_kind: at which attention, by what module, on which
            kernel, and what its keys are.
        kind: "softmax", "additive" (another score), or "linear" (no softmax: the weights are what
            the mechanism applies to the values).
        layer, head, group: head h reads key/value head `group` = h // (H/G).
        query, key: `query` is a token of the row side, `key` an index of the call's keys.
        call, calls: which of the calls (branches, passes) for this query, and their names.
        sizes: {"layers", "H", "G", "T", "S", "D", "E", "M"}.
        chosen_by, key_chosen_by: the rules that chose the head and the key, where rules did.
    """

    model: str
    text: str
    place: str
    mechanism: str
    layer: int
    head: int
    group: int
    query: int
    key: int
    sizes: dict[str, int]
    kind: str = "softmax"
    kernel: str = ""
    dtype: str = "float32"
    key_kind: str = "keys"
    call: int = 0
    calls: tuple[str, ...] = ("",)
    chosen_by: str = ""
    key_chosen_by: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class RowTokens:
    """The tokens of the row: ids, pieces and positions of its n keys, the piece and the position of
    the query, and the pieces of all queries.
    """

    ids: NDArray[np.integer[Any]]
    pieces: tuple[str, ...]
    positions: NDArray[np.integer[Any]]
    query_piece: str
    query_position: int
    row_pieces: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RotaryAngles:
    """Pairs of the rotary embedding and their angles in radians: of the keys [n, pairs], and of the
    query [pairs].

    Attributes:
        layout: "half" or "interleaved"; "" where nothing is turned.
        pairs: for each dim the pair that it belongs to, -1 where it is not turned.
    """

    layout: str
    angles: Array
    angle: Array
    pairs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class InputChain:
    """How the query, the keys and the values came about.

    Attributes:
        q: the steps of the query [D]. k: the steps of all keys [n, D].
        values: the steps of the values. v: the values [n, E].
        rotary: the angles of queries and keys.
    """

    q: tuple[ComputationStep, ...]
    k: tuple[ComputationStep, ...]
    values: tuple[ComputationStep, ...]
    v: Array
    rotary: RotaryAngles


@dataclass(frozen=True, eq=False)
class ScoreChain:
    """The scores of the row.

    Attributes:
        scale: the factor on q . k.
        steps: from q . k to the masked score, each [n], -inf where masked.
        products: the terms [D] of q . k of the key.
        masked: for each key, why the query may not see it; "" where it may.
    """

    scale: float
    steps: tuple[ComputationStep, ...]
    products: Array
    masked: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SoftmaxRow:
    """The softmax of the row: m, exp(s - m) [n], their sum, ln sum exp(s), and the weights p [n].

    Attributes:
        sink: the head's sink logit, one more term of the weights' denominator, or None; it is not
            in the sum, nor in the lse.
        online: the same, block by block.
    """

    row_max: float
    exps: Array
    total: float
    lse: float
    weights: Array
    sink: float | None = None
    online: tuple[SoftmaxBlock, ...] = ()


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """What follows the weights.

    Attributes:
        contributions, mixed, z: p_j v_j [n, E], their sum [E], and the head behind what finishes
            it [E'].
        joined: z of all heads.
        head_out: what this head writes [M].
        shares: each head's share of `out`, (out_h . out) / (out . out): together 1, less the share
            of a bias.
        out: what attention writes [M].
    """

    contributions: Array
    mixed: Array
    z: Array
    joined: Array
    head_out: Array
    shares: Array
    out: Array


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The hidden state of the query token on its way, [M] each, empty where nothing was recorded:
    embedded, entering the layer, as attention was given it, and behind the residual path.
    """

    embedding: Array = field(default_factory=_nothing)
    entering: Array = field(default_factory=_nothing)
    normed: Array = field(default_factory=_nothing)
    residual: Array = field(default_factory=_nothing)


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """Weights of whole heads.

    Attributes:
        whole: of the head that is explained [T, n], NaN where masked; [0, 0] for long texts.
        pool, small: every head of the layer [H, t, s], each cell the largest weight of pool x pool,
            NaN where masked.
    """

    whole: Array = field(default_factory=lambda: np.zeros((0, 0)))
    pool: int = 0
    small: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))


T = TypeVar("T")


class Shortcut(Generic[T]):
    """A number of an explanation by its short name: `found.weights` is `found.softmax.weights`."""

    def __init__(self, read: Callable[[Explanation], T]) -> None:
        self._read = read

    @overload
    def __get__(self, found: None, owner: type[Explanation]) -> Shortcut[T]: ...

    @overload
    def __get__(self, found: Explanation, owner: type[Explanation]) -> T: ...

    def __get__(self, found: Explanation | None, owner: type[Explanation]) -> T | Shortcut[T]:
        return self if found is None else self._read(found)


@dataclass(frozen=True, eq=False)
class Explanation:
    """One query and one key, in one head of one layer: every number from the embedding to the
    prediction.

    Letters as everywhere: T queries, n keys of the call, M model dim, H query heads, G key/value
    heads, D and E dims of one head. Recorded arrays have the model's own values; recomputed ones
    are float64, and `checks` says how far they are apart. Every number of the parts is also an
    attribute of the explanation itself, under its own name: `found.weights`, `found.q`.

    Attributes:
        where: what was run, and which query, key and head are explained.
        tokens: the tokens of the row.
        hidden: the hidden state of the query token.
        inputs: how the query, the keys and the values came about.
        score: the scores of the row; `scores` are its steps.
        softmax: the softmax of the row.
        output: values mixed, heads joined, and what attention writes.
        heads: weights of whole heads; `pattern` and `patterns` are its arrays.
        mixture, state, cost, elsewhere: of mixed heads; of recurrences; what the row costs; the
            same row under other mechanisms.
        predictions: the likeliest tokens: (piece, id, probability).
        tensors: of the whole layer: each stage's name, equation, shape, mean, std and seconds; None
            where nobody timed it.
        checks: what was compared -> largest absolute difference.
        equations: step -> equation.
    """

    where: Location
    tokens: RowTokens
    hidden: HiddenStates
    inputs: InputChain
    score: ScoreChain
    softmax: SoftmaxRow
    output: HeadOutput
    heads: HeadPatterns
    checks: dict[str, float]
    cost: RowCost | None = None
    mixture: Mixture | None = None
    state: RecurrentState | None = None
    counterfactuals: tuple[Counterfactual, ...] = ()
    predictions: tuple[tuple[str, int, float], ...] = ()
    tensors: tuple[TensorSummary, ...] = ()
    equations: dict[str, str] = field(default_factory=lambda: dict(EQUATIONS))

    elsewhere = renamed_attribute("counterfactuals")
    keys_are = renamed_attribute("key_kind")

    model = Shortcut(lambda found: found.where.model)
    text = Shortcut(lambda found: found.where.text)
    place = Shortcut(lambda found: found.where.place)
    mechanism = Shortcut(lambda found: found.where.mechanism)
    layer = Shortcut(lambda found: found.where.layer)
    head = Shortcut(lambda found: found.where.head)
    group = Shortcut(lambda found: found.where.group)
    query = Shortcut(lambda found: found.where.query)
    key = Shortcut(lambda found: found.where.key)
    sizes = Shortcut(lambda found: found.where.sizes)
    kind = Shortcut(lambda found: found.where.kind)
    kernel = Shortcut(lambda found: found.where.kernel)
    dtype = Shortcut(lambda found: found.where.dtype)
    key_kind = Shortcut(lambda found: found.where.key_kind)
    call = Shortcut(lambda found: found.where.call)
    calls = Shortcut(lambda found: found.where.calls)
    chosen_by = Shortcut(lambda found: found.where.chosen_by)
    key_chosen_by = Shortcut(lambda found: found.where.key_chosen_by)
    notes = Shortcut(lambda found: found.where.notes)
    ids = Shortcut(lambda found: found.tokens.ids)
    pieces = Shortcut(lambda found: found.tokens.pieces)
    positions = Shortcut(lambda found: found.tokens.positions)
    query_piece = Shortcut(lambda found: found.tokens.query_piece)
    query_position = Shortcut(lambda found: found.tokens.query_position)
    row_pieces = Shortcut(lambda found: found.tokens.row_pieces)
    embedding = Shortcut(lambda found: found.hidden.embedding)
    entering = Shortcut(lambda found: found.hidden.entering)
    normed = Shortcut(lambda found: found.hidden.normed)
    residual = Shortcut(lambda found: found.hidden.residual)
    q = Shortcut(lambda found: found.inputs.q)
    k = Shortcut(lambda found: found.inputs.k)
    values = Shortcut(lambda found: found.inputs.values)
    v = Shortcut(lambda found: found.inputs.v)
    layout = Shortcut(lambda found: found.inputs.rotary.layout)
    angles = Shortcut(lambda found: found.inputs.rotary.angles)
    angle = Shortcut(lambda found: found.inputs.rotary.angle)
    pairs = Shortcut(lambda found: found.inputs.rotary.pairs)
    scale = Shortcut(lambda found: found.score.scale)
    scores = Shortcut(lambda found: found.score.steps)
    products = Shortcut(lambda found: found.score.products)
    masked = Shortcut(lambda found: found.score.masked)
    row_max = Shortcut(lambda found: found.softmax.row_max)
    exps = Shortcut(lambda found: found.softmax.exps)
    total = Shortcut(lambda found: found.softmax.total)
    lse = Shortcut(lambda found: found.softmax.lse)
    weights = Shortcut(lambda found: found.softmax.weights)
    sink = Shortcut(lambda found: found.softmax.sink)
    online = Shortcut(lambda found: found.softmax.online)
    contributions = Shortcut(lambda found: found.output.contributions)
    mixed = Shortcut(lambda found: found.output.mixed)
    z = Shortcut(lambda found: found.output.z)
    joined = Shortcut(lambda found: found.output.joined)
    head_out = Shortcut(lambda found: found.output.head_out)
    shares = Shortcut(lambda found: found.output.shares)
    out = Shortcut(lambda found: found.output.out)
    pattern = Shortcut(lambda found: found.heads.whole)
    pool = Shortcut(lambda found: found.heads.pool)
    patterns = Shortcut(lambda found: found.heads.small)

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
        """All of it as JSON-ready values, flat: arrays as lists, numbers to 9 digits, null where
        masked or not finite.
        """
        found: dict[str, Any] = {"schema": SCHEMA_VERSION, "check": to_json_value(self.check)}
        short = [name for name, each in vars(type(self)).items() if isinstance(each, Shortcut)]
        for name in (*short, *NESTED_FIELDS):
            found[name] = to_json_value(getattr(self, name))
        found["chain"] = [
            {"name": n, "equation": e, "value": to_json_value(x)} for n, e, x in self.chain
        ]
        found["predictions"] = [
            {"piece": piece, "id": index, "probability": to_json_value(p)}
            for piece, index, p in self.predictions
        ]
        return found

    def _repr_html_(self) -> str:
        """The terminal page as inert text, for a notebook."""
        from regard.view.explanation_text import page

        text = "\n".join(line.plain for line in page(self.as_dict()))
        return f'<pre style="line-height:1.2">{html.escape(text)}</pre>'


NESTED_FIELDS = ("checks", "cost", "mixture", "state", "counterfactuals", "tensors", "equations")
"""The parts that `as_dict` gives as they are; of the others it gives every number by its name."""
