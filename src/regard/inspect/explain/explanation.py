"""The data classes of an explanation: arrays and strings without torch, and their JSON form."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.untrusted_text import tuple_repr

EQUATIONS: dict[str, str] = {
    "tokens": "text → token ids, and their positions",
    "hidden": "x_i = norm(h_i),  h_i = embedding + outputs of the earlier layers",
    "rotate": "(a, b) → (a cos φ - b sin φ, b cos φ + a sin φ),  φ = position × θ",
    "dot": "q_i · k_j = Σ q_i[d] k_j[d]  over dims d",
    "scaled": "s_ij = scale × q_i · k_j,  scale = 1/√D unless the model sets another",
    "capped": "s_ij ← c tanh(s_ij / c)",
    "biased": "s_ij ← s_ij + b_ij",
    "masked": "s_ij ← -∞ where the mask forbids it",
    "additive": "s_ij = w · tanh(q_i + k_j) = Σ w[d] tanh(q_i[d] + k_j[d])  over dims d",
    "effective": "z_i = Σ a_ij v_j,  a_ij: factor of v_j in z_i",
    "softmax": "p_ij = exp(s_ij - m_i) / Σ exp(s_ij - m_i) = exp(s_ij - lse_i),  m_i = max s_ij",
    "online": "m' = max(m, s), r = e^(m-m'), l' = r l + Σ e^(s-m'), o' = r o + Σ e^(s-m') v",
    "mix": "z_i = Σ p_ij v_j  over keys j",
    "output": "out_i = W_O [z¹ … zᴴ] = Σ W_Oʰ zʰ over heads h,  h_i ← h_i + out_i",
    "pattern": "row i = query, column j = key, cell = p_ij; a row sums to 1",
    "predict": "softmax(W_vocabulary norm(h_i)) after the last layer",
    "cost": "one query: 2 n D + 2 n E FLOPs over n keys; a cache stores S tokens",
    "counterfactuals": "p'_ij, z'_i from the same q_i, k_j, v_j under another rule",
}


Array = NDArray[np.floating]
DIGITS = 9  # significant digits that represent a float32 exactly


class ComputationStep(NamedTuple):
    """One step of a computation.

    Args:
        name: the name of the step.
    """

    name: str
    equation: str
    values: Array

    def __repr__(self) -> str:
        return tuple_repr(self)


class TensorSummary(NamedTuple):
    """The statistics of a tensor of a layer; `seconds` is None if it was not measured."""

    name: str
    equation: str
    shape: tuple[int, ...]
    mean: float
    std: float
    seconds: float | None


class SoftmaxBlock(NamedTuple):
    """The state of the online softmax after the keys `start` to `stop`.

    Args:
        running_sum: sum l of exp(s - m).
        running_output: sum o of exp(s - m) v, `[E]`.
    """

    start: int
    stop: int
    running_max: float
    rescale: float
    running_sum: float
    running_output: Array


class RecurrentState(NamedTuple):
    """The recurrent state S of one head; `rank` is exp of the entropy of its singular values.

    Args:
        rank: effective rank of S, exp of the entropy of its singular values.
    """

    shape: tuple[int, ...]
    num_values: int
    bytes: int
    norm: float
    norm_before: float
    rank: float
    matrix: Array


class MixtureTerm(NamedTuple):
    """One of the patterns that are combined in a head, such as "call 0" or "window"."""

    name: str
    factor: float
    row_sum: float
    is_explained: bool


class Mixture(NamedTuple):
    """Several patterns that are combined in one head; `row` `[S]` is their result, if any."""

    text: str
    terms: tuple[MixtureTerm, ...]
    row: Array | None


class Counterfactual(NamedTuple):
    """The row under another rule, with the same q, k and v.

    Args:
        effective_keys: exp(entropy) of the weights.
        total_variation: total variation distance from the actual weights, sum |p' - p| / 2.
        relative_change: |z' - z| / |z|.
        weights: all weights, `[n]`.
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
    """The size of a cache for this layer."""

    name: str
    values_per_token: int
    tokens: int
    bytes: int
    is_this_layer: bool


class RowCost(NamedTuple):
    """The cost of the row.

    Args:
        flops: FLOPs of scores and weighted sum in this head.
        layer_flops: FLOPs of the layer for one decoded token, or 0 if unknown.
        formula: the formula of `layer_flops`.
    """

    keys: int
    flops: int
    layer_flops: int
    formula: str
    bytes: int
    caches: tuple[CacheCost, ...]


