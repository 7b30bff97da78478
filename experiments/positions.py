"""Claims about positions: the effect of an encoding on scores, order without one, rotated values.

The plotted schemes have a query and a key that match, q = k in every pair of dims. The scores are
p_i . p_j / D for sinusoidal positions, B(m) / (d/2) for rotary ones, and -m_h |i - j| for ALiBi.

Without positions and without a mask every row is a sum over a set, and rows are permuted with their
tokens. Under a causal mask row t is a sum over the first t + 1 tokens. With one layer the last row
is still a sum over a set; with two layers it is not, since the rows that the second layer reads
depend on the order.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from experiments.claim import (
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
from experiments.small_training import BYTES, byte_loss, small_decoder, train_on_bytes
from regard.biases import alibi_slopes
from regard.compare.experiment import Numbers
from regard.models.decoder import Decoder
from regard.nn import Attention, SeparateQKV
from regard.nn.variants import mha
from regard.positions import Rotary, long_term_decay, rope_frequencies, rotate, sinusoidal
from regard.span import Positions, Span
from regard.view.charts import Line, Picture

D, HEADS, FAR = 64, 8, 256
SHIFT = 1000


def _rotary(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Return the scores of a query at start + FAR - 1 with keys at start .. start + FAR - 1."""
    inv_freq = rope_frequencies(D).inv_freq
    rotated = rotate(k.expand(1, 1, FAR, D), Span(start, FAR), inv_freq)
    return (rotate(q, Span(start + FAR - 1, 1), inv_freq) @ rotated.mT)[0, 0, 0] / D


def _measure(_budget: float, seed: int) -> Numbers:
    table = sinusoidal(FAR + SHIFT, D).double()
    sine = {
        name: (table[start : start + FAR] @ table[start + FAR - 1] / D).flip(0)
        for name, start in (("here", 0), ("there", SHIFT))
    }
    ones = torch.ones(1, 1, 1, D, dtype=torch.float64)
    rope = {
        name: _rotary(ones, ones, start).flip(0) for name, start in (("here", 0), ("there", SHIFT))
    }
    alibi = -torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)[:, None] * torch.arange(FAR)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 1, D, generator=generator, dtype=torch.float64).unbind(0)
    rotary_change = (_rotary(q, k, 0) - _rotary(q, k, SHIFT)).abs().max()
    sinusoidal_change = (
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
            "sinusoidal, with content": float(sinusoidal_change),
            "rotary, with content": float(rotary_change),
        },
        "formula": float(
            (rope["here"] - 2 * long_term_decay(D, 10000.0, range(FAR)) / D).abs().max()
        ),
    }


def _falls(values: list[float]) -> float:
    """Return the share of steps to a larger distance that lower the score."""
    return sum(b < a for a, b in pairwise(values)) / (len(values) - 1)


def _checks(numbers: Numbers) -> list[Criterion]:
    def near_minus_far(name: str) -> float:
        return float(sum(numbers[name][:16]) / 16 - sum(numbers[name][-64:]) / 64)

    return [
        Criterion(
            "sinusoidal: mean score of the 16 nearest keys minus that of the 64 farthest",
            near_minus_far("sinusoidal"),
            low=0.1,
        ),
        Criterion(
            "rotary: mean score of the 16 nearest keys minus that of the 64 farthest",
            near_minus_far("rotary"),
            low=0.1,
        ),
        Criterion(
            "ALiBi: share of steps to a larger distance that lower the score, smallest over the "
            "heads",
            min(map(_falls, numbers["alibi"])),
            low=1.0,
        ),
        Criterion(
            "sinusoidal: share of steps to a larger distance that lower the score",
            _falls(numbers["sinusoidal"]),
            low=1.0,
            role="limit",
        ),
        Criterion(
            "rotary: share of steps to a larger distance that lower the score",
            _falls(numbers["rotary"]),
            low=1.0,
            role="limit",
        ),
    ]


