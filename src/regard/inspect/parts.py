"""The parts of an explanation, and how they become JSON: nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
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