def to_json_value(x: object) -> Any:
    """Return a copy of a value that JSON can represent; numbers that are not finite become None.

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
"""Version of the keys of `Explanation.as_dict`."""


def _empty_array() -> Array:
    """Return an array without entries, which stands for a vector that was not recorded."""
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class Location:
    """What was run, and which query, key and head are explained.

    Args:
        mechanism: class of the attention module.
        group: the key/value head that it reads, h // (H/G).
        sizes: {"layers", "H", "G", "T", "S", "D", "E", "M"}.
        kind: "softmax", "additive" (the scores are not q . k), or "linear" (no softmax; the weights
            are those that the mechanism applies to the values).
        key_kind: what the keys are, such as "keys" or "latents".
        call: index of the call, where there are several for this query.
        calls: names of the calls (branches, passes) for this query.
        chosen_by: the rule that chose the head; "" if it was given.
        key_chosen_by: the rule that chose the key; "" if it was given.
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
    """The tokens of the row: of the keys `[n]`, of the query, and of every query of the call.

    Args:
        words: (start, stop, text) of each word, if the keys are the tokens of the text in order.
    """

    ids: NDArray[np.integer]
    pieces: tuple[str, ...]
    positions: NDArray[np.integer]
    query_piece: str
    query_position: int
    row_pieces: tuple[str, ...]
    words: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, eq=False)
class RotaryAngles:
    """The angles of the rotary embedding, in radians.

    Args:
        layout: "half" or "interleaved"; "" without rotary embedding.
        angles: angles of the keys, `[n, pairs]`.
        angle: angles of the query, `[pairs]`.
        pairs: the pair that each dim belongs to; -1 for a dim that is not rotated.
    """

    layout: str
    angles: Array
    angle: Array
    pairs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class InputChain:
    """How the query, the keys and the values were computed.

    Args:
        q: the steps of the query, each `[D]`.
        k: the steps of the keys, each `[n, D]`.
        v: the values, `[n, E]`.
    """

    q: tuple[ComputationStep, ...]
    k: tuple[ComputationStep, ...]
    values: tuple[ComputationStep, ...]
    v: Array
    rotary: RotaryAngles


@dataclass(frozen=True, eq=False)
class ScoreChain:
    """The scores of the row.

    Args:
        steps: from q . k to the masked score, each `[n]`; -inf where masked.
        products: the D terms of q . k for the explained key.
        masked: for each key, why the query may not see it; "" where it may.
    """

    scale: float
    steps: tuple[ComputationStep, ...]
    products: Array
    masked: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SoftmaxRow:
    """The softmax of the row.

    Args:
        exps: exp(s - m), `[n]`.
        lse: ln sum exp(s).
        sink: sink logit of the head, one more term of the denominator of the weights, or None; it
            is not part of `total`, nor of `lse`.
        online: the same computation block by block.
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
    """The output of the head and of the attention, computed from the weights.

    Args:
        contributions: p_j v_j, `[n, E]`.
        mixed: their sum, `[E]`.
        z: output of the head after a gate, norm or map, `[E']`.
        head_out: what this head adds to `out`, `[M]`.
        shares: each head's share of `out`, (out_h . out) / (out . out); they sum to 1, less the
            share of a bias.
        out: output of the attention, `[M]`.
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
    """The hidden state of the query token at four points, and of the key, `[M]` each; empty where
    it was not recorded.

    Args:
        normed: the input of the attention, x_i.
        normed_key: the input of the attention at the token of the explained key, x_j.
    """

    embedding: Array = field(default_factory=_empty_array)
    entering: Array = field(default_factory=_empty_array)
    normed: Array = field(default_factory=_empty_array)
    residual: Array = field(default_factory=_empty_array)
    normed_key: Array = field(default_factory=_empty_array)


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """The weights of whole heads.

    Args:
        whole: pattern of the explained head, `[T, n]`, NaN where masked; empty (`[0, 0]`) for long
            texts.
        pool: number of queries, and of keys, that a cell of `small` covers.
        small: pooled patterns of every head of the layer, `[H, t, s]`; each cell is the largest of
            pool x pool weights, NaN where all are masked.
    """

    whole: Array = field(default_factory=lambda: np.zeros((0, 0)))
    pool: int = 0
    small: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))


