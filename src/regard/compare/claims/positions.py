"""Position encodings in one picture: how the score of a query and a key that match falls with their
distance.

q = k in every pair of dims, so that what is left is the scheme: sinusoid p_i . p_j / D, rotary B(m) / (d/2), ALiBi -m_h |i - j|
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.biases import alibi_slopes
from regard.compare.claims.base import Check, Claim
from regard.compare.experiment import Numbers
from regard.positions import long_term_decay, rope_frequencies, rotate, sinusoidal
from regard.span import Span
from regard.view.curves import Line, Picture

D, HEADS, FAR = 64, 8, 256
SHIFT = 1000


def _rotary(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Scores of the query at start + FAR - 1 with keys at start .. start + FAR - 1."""
    inv_freq = rope_frequencies(D).inv_freq
    turned = rotate(k.expand(1, 1, FAR, D), Span(start, FAR), inv_freq)
    return (rotate(q, Span(start + FAR - 1, 1), inv_freq) @ turned.mT)[0, 0, 0] / D


def _measure(_budget: float, seed: int) -> Numbers:
    table = sinusoidal(FAR + SHIFT, D).double()
    sine = {
        name: (table[at : at + FAR] @ table[at + FAR - 1] / D).flip(0)
        for name, at in (("here", 0), ("there", SHIFT))
    }
    ones = torch.ones(1, 1, 1, D, dtype=torch.float64)
    rope = {name: _rotary(ones, ones, at).flip(0) for name, at in (("here", 0), ("there", SHIFT))}
    alibi = -torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)[:, None] * torch.arange(FAR)
    make = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 1, D, generator=make, dtype=torch.float64).unbind(0)
    moved = (_rotary(q, k, 0) - _rotary(q, k, SHIFT)).abs().max()
    added = (
        (table[FAR - 1] + q[0, 0, 0]) @ (table[:FAR] + k[0, 0]).mT
        - (table[FAR - 1 + SHIFT] + q[0, 0, 0]) @ (table[SHIFT : SHIFT + FAR] + k[0, 0]).mT
    ).abs().max() / D
    return {
        "dim": D,
        "far": FAR,
        "shift": SHIFT,
        "sinusoidal": sine["here"].tolist(),
        "rotary": rope["here"].tolist(),
        "alibi": [row.tolist() for row in alibi[:: HEADS - 1]],
        "moved": {
            "sinusoidal alone": float((sine["here"] - sine["there"]).abs().max()),
            "sinusoidal, with content": float(added),
            "rotary, with content": float(moved),
        },
        "formula": float(
            (rope["here"] - 2 * long_term_decay(D, 10000.0, range(FAR)) / D).abs().max()
        ),
    }


def _falls(values: list[float]) -> float:
    """The share of steps away that lower the score."""
    return sum(b < a for a, b in pairwise(values)) / (len(values) - 1)


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    def nearer(name: str) -> float:
        values: list[float] = numbers[name]
        return sum(values[:16]) / 16 - sum(values[-64:]) / 64

    return [
        Check(
            "sinusoids: mean score of the 16 nearest less that of the 64 farthest",
            nearer("sinusoidal"),
            low=0.1,
        ),
        Check("rotary: likewise", nearer("rotary"), low=0.1),
        Check(
            "ALiBi: share of steps away that lower the score, the least of its heads",
            min(map(_falls, numbers["alibi"])),
            low=1.0,
        ),
        Check(
            "sinusoids: share of steps away that lower the score",
            _falls(numbers["sinusoidal"]),
            low=1.0,
            role="limit",
        ),
        Check("rotary: likewise", _falls(numbers["rotary"]), low=1.0, role="limit"),
    ]


def _checks_distance(numbers: Mapping[str, Any]) -> list[Check]:
    moved = numbers["moved"]
    return [
        Check(
            "rotary, with random content: change of the scores when all positions move",
            moved["rotary, with content"],
            high=1e-12,
        ),
        Check(
            "sinusoids added to random content: likewise",
            moved["sinusoidal, with content"],
            high=1e-5,
        ),
        Check("sinusoids among themselves: likewise", moved["sinusoidal alone"], role="told"),
        Check(
            "rotary by its formula 2/d sum cos(m theta): distance",
            numbers["formula"],
            high=1e-12,
            role="control",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    def line(name: str, values: list[float]) -> Line:
        return Line(name, tuple((float(m), max(value, -1.5)) for m, value in enumerate(values)))

    steep, flat = numbers["alibi"]
    lines = (
        line("sinusoidal", numbers["sinusoidal"]),
        line("rotary", numbers["rotary"]),
        line("ALiBi, steepest head", steep),
        line("ALiBi, flattest head", flat),
    )
    return Picture(
        "What is left of a match at a distance (ALiBi: what is added, cut at -1.5)",
        "distance",
        "score",
        lines,
    )


_UNTRAINED = (
    "The schemes before any training, base 10000, 64 dims: a trained model may use the "
    "far tail of a rotation, and does."
)

CLAIM = Claim(
    id="positions",
    seeds=("S5.19", "S5.20", "S5.21", "S5.26"),
    says="Sinusoidal, rotary and ALiBi positions give near tokens higher scores than far ones.",
    predicts="A query and a key that match score less at a distance, under each of the three.",
    scale=_UNTRAINED,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    shares="positions",
    lesson="On the whole all three do; at every step only ALiBi: sinusoids and rotations wave as "
    "they fall.",
)
"""S5.19."""

DISTANCE = Claim(
    id="positions-distance",
    seeds=("S5.19", "S5.20", "S5.21"),
    says="Under sinusoidal and rotary positions a score depends on the distance of two tokens "
    "alone.",
    predicts="No score changes when all positions move by the same number.",
    scale=_UNTRAINED,
    measure=_measure,
    checks=_checks_distance,
    picture=_picture,
    shares="positions",
    lesson="True of rotations, and of sinusoids among themselves; added to content, sinusoids "
    "bring in products of content and position.",
)
"""S5.21."""
