"""How work and time grow with the length: the exponent of n for full, windowed, strided and linear attention, and for recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from regard import attend, plan
from regard.compare.claims.base import Check, Claim
from regard.compare.claims.timed import by_length, exponent, fastest, seconds, setting
from regard.compare.experiment import Numbers
from regard.linear import linear_attention
from regard.masks import Causal, Mask, Strided, Window
from regard.models.rnn import CELLS
from regard.nn.variants import mha
from regard.view.curves import Picture

LENGTHS = (1024, 2048, 4096, 8192)
H, D, WINDOW = 2, 64, 128


def _masks(length: int) -> dict[str, Mask]:
    return {"full": Causal(), "window": Causal() & Window(WINDOW), "strided": Causal() & Strided(round(length**0.5))}  # fmt: skip


def _measure(budget: float, _seed: int) -> Numbers:
    rows = []
    for length in LENGTHS:
        q, k, v = torch.randn(3, 1, H, length, D).unbind(0)
        masks = _masks(length)
        cases: dict[str, Callable[[], object]] = {
            name: partial(attend, q, k, v, mask=mask) for name, mask in masks.items()
        }
        cases["linear"] = partial(linear_attention, q, k, v)
        where = {name: plan(q, k, v, mask=mask) for name, mask in masks.items()}
        rows.append({
            "length": length,
            "seconds": fastest(seconds(cases, budget, rounds=5, limit=12.0)),
            "pairs": {name: _pairs(mask, length) for name, mask in masks.items()},
            "kernel": {name: one.kernel for name, one in where.items()},
        })  # fmt: skip
    return {**setting(), "heads": H, "head_dim": D, "window": WINDOW, "by_length": rows}


def _pairs(mask: Mask, length: int) -> int:
    """How many pairs the mask allows, 512 rows at a time."""
    keys = torch.arange(length)[None]
    return sum(int(mask.allows(torch.arange(at, at + 512)[:, None], keys).sum()) for at in range(0, length, 512))  # fmt: skip


def _slope(rows: Sequence[Mapping[str, Any]], what: str, name: str) -> float:
    return exponent([r["length"] for r in rows], [r[what][name] for r in rows])


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    return [
        Check("pairs of full attention: exponent of n", _slope(rows, "pairs", "full"), 1.95, 2.05),
        Check("pairs of a window", _slope(rows, "pairs", "window"), 0.95, 1.1),
        Check("pairs of a stride of sqrt(n)", _slope(rows, "pairs", "strided"), 1.4, 1.6),
        Check("time of full attention, the three longest", _slope(rows[1:], "seconds", "full"), 1.6, 2.3),
        Check("time of a window", _slope(rows[1:], "seconds", "window"), high=1.35),
        Check("time of linear attention", _slope(rows[1:], "seconds", "linear"), high=1.35),
        Check("time of a stride of sqrt(n): as its pairs", _slope(rows[1:], "seconds", "strided"), 1.2, 1.8, essential=False),
        Check("linear is the fastest at the longest: its time by that of the window", rows[-1]["seconds"]["linear"] / rows[-1]["seconds"]["window"], high=1.0, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "full", "window", "strided", "linear")
    return Picture("A prompt of n tokens, 2 heads of 64", "n", "milliseconds", lines, "xy")


CLAIM = Claim(
    id="exponents",
    seeds=("S4.21", "S4.22", "S5.15", "S5.17", "S5.18", "E4.10"),
    says="Full attention costs n^2, sparse attention n log n, linear attention n.",
    predicts="2 for full; a window is linear and a stride of sqrt(n) has 1.5: n log n is hashing, not these. A kernel must skip what is masked to show it.",
    scale="Up to 8192 tokens on this CPU: times have constant parts, and a stride is skipped by tiles only, which it leaves none of empty.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="The exponent of a pattern is that of its pairs (E4.10); time follows where a kernel can skip whole tiles.",
)
"""S4.22."""

SHORT = (128, 512, 2048)


def _measure_order(budget: float, _seed: int) -> Numbers:
    attention, network = mha(D, 1, is_causal=True).eval(), CELLS["lstm"](D, D, 1, batch_first=True)
    rows = []
    for length in SHORT:
        x = torch.randn(4, length, D)
        cases = {"attention": partial(attention, x), "lstm": partial(network, x)}
        rows.append({"length": length, "seconds": fastest(seconds(cases, budget, rounds=9))})  # fmt: skip
    return {**setting(), "dim": D, "batch": 4, "by_length": rows}


def _checks_order(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    first, last = rows[0], rows[-1]
    lengths = [r["length"] for r in rows]
    return [
        Check("the LSTM's time grows as the tokens: exponent", exponent(lengths, [r["seconds"]["lstm"] for r in rows]), 0.7, 1.2),
        Check("attention is faster at the shortest: its share of the time", first["seconds"]["attention"] / first["seconds"]["lstm"], high=1.0),
        Check("... and at the longest, where its work is n^2", last["seconds"]["attention"] / last["seconds"]["lstm"], high=1.0, essential=False),
        Check("attention's time grows less than the tokens: exponent", exponent(lengths, [r["seconds"]["attention"] for r in rows]), high=1.0, essential=False),
    ]  # fmt: skip


def _picture_order(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "attention", "lstm")
    return Picture("Reading n tokens of width 64, 4 rows", "n", "milliseconds", lines, "xy")


ORDER = Claim(
    id="order",
    seeds=("S4.5", "S4.23", "E4.12"),
    says="Recurrence is not parallel: each token waits for the one before, where attention sees all at once.",
    predicts="An LSTM's n steps are taken one after another, and its time is linear from the first token on; attention has one step, and its n^2 shows later.",
    scale="One layer of width 64 on few cores, which have little to be parallel with: on a GPU the distance is far larger.",
    measure=_measure_order,
    checks=_checks_order,
    picture=_picture_order,
    timed=True,
    lesson="Few steps in order against more work: with few cores and long rows the order of the work matters less.",
)
"""S4.5."""