@dataclass(frozen=True, eq=False)
class Explanation:
    """One query and one key, in one head of one layer: every number from the embedding to the
    prediction.

    The letters are those of the package: T queries, n keys of the call, M model dim, H query heads,
    G key/value heads, D and E dims of one head. Recorded arrays have the model's own values;
    recomputed ones are float64, and `checks` gives their differences. Every number of the parts is
    also an attribute of the explanation itself, under its own name: `explanation.weights`,
    `explanation.q`.

    Args:
        where: what was run, and which query, key and head are explained.
        inputs: how the query, the keys and the values were computed.
        score: the scores of the row; `scores` are its steps.
        output: the weighted values, the joined heads, and the output of the attention.
        heads: the weights of whole heads; `pattern` and `patterns` are its arrays.
        checks: the largest absolute difference from the model, by the name of the quantity.
        mixture: how several patterns are combined in the head, if they are.
        state: the recurrent state, if there is one.
        counterfactuals: the same row under other mechanisms.
        predictions: the most likely next tokens: (piece, id, probability).
        tensors: the tensors of the whole layer, stage by stage.
        equations: the equation of each step, by the name of the step.
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

    def __getattr__(self, name: str) -> Any:
        """Return a number of a part under its own name."""
        if name in _PART_OF:
            part, own = _PART_OF[name]
            return getattr(attrgetter(part)(self), own)
        raise AttributeError(name, name=name, obj=self)

    @property
    def check(self) -> float:
        """Return the largest difference between a recomputed number and that of the model."""
        return max(self.checks.values())

    @property
    def equation(self) -> str:
        """Return the whole computation in one line."""
        return "out = W_O [z_1 .. z_H],  z_i = sum_j p_ij v_j,  p_i = softmax(q_i k_j scale + mask)"

    @property
    def chain(self) -> tuple[tuple[str, str, float], ...]:
        """Return the score of the explained key, step by step: (name, equation, value)."""
        return tuple(
            (step.name, step.equation, float(step.values[self.key])) for step in self.scores
        )

    def as_dict(self) -> dict[str, object]:
        """Return all of it as flat JSON values.

        Returns:
            A dict in which arrays are lists, numbers have 9 significant digits, and masked or
            non-finite numbers are None.
        """
        result: dict[str, object] = {"schema": SCHEMA_VERSION, "check": to_json_value(self.check)}
        for name in (*_PART_OF, *NESTED_FIELDS):
            result[name] = to_json_value(getattr(self, name))
        result["chain"] = [
            {"name": n, "equation": e, "value": to_json_value(x)} for n, e, x in self.chain
        ]
        result["predictions"] = [
            {"piece": piece, "id": index, "probability": to_json_value(p)}
            for piece, index, p in self.predictions
        ]
        return result

    def __repr__(self) -> str:
        where = self.where
        pair = f"query {where.query}, key {where.key}"
        return f"Explanation({where.place}, head {where.head}, {pair})"

    def _repr_html_(self) -> str:
        """Return the terminal page as static text, for a notebook."""
        from regard.view.explanation_text import page

        text = "\n".join(line.plain for line in page(self.as_dict()))
        return f'<pre style="line-height:1.2">{html.escape(text)}</pre>'


NESTED_FIELDS = ("checks", "cost", "mixture", "state", "counterfactuals", "tensors", "equations")
"""Fields that `as_dict` keeps nested; the numbers of the other parts are flattened."""

_OTHER_NAMES = {"steps": "scores", "whole": "pattern", "small": "patterns"}
"""Numbers of a part whose name would say too little beside those of the other parts."""


def _numbers(part: str, kind: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """Generate the name of each number of a part in the explanation, and where it is."""
    for each in fields(kind):
        if each.name == "rotary":
            yield from _numbers("inputs.rotary", RotaryAngles)
        else:
            yield _OTHER_NAMES.get(each.name, each.name), (part, each.name)


_PART_OF = {
    name: where
    for part, kind in (
        ("where", Location),
        ("tokens", RowTokens),
        ("hidden", HiddenStates),
        ("inputs", InputChain),
        ("score", ScoreChain),
        ("softmax", SoftmaxRow),
        ("output", HeadOutput),
        ("heads", HeadPatterns),
    )
    for name, where in _numbers(part, kind)
}
"""The numbers of all parts by name: the part of the explanation, and the name in it."""
