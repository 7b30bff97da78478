"""Turning values as well as queries and keys, with the output turned back and without.

z_i = R(-i) sum_j p_ij R(j) v_j = sum_j p_ij R(j - i) v_j: turned back, it depends on the distance as scores do
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.compare.claims.base import Check, Claim, scattered, steps
from regard.compare.claims.training import BYTES, byte_loss, decoder, read_bytes
from regard.compare.experiment import Numbers
from regard.models.decoder import Decoder
from regard.nn import Attention, Separate
from regard.positions import Rotary, rotate
from regard.span import Positions, Span
from regard.view.charts import Line, Picture

WAYS = ("q, k", "q, k, v turned back", "q, k, v not turned back")
DIM, HEADS, SEEDS = 64, 4, 3
STEPS, CONTEXT = 200, 96


class TurnedValues(Separate):
    """As a projection with rotary queries and keys, with rotary values too; z is turned back where
    asked.

    The positions of a call are those that its queries were asked for: attention asks for them
    first.

    Args:
        before: its heads are used as they are.
        back: whether what attention gives is turned back.

    >>> _, model = decoder(BYTES, dim=16, heads=2)
    >>> turned = TurnedValues(model.layers[0].attention.project, back=True)
    >>> turned.remember(torch.zeros(1, 3, 16), Span(0, 3))[1].shape
    torch.Size([1, 2, 3, 8])
    """

    def __init__(self, before: Separate, *, back: bool) -> None:
        super().__init__(before.q, before.k, before.v)
        self.back = back
        self.rotary = Rotary(before.v.head_dim)
        self._at: Positions = Span(0, 0)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """As before."""
        assert positions is not None
        self._at = positions
        return super().query(x, positions)

    def remember(self, x: Tensor, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Keys as before, and values turned."""
        assert positions is not None
        k, v = super().remember(x, positions)
        return k, self.rotary(v, positions)

    def finish(self, z: Tensor, x: Tensor) -> Tensor:
        """R(-i) z_i, or z as it is."""
        return rotate(z, self._at, -self.rotary.inv_freq) if self.back else z


def _model(way: str, seed: int) -> Decoder:
    _, model = decoder(BYTES, dim=DIM, heads=HEADS, seed=seed)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        if way != WAYS[0]:
            before = attention.project
            assert isinstance(before, Separate)
            attention.project = TurnedValues(before, back=way == WAYS[1])
    return model


@torch.no_grad()
def _moved(model: Decoder) -> float:
    """How far a shift of all positions moves the logits, in deviations of the logits."""
    double = model.double()
    ids = torch.arange(24)[None] * 7 % BYTES
    here, there = (double(ids, Span(at, 24)) for at in (0, 1000))
    moved = float((here - there).abs().max() / here.std())
    model.float()
    return moved


def _measure(budget: float, seed: int) -> Numbers:
    count, rows = steps(budget, STEPS), []
    for way in WAYS:
        losses, moved = [], 0.0
        for trial in range(seed, seed + SEEDS):
            model = _model(way, trial)
            read_bytes(model, count, context=CONTEXT, seed=trial)
            losses.append(byte_loss(model, CONTEXT, rows=32))
            moved = max(moved, _moved(model))  # a fresh model's outputs are 0: nothing would move
        rows.append({"way": way, "losses": losses, "moved": moved})
    return {"steps": count, "seeds": SEEDS, "dim": DIM, "by_way": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    plain, back, bare = numbers["by_way"]
    gains = [a - b for a, b in zip(plain["losses"], back["losses"], strict=True)]
    worse = [a - b for a, b in zip(bare["losses"], plain["losses"], strict=True)]
    return [
        scattered(
            "values turned and turned back: nats per byte gained, seed by seed", gains, high=0.01
        ),
        scattered("values turned and not turned back: nats per byte lost", worse, role="told"),
    ]


def _checks_inverse(numbers: Mapping[str, Any]) -> list[Check]:
    plain, back, bare = numbers["by_way"]
    return [
        Check(
            "queries and keys turned: change of the logits when all positions move",
            plain["moved"],
            high=1e-9,
            role="control",
        ),
        Check("values turned too, and not turned back: likewise", bare["moved"], low=1e-3),
        Check("values turned too, and turned back: likewise", back["moved"], high=1e-9),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(row["way"], tuple((float(i), loss) for i, loss in enumerate(row["losses"])))
        for row in numbers["by_way"]
    )
    return Picture(
        "What is turned by its position: loss on text that was not trained on",
        "seed",
        "nats per byte",
        lines,
    )


CLAIM = Claim(
    id="values",
    seeds=("S2.22", "E2.10"),
    says="Turning values as well as queries and keys brings no benefit.",
    predicts="At most a hundredth of a nat per byte gained, when what was turned is turned back.",
    scale="Two layers of width 64, three seeds, a minute on text: a difference of hundredths of a "
    "nat says nothing of large models.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    shares="values",
    lesson="Whether it helps is for the loss to say, and is open at the size of real models "
    "(E2.10).",
)
"""E2.10."""

INVERSE = Claim(
    id="values-inverse",
    seeds=("S2.22", "E2.10"),
    says="Turned values need an inverse rotation.",
    predicts="With it the model depends on distances alone, and without it on where the text "
    "begins.",
    scale="Exact, on trained models of two layers in fp64.",
    measure=_measure,
    checks=_checks_inverse,
    picture=_picture,
    shares="values",
    lesson="It is a few lines: R(-i) behind the mix makes values relative too (E2.10).",
)
"""S2.22."""
