"""Attention rollout and attention flow: how far patterns reach through the layers."""

from __future__ import annotations

from collections import deque
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from regard.errors import ArgumentError
from regard.inspect.interventions.effect_table import EffectTable
from regard.inspect.model_run import AnyModel, Input, check_option, label_positions
from regard.inspect.record.record_model import record
from regard.inspect.record.recording import Recording
from regard.language import Phrase, counted
from regard.units import plural

MAX_TOKENS = 2048
"""The largest number of tokens for rollout, whose matrices are dense."""
MAX_FLOW_TOKENS = 64
"""The largest number of tokens for flow, which solves one problem of maximum flow per token."""
CAUTION = (
    "a summary of patterns, not of what the model computes: it ignores values, norms and "
    "feed-forward layers, and takes the residual connection as one half of each layer"
)

RolloutMethod = Literal["rollout", "flow"]
"""How the patterns of the layers are combined."""
Array = NDArray[np.float64]


def rollout(
    model: AnyModel | Recording,
    text: Input | None = None,
    *,
    method: RolloutMethod = "rollout",
    query: int | None = None,
    residual: float = 0.5,
    batch: int = 0,
) -> EffectTable:
    """Combine the patterns of all layers into one map of tokens to tokens.

        A_l = (1 - r) mean over heads of P_l + r I;  rollout = A_L ... A_1

    "flow" is, for each pair, the maximum flow from the query in the last layer to the token in the
    input, through edges of the capacities A_l. Both are heuristics, and the table says so.

    Args:
        model: a model, as for `record`; or a recording.
        text: the input; None for a recording.
        method: "rollout" or "flow".
        query: for "flow" the row to compute (negative counts from the end); None computes all rows.
        residual: r, the share of the residual connection.

    Returns:
        A table of queries and tokens; each row of a rollout sums to 1, or to 0 for a query from
        which no path leads to a token: without a residual share, one that sees no key.

    Raises:
        ArgumentError: the places do not have the same tokens as queries and keys, the text is too
            long for dense matrices, or an argument is out of range.

    >>> import regard
    >>> table = rollout(regard.load("tiny"), "to be or not to")
    >>> table.values.sum(1).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3.
    """
    check_option("method", method, get_args(RolloutMethod))
    if not 0 <= residual <= 1:
        raise ArgumentError(
            f"residual is {residual}; it must be between 0 and 1", argument="residual"
        )
    recording = model if isinstance(model, Recording) else record(model, text, keep=())
    layers = layer_maps(recording, residual, batch)
    T = layers[0].shape[0]
    if method == "flow" and T > MAX_FLOW_TOKENS:
        raise ArgumentError(
            f"the text has {plural(T, 'token')}; flow is computed for {MAX_FLOW_TOKENS} at most"
        )
    if query is not None and (method != "flow" or not -T <= query < T):
        raise ArgumentError(
            f"query is {query}; it applies to method='flow' and must be from {-T} to {T - 1}",
            argument="query",
        )
    values = rolled_out(layers) if method == "rollout" else flows(layers, query)
    places = ", ".join(call.place or "the model" for call in recording.unrecorded)
    missing = (Phrase("not recorded, and missing here: {places}", places=places),) if places else ()
    names = label_positions(recording.labels(0)[0], T)
    rows = names if query is None else (names[query],)
    return EffectTable(
        Phrase("attention {method} (a heuristic)", method=Phrase(method)),
        Phrase(
            "{method} over {layers}", method=Phrase(method), layers=counted(len(layers), "layer")
        ),
        values,
        "query",
        "token",
        rows,
        names,
        notes=(CAUTION, *missing),
    )


def layer_maps(recording: Recording, residual: float, batch: int = 0) -> list[Array]:
    """Return A of each layer, `[T, T]`, with the mean over the recorded heads."""
    maps = []
    for name, place in recording.places.items():
        if place.T != place.N:
            raise ArgumentError(
                f"{name} has {plural(place.T, 'query', 'queries')} and "
                f"{plural(place.N, 'key')}; rollout needs layers of self-attention "
                "over the same tokens: record one pass, and select places"
            )
        if place.T > MAX_TOKENS:
            raise ArgumentError(
                f"{name} has {plural(place.T, 'token')}; rollout multiplies dense matrices and "
                f"takes {MAX_TOKENS} at most"
            )
        patterns = [recording.weights(name, head, batch=batch).numpy() for head in place.heads]
        maps.append((1 - residual) * np.mean(patterns, 0) + residual * np.eye(place.T))
    if len({each.shape for each in maps}) != 1:
        raise ArgumentError("the places have different numbers of tokens; select places")
    return maps


def rolled_out(layers: list[Float[np.ndarray, "T T"]]) -> Array:
    """Return the product A_L ... A_1, each row divided by its sum, if that is not 0.

    >>> rolled_out([np.eye(2), np.eye(2)]).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    product: Array = np.eye(len(layers[0]))
    for layer in layers:
        product = layer @ product
    total = product.sum(1)[:, None]
    result: Array = product / np.where(total == 0, 1, total)
    return result


def flows(layers: list[Float[np.ndarray, "T T"]], query: int | None = None) -> Array:
    """Return the maximum flow from each query of the last layer to each token of the input."""
    T, L = len(layers[0]), len(layers)
    rows = range(T) if query is None else [query % T]
    capacity = np.zeros(((L + 1) * T, (L + 1) * T))
    for depth, layer in enumerate(layers):  # node (depth, i) is token i below layer `depth`
        above, below = slice((depth + 1) * T, (depth + 2) * T), slice(depth * T, (depth + 1) * T)
        capacity[above, below] = layer
    return np.array([[_max_flow(capacity, L * T + i, j) for j in range(T)] for i in rows])


def _max_flow(capacity: Array, source: int, sink: int) -> float:
    """Return the maximum flow between two nodes (Edmonds and Karp: shortest augmenting paths)."""
    left, total = capacity.copy(), 0.0
    while True:
        parents = {source: source}
        queue = deque([source])
        while queue and sink not in parents:
            node = queue.popleft()
            for following in np.flatnonzero(left[node] > 1e-12).tolist():
                if following not in parents:
                    parents[following] = node
                    queue.append(following)
        if sink not in parents:
            return total
        path, node = [], sink
        while node != source:
            path.append((parents[node], node))
            node = parents[node]
        amount = min(left[edge] for edge in path)
        for a, b in path:
            left[a, b] -= amount
            left[b, a] += amount
        total += float(amount)
