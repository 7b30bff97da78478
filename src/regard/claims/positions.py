"""Claims about positions: what an encoding does to scores, order without one, and rotated values.

The pictured schemes score a query and a key that match, q = k in every pair of dims: sinusoidal
p_i . p_j / D, rotary B(m) / (d/2), ALiBi -m_h |i - j|.

Without positions and without a mask every row is a sum over a set, and rows follow their tokens.
Under a causal mask row t is a sum over the first t + 1 tokens. One layer's last row is still a sum
over a set, but the rows that a second layer reads are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.biases import alibi_slopes
from regard.claims.claim import (
    ATTN_JOURNEY,
    OUTLINE,
    OVERVIEW,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
    num_seeds,
    num_steps,
)
from regard.claims.small_training import BYTES, byte_loss, small_decoder, train_on_bytes
from regard.compare.experiment import Numbers
from regard.models.decoder import Decoder
from regard.nn import Attention, Separate
from regard.nn.variants import mha
from regard.positions import Rotary, long_term_decay, rope_frequencies, rotate, sinusoidal
from regard.span import Positions, Span
from regard.view.charts import Line, Picture

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


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    def nearer(name: str) -> float:
        return float(sum(numbers[name][:16]) / 16 - sum(numbers[name][-64:]) / 64)

    return [
        Criterion(
            "sinusoids: mean score of the 16 nearest less that of the 64 farthest",
            nearer("sinusoidal"),
            low=0.1,
        ),
        Criterion("rotary: likewise", nearer("rotary"), low=0.1),
        Criterion(
            "ALiBi: share of steps away that lower the score, the least of its heads",
            min(map(_falls, numbers["alibi"])),
            low=1.0,
        ),
        Criterion(
            "sinusoids: share of steps away that lower the score",
            _falls(numbers["sinusoidal"]),
            low=1.0,
            role="limit",
        ),
        Criterion("rotary: likewise", _falls(numbers["rotary"]), low=1.0, role="limit"),
    ]


def _checks_distance(numbers: Mapping[str, Any]) -> list[Criterion]:
    moved = numbers["moved"]
    return [
        Criterion(
            "rotary, with random content: change of the scores when all positions move",
            moved["rotary, with content"],
            high=1e-12,
        ),
        Criterion(
            "sinusoids added to random content: likewise",
            moved["sinusoidal, with content"],
            high=1e-5,
        ),
        Criterion(
            "sinusoids among themselves: likewise", moved["sinusoidal alone"], role="reported"
        ),
        Criterion(
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
    sources=(NoteSection(OUTLINE, "position encodings"),),
    statement="Sinusoidal, rotary and ALiBi positions give near tokens higher scores than far ones.",
    prediction="A query and a key that match score less at a distance, under each of the three.",
    scope=_UNTRAINED,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="positions",
    takeaway="On the whole all three do; at every step only ALiBi: sinusoids and rotations wave as "
    "they fall.",
)

DISTANCE = Claim(
    id="positions-distance",
    sources=(NoteSection(OUTLINE, "position encodings"),),
    statement="Under sinusoidal and rotary positions a score depends on the distance of two tokens "
    "alone.",
    prediction="No score changes when all positions move by the same number.",
    scope=_UNTRAINED,
    measure=_measure,
    checks=_checks_distance,
    picture=_picture,
    measured_with="positions",
    takeaway="True of rotations, and of sinusoids among themselves; added to content, sinusoids "
    "bring in products of content and position.",
)


ORDER_DIM, ORDER_HEADS, ORDER_TOKENS, ORDER_LAYERS = 16, 2, 6, (1, 2, 3)


@torch.no_grad()
def _last_row_change(layers: int, x: Tensor, seed: int, *, causal: bool) -> float:
    """How far the last row moves when the first two tokens change places."""
    torch.manual_seed(seed)
    stack = [mha(ORDER_DIM, ORDER_HEADS, is_causal=causal).double() for _ in range(layers)]

    def last(x: Tensor) -> Tensor:
        for module in stack:
            x = x + module(x)
        return x[:, -1]

    order = [1, 0, *range(2, ORDER_TOKENS)]
    return float((last(x) - last(x[:, order])).abs().max())


def _measure_order(_budget: float, seed: int) -> Numbers:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1, ORDER_TOKENS, ORDER_DIM, generator=make, dtype=torch.float64)
    rows = [
        {
            "layers": n,
            "all": _last_row_change(n, x, seed, causal=False),
            "causal": _last_row_change(n, x, seed, causal=True),
        }
        for n in ORDER_LAYERS
    ]
    return {"dim": ORDER_DIM, "tokens": ORDER_TOKENS, "by_layers": rows}


def _checks_order(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_layers"]
    return [
        Criterion(
            "no mask: the most that the last row moves, over the numbers of layers",
            max(r["all"] for r in rows),
            high=1e-12,
        ),
        Criterion("causal, two layers: how far it moves", rows[1]["causal"], high=1e-12),
        Criterion("causal, one layer: how far it moves", rows[0]["causal"], role="reported"),
        Criterion("causal, three layers: how far it moves", rows[2]["causal"], role="reported"),
    ]


def _picture_order(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(title, tuple((float(r["layers"]), r[name]) for r in numbers["by_layers"]))
        for name, title in (("all", "no mask"), ("causal", "causal"))
    )
    return Picture(
        "Two tokens change places, no positions are told", "layers", "change of the last row", lines
    )


ORDER_INFORMATION = Claim(
    id="order-information",
    sources=(NoteSection(OVERVIEW, "1.2"),),
    statement="A Transformer without position encodings has no information about the order of its "
    "tokens.",
    prediction="When two tokens change places, the last row stays the same: with and without a "
    "causal mask, at any number of layers.",
    scope="Exact; the size of the change is that of random weights, width 16 and six tokens.",
    measure=_measure_order,
    checks=_checks_order,
    picture=_picture_order,
    takeaway="True without a mask. Under a causal mask the second layer reads rows that have seen "
    "more or less of the text: a language model can tell the order without any positions.",
)


WAYS = ("q, k", "q, k, v turned back", "q, k, v not turned back")
VALUES_DIM, VALUES_HEADS, VALUES_SEEDS = 64, 4, 3
VALUES_STEPS, VALUES_CONTEXT = 200, 96


class RotatedValues(Separate):
    """A projection that rotates its values too, not only its queries and keys.

    Attention asks for the queries of a call first, so the projection keeps their positions for
    rotating the output back.

    Args:
        before: a projection with rotary queries and keys, whose heads are used as they are.
        back: whether the output of attention is rotated back.

    >>> _, model = small_decoder(BYTES, dim=16, heads=2)
    >>> turned = RotatedValues(model.layers[0].attention.project, back=True)
    >>> turned.remember(torch.zeros(1, 3, 16), Span(0, 3))[1].shape
    torch.Size([1, 2, 3, 8])
    """

    def __init__(self, before: Separate, *, back: bool) -> None:
        super().__init__(before.q, before.k, before.v)
        self.back = back
        self.rotary = Rotary(before.v.head_dim)
        self._at: Positions = Span(0, 0)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the rotated queries, and keep their positions."""
        assert positions is not None
        self._at = positions
        return super().query(x, positions)

    def remember(self, x: Tensor, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the rotated values."""
        assert positions is not None
        k, v = super().remember(x, positions)
        return k, self.rotary(v, positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Return R(-i) z_i where the output is rotated back, else z."""
        return rotate(z, self._at, -self.rotary.inv_freq) if self.back else z


def _model(way: str, seed: int) -> Decoder:
    _, model = small_decoder(BYTES, dim=VALUES_DIM, heads=VALUES_HEADS, seed=seed)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        if way != WAYS[0]:
            before = attention.project
            assert isinstance(before, Separate)
            attention.project = RotatedValues(before, back=way == WAYS[1])
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


def _measure_values(budget: float, seed: int) -> Numbers:
    count, rows = num_steps(budget, VALUES_STEPS), []
    for way in WAYS:
        losses, moved = [], 0.0
        for trial in range(seed, seed + num_seeds(budget, VALUES_SEEDS)):
            model = _model(way, trial)
            train_on_bytes(model, count, context=VALUES_CONTEXT, seed=trial)
            losses.append(byte_loss(model, VALUES_CONTEXT, rows=32))
            moved = max(moved, _moved(model))  # a fresh model's outputs are 0: nothing would move
        rows.append({"way": way, "losses": losses, "moved": moved})
    return {
        "steps": count,
        "seeds": num_seeds(budget, VALUES_SEEDS),
        "dim": VALUES_DIM,
        "by_way": rows,
    }


def _checks_values(numbers: Mapping[str, Any]) -> list[Criterion]:
    plain, back, bare = numbers["by_way"]
    gains = [a - b for a, b in zip(plain["losses"], back["losses"], strict=True)]
    worse = [a - b for a, b in zip(bare["losses"], plain["losses"], strict=True)]
    return [
        median_criterion(
            "values turned and turned back: nats per byte gained, seed by seed", gains, high=0.01
        ),
        median_criterion(
            "values turned and not turned back: nats per byte lost", worse, role="reported"
        ),
    ]


def _checks_values_inverse(numbers: Mapping[str, Any]) -> list[Criterion]:
    plain, back, bare = numbers["by_way"]
    return [
        Criterion(
            "queries and keys turned: change of the logits when all positions move",
            plain["moved"],
            high=1e-9,
            role="control",
        ),
        Criterion("values turned too, and not turned back: likewise", bare["moved"], low=1e-3),
        Criterion("values turned too, and turned back: likewise", back["moved"], high=1e-9),
    ]


def _picture_values(numbers: Mapping[str, Any]) -> Picture:
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


VALUES = Claim(
    id="values",
    sources=(NoteSection(ATTN_JOURNEY, "6.3"),),
    statement="Turning values as well as queries and keys brings no benefit.",
    prediction="At most a hundredth of a nat per byte gained, when what was turned is turned back.",
    scope="Two layers of width 64, three seeds, a minute on text: a difference of hundredths of a "
    "nat says nothing of large models.",
    measure=_measure_values,
    checks=_checks_values,
    picture=_picture_values,
    measured_with="values",
    takeaway="Whether it helps is for the loss to say, and is open at the size of real models.",
)

INVERSE = Claim(
    id="values-inverse",
    sources=(NoteSection(ATTN_JOURNEY, "6.3"),),
    statement="Turned values need an inverse rotation.",
    prediction="With it the model depends on distances alone, and without it on where the text "
    "begins.",
    scope="Exact, on trained models of two layers in fp64.",
    measure=_measure_values,
    checks=_checks_values_inverse,
    picture=_picture_values,
    measured_with="values",
    takeaway="It is a few lines: R(-i) behind the mix makes values relative too.",
)

CLAIMS = (ORDER_INFORMATION, CLAIM, DISTANCE, VALUES, INVERSE)
