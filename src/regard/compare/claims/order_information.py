"""What a Transformer without any positions knows of the order of its tokens: two are exchanged, and
the last row is looked at.

Without a mask every row is a sum over a set, and rows follow their tokens. Under a causal mask row
t is a sum over the first t + 1: one layer's last row is still a sum over a set, but the rows that a
second layer reads are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.compare.claims.base import Check, Claim
from regard.compare.experiment import Numbers
from regard.nn.variants import mha
from regard.view.charts import Line, Picture

DIM, HEADS, TOKENS, LAYERS = 16, 2, 6, (1, 2, 3)


@torch.no_grad()
def _moved(layers: int, x: Tensor, seed: int, *, causal: bool) -> float:
    """How far the last row moves when the first two tokens change places."""
    torch.manual_seed(seed)
    stack = [mha(DIM, HEADS, is_causal=causal).double() for _ in range(layers)]

    def last(x: Tensor) -> Tensor:
        for module in stack:
            x = x + module(x)
        return x[:, -1]

    order = [1, 0, *range(2, TOKENS)]
    return float((last(x) - last(x[:, order])).abs().max())


def _measure(_budget: float, seed: int) -> Numbers:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, DIM, generator=make, dtype=torch.float64)
    rows = [
        {
            "layers": n,
            "all": _moved(n, x, seed, causal=False),
            "causal": _moved(n, x, seed, causal=True),
        }
        for n in LAYERS
    ]
    return {"dim": DIM, "tokens": TOKENS, "by_layers": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_layers"]
    return [
        Check(
            "no mask: the most that the last row moves, over the numbers of layers",
            max(r["all"] for r in rows),
            high=1e-12,
        ),
        Check("causal, two layers: how far it moves", rows[1]["causal"], high=1e-12),
        Check("causal, one layer: how far it moves", rows[0]["causal"], role="told"),
        Check("causal, three layers: how far it moves", rows[2]["causal"], role="told"),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(title, tuple((float(r["layers"]), r[name]) for r in numbers["by_layers"]))
        for name, title in (("all", "no mask"), ("causal", "causal"))
    )
    return Picture(
        "Two tokens change places, no positions are told", "layers", "change of the last row", lines
    )


CLAIM = Claim(
    id="order-information",
    seeds=("S4.4",),
    says="A Transformer without position encodings has no information about the order of its "
    "tokens.",
    predicts="When two tokens change places, the last row stays the same: with and without a "
    "causal mask, at any number of layers.",
    scale="Exact; the size of the change is that of random weights, width 16 and six tokens.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="True without a mask. Under a causal mask the second layer reads rows that have seen "
    "more or less of the text: a language model can tell the order without any positions.",
)
"""S4.4."""