def _checks_distance(numbers: Numbers) -> list[Criterion]:
    moved = numbers["moved"]
    return [
        Criterion(
            "rotary, random queries and keys: change of the scores when all positions are shifted",
            moved["rotary, with content"],
            high=1e-12,
        ),
        Criterion(
            "sinusoidal, added to random tokens: change of the scores when all positions are "
            "shifted",
            moved["sinusoidal, with content"],
            high=1e-5,
        ),
        Criterion(
            "sinusoidal, without tokens: change of the scores when all positions are shifted",
            moved["sinusoidal alone"],
            role="reported",
        ),
        Criterion(
            "rotary: largest difference from its formula 2/d sum cos(m theta)",
            numbers["formula"],
            high=1e-12,
            role="control",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
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
        "Score of a matching key by distance (ALiBi: the bias, cut off at -1.5)",
        "distance",
        "score",
        lines,
    )


_UNTRAINED = (
    "The schemes before training, base 10000, 64 dims. Trained models also make use of rotary "
    "scores at large distances."
)

CLAIM = Claim(
    id="positions",
    sources=(NoteSection(OUTLINE, "position encodings"),),
    statement="Sinusoidal, rotary and ALiBi positions give near tokens higher scores than far "
    "ones.",
    prediction="The score of a query and a key that match is smaller at a distance, with each of "
    "the three.",
    scope=_UNTRAINED,
    measure=_measure,
    checks=_checks,
    picture=_picture,
    measured_with="positions",
    takeaway="On average all three do. Only with ALiBi does every step to a larger distance lower "
    "the score: sinusoidal and rotary scores oscillate while they fall.",
)

DISTANCE = Claim(
    id="positions-distance",
    sources=(NoteSection(OUTLINE, "position encodings"),),
    statement="Under sinusoidal and rotary positions a score depends on the distance of two tokens "
    "alone.",
    prediction="No score changes when all positions are shifted by the same number.",
    scope=_UNTRAINED,
    measure=_measure,
    checks=_checks_distance,
    picture=_picture,
    measured_with="positions",
    takeaway="True of rotary positions, and of sinusoidal ones alone. If sinusoidal positions are "
    "added to tokens, the scores also have products of tokens and positions.",
)


ORDER_DIM, ORDER_HEADS, ORDER_TOKENS, ORDER_LAYERS = 16, 2, 6, (1, 2, 3)


@torch.no_grad()
def _last_row_change(layers: int, x: Tensor, seed: int, *, causal: bool) -> float:
    """Return the change of the last row when the first two tokens are swapped."""
    torch.manual_seed(seed)
    stack = [mha(ORDER_DIM, ORDER_HEADS, is_causal=causal).double() for _ in range(layers)]

    def last(x: Tensor) -> Tensor:
        for module in stack:
            x = x + module(x)
        return x[:, -1]

    order = [1, 0, *range(2, ORDER_TOKENS)]
    return float((last(x) - last(x[:, order])).abs().max())


def _measure_order(_budget: float, seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, ORDER_TOKENS, ORDER_DIM, generator=generator, dtype=torch.float64)
    rows = [
        {
            "layers": n,
            "all": _last_row_change(n, x, seed, causal=False),
            "causal": _last_row_change(n, x, seed, causal=True),
        }
        for n in ORDER_LAYERS
    ]
    return {"dim": ORDER_DIM, "tokens": ORDER_TOKENS, "by_layers": rows}


def _checks_order(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_layers"]
    return [
        Criterion(
            "no mask: largest change of the last row, over the numbers of layers",
            max(r["all"] for r in rows),
            high=1e-12,
        ),
        Criterion("causal mask, two layers: change of the last row", rows[1]["causal"], high=1e-12),
        Criterion(
            "causal mask, one layer: change of the last row", rows[0]["causal"], role="reported"
        ),
        Criterion(
            "causal mask, three layers: change of the last row", rows[2]["causal"], role="reported"
        ),
    ]


def _picture_order(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(title, tuple((float(r["layers"]), r[name]) for r in numbers["by_layers"]))
        for name, title in (("all", "no mask"), ("causal", "causal"))
    )
    return Picture(
        "Two tokens are swapped, without position encodings",
        "layers",
        "change of the last row",
        lines,
    )


ORDER_INFORMATION = Claim(
    id="order-information",
    sources=(NoteSection(OVERVIEW, "1.2"),),
    statement="A Transformer without position encodings has no information about the order of its "
    "tokens.",
    prediction="When two tokens are swapped, the last row stays the same, with and without a "
    "causal mask, for any number of layers.",
    scope="Exact; the size of the change depends on the random weights, width 16 and six tokens.",
    measure=_measure_order,
    checks=_checks_order,
    picture=_picture_order,
    takeaway="True without a mask. Under a causal mask the rows that the second layer reads depend "
    "on different numbers of tokens, so that a language model can determine the order without "
    "position encodings.",
)


WAYS = ("q, k", "q, k, v rotated back", "q, k, v not rotated back")
"""The names of the three models: rotated queries and keys, and rotated values with and without an
inverse rotation of the output.
"""
VALUES_DIM, VALUES_HEADS, VALUES_SEEDS = 64, 4, 3
VALUES_STEPS, VALUES_CONTEXT = 200, 96


class RotatedValues(SeparateQKV):
    """A projection that rotates its values, like the queries and keys of `before`.

    `Attention` calls `query`, which stores the positions, before `postprocess` rotates back.
    """

    def __init__(self, before: SeparateQKV, *, back: bool) -> None:
        super().__init__(before.q, before.k, before.v)
        self.back = back
        self.rotary = Rotary(before.v.head_dim)
        self._query_positions: Positions = Span(0, 0)

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the rotated queries, and store their positions for `postprocess`."""
        assert positions is not None
        self._query_positions = positions
        return super().query(x, positions)

    def remember(self, x: Tensor, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the rotated values."""
        assert positions is not None
        k, v = super().remember(x, positions)
        return k, self.rotary(v, positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Return R(-i) z_i where the output is rotated back, else z."""
        return rotate(z, self._query_positions, -self.rotary.inv_freq) if self.back else z


def _model(way: str, seed: int) -> Decoder:
    """Return a decoder with random weights, whose values are rotated or not."""
    _, model = small_decoder(BYTES, dim=VALUES_DIM, heads=VALUES_HEADS, seed=seed)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        if way != WAYS[0]:
            before = attention.project
            assert isinstance(before, SeparateQKV)
            attention.project = RotatedValues(before, back=way == WAYS[1])
    return model


@torch.no_grad()
def _shift_change(model: Decoder) -> float:
    """Return the change of the logits when all positions are shifted, in standard deviations."""
    model64 = model.double()
    ids = torch.arange(24)[None] * 7 % BYTES
    here, there = (model64(ids, Span(start, 24)) for start in (0, 1000))
    change = float((here - there).abs().max() / here.std())
    model.float()
    return change


def _measure_values(budget: float, seed: int) -> Numbers:
    count, rows = num_steps(budget, VALUES_STEPS), []
    for way in WAYS:
        losses, moved = [], 0.0
        for trial in range(seed, seed + num_seeds(budget, VALUES_SEEDS)):
            model = _model(way, trial)
            train_on_bytes(model, count, context=VALUES_CONTEXT, seed=trial)
            losses.append(byte_loss(model, VALUES_CONTEXT, rows=32))
            # measured after training: the outputs of an untrained model are 0
            moved = max(moved, _shift_change(model))
        rows.append({"way": way, "losses": losses, "moved": moved})
    return {
        "steps": count,
        "seeds": num_seeds(budget, VALUES_SEEDS),
        "dim": VALUES_DIM,
        "by_way": rows,
    }


def _checks_values(numbers: Numbers) -> list[Criterion]:
    plain, back, bare = numbers["by_way"]
    gains = [a - b for a, b in zip(plain["losses"], back["losses"], strict=True)]
    worse = [a - b for a, b in zip(bare["losses"], plain["losses"], strict=True)]
    return [
        median_criterion(
            "values rotated and rotated back: loss without it minus loss, nats per byte, for each "
            "seed",
            gains,
            high=0.01,
        ),
        median_criterion(
            "values rotated and not rotated back: loss minus loss without it, nats per byte",
            worse,
            role="reported",
        ),
    ]


def _checks_values_inverse(numbers: Numbers) -> list[Criterion]:
    plain, back, bare = numbers["by_way"]
    return [
        Criterion(
            "queries and keys rotated: change of the logits when all positions are shifted",
            plain["moved"],
            high=1e-9,
            role="control",
        ),
        Criterion(
            "values rotated too, not rotated back: change of the logits when all positions are "
            "shifted",
            bare["moved"],
            low=1e-3,
        ),
        Criterion(
            "values rotated too, and rotated back: change of the logits when all positions are "
            "shifted",
            back["moved"],
            high=1e-9,
        ),
    ]


def _picture_values(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(row["way"], tuple((float(i), loss) for i, loss in enumerate(row["losses"])))
        for row in numbers["by_way"]
    )
    return Picture(
        "Loss on validation text, with different projections rotated by position",
        "seed",
        "nats per byte",
        lines,
    )


VALUES = Claim(
    id="values",
    sources=(NoteSection(ATTN_JOURNEY, "6.3"),),
    statement="Rotating values as well as queries and keys brings no benefit.",
    prediction="With rotated values and an output that is rotated back, the loss is at most 0.01 "
    "nats per byte lower.",
    scope="Two layers of width 64, three seeds, a minute of training on text. Differences of 0.01 "
    "nats do not carry over to large models.",
    measure=_measure_values,
    checks=_checks_values,
    picture=_picture_values,
    measured_with="values",
    takeaway="Whether it helps must be measured by the loss, and is open for large models.",
)

INVERSE = Claim(
    id="values-inverse",
    sources=(NoteSection(ATTN_JOURNEY, "6.3"),),
    statement="Rotated values need an inverse rotation.",
    prediction="With it the model depends on distances alone; without it, the model depends on the "
    "position at which the text begins.",
    scope="Exact, on trained models of two layers in fp64.",
    measure=_measure_values,
    checks=_checks_values_inverse,
    picture=_picture_values,
    measured_with="values",
    takeaway="The inverse rotation R(-i) of the output is a few lines of code, and makes the "
    "values relative too.",
)

CLAIMS = (ORDER_INFORMATION, CLAIM, DISTANCE, VALUES, INVERSE)
