"""The row of additive attention, whose score is a small network: v . tanh(q + k)."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.inspect.explain.capture import Capture
from regard.inspect.explain.explanation import EQUATIONS, Step
from regard.inspect.explain.softmax_row import Checks, Fields, array, softmax
from regard.nn.cross import AdditiveAttention


def additive(
    attention: AdditiveAttention, found: Capture, head: int, i: int
) -> tuple[Fields, Checks]:
    """Scores of the network, and their softmax, from the queries, keys and values at the taps.

    Raises nothing: the op has no kernel but one, and its output is compared with the head that went
    on.
    """
    q, k, v = (array(found.taps[name]) for name in ("q", "k", "v"))
    group = head // (len(q) // len(k))
    weight = array(attention.weight[head])
    terms = weight * np.tanh(q[head, i] + k[group])  # [n,D]
    s = terms.sum(1)
    row = softmax(s)

    def products(j: int) -> Any:
        return terms[j]

    fields: Fields = {
        "kind": "additive",
        "scale": 1.0,
        "sink": None,
        "scores": (
            Step("additive", EQUATIONS["additive"], s),
            Step("masked", EQUATIONS["masked"], s),
        ),
        "online": (),
        "products": products,
        "q_row": q[head, i],
        "k_rows": k[group],
        "v": v[group],
        "visible": np.ones(len(s), bool),
        "read": array(found.taps["z"][head, i]),
        **row,
    }
    return fields, {}
