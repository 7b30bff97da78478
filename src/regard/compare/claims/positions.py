"""Position encodings in one picture: how the score of a query and a key that match falls with their distance.

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
    ).abs().max() / D  # fmt: skip
    return {
        "dim": D, "far": FAR, "shift": SHIFT,
        "sinusoidal": sine["here"].tolist(), "rotary": rope["here"].tolist(),
        "alibi": [row.tolist() for row in alibi[:: HEADS - 1]],
        "moved": {
            "sinusoidal alone": float((sine["here"] - sine["there"]).abs().max()),
            "sinusoidal, with content": float(added), "rotary, with content": float(moved),
        },
        "formula": float((rope["here"] - 2 * long_term_decay(D, 10000.0, range(FAR)) / D).abs().max()),
    }  # fmt: skip


def _falls(values: list[float]) -> float:
    """The share of steps away that lower the score."""
    return sum(b < a for a, b in pairwise(values)) / (len(values) - 1)


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    moved = numbers["moved"]
    near_and_far = [
        sum(numbers[name][:16]) / 16 - sum(numbers[name][-64:]) / 64
        for name in ("sinusoidal", "rotary")
    ]
    return [
        Check("near tokens score higher than far ones: least difference of means, sinusoidal and rotary", min(near_and_far), low=0.1),
        Check("rotary scores depend on the distance alone: change under a shift", moved["rotary, with content"], high=1e-12),
        Check("... by the formula B(m) = 2/d sum cos(m theta): distance", numbers["formula"], high=1e-12),
        Check("ALiBi falls at every step away, in every head: share", min(map(_falls, numbers["alibi"])), low=1.0),
        Check("sinusoids among themselves too: change under a shift", moved["sinusoidal alone"], high=1e-5),
        Check("rotary falls at every step away: share of steps", _falls(numbers["rotary"]), low=1.0, essential=False),
        Check("added to content, sinusoids keep that: change under a shift", moved["sinusoidal, with content"], high=1e-5, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    def line(name: str, values: list[float]) -> Line:
        return Line(name, tuple((float(m), max(value, -1.5)) for m, value in enumerate(values)))

    steep, flat = numbers["alibi"]
    lines = (
        line("sinusoidal", numbers["sinusoidal"]), line("rotary", numbers["rotary"]),
        line("ALiBi, steepest head", steep), line("ALiBi, flattest head", flat),
    )  # fmt: skip
    return Picture("What is left of a match at a distance (ALiBi: what is added, cut at -1.5)", "distance", "score", lines)  # fmt: skip


CLAIM = Claim(
    id="positions",
    seeds=("S5.19", "S5.20", "S5.21", "S5.26"),
    says="Position encodings make near tokens count for more: sinusoids added to embeddings, rotations of queries and keys, linear biases.",
    predicts="All three fall with the distance on the whole; only ALiBi at every step; rotations and biases depend on the distance alone.",
    scale="The schemes before any training, base 10000, 64 dims: a trained model may use the far tail of a rotation, and does.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="Rotary waves as it falls; sinusoids depend on the distance among themselves, and no longer once content is added to them.",
)
"""S5.19."""
