"""GPT's attention, with one matrix for queries, keys and values, against three matrices: the same function, timed in turns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim
from regard.compare.claims.timed import by_length, fastest, ratios, seconds, setting
from regard.compare.experiment import Numbers
from regard.nn import Attention, Fused, Separate
from regard.nn.variants import gpt, mha
from regard.view.curves import Picture

DIM, HEADS = 512, 8
LENGTHS = (1, 16, 128, 512)


def _pair() -> tuple[Attention, Attention]:
    """Fused and separate, with the same weights."""
    fused, apart = gpt(DIM, HEADS, bias=False).eval(), mha(DIM, HEADS, is_causal=True).eval()
    rows, parts = fused.project, apart.project
    assert isinstance(rows, Fused)
    assert isinstance(parts, Separate)
    with torch.no_grad():
        rows.linear.weight.copy_(
            torch.cat([part.linear.weight for part in (parts.q, parts.k, parts.v)])
        )
    fused.output.load_state_dict(apart.output.state_dict())
    return fused, apart


def _measure(budget: float, _seed: int) -> Numbers:
    fused, apart = _pair()
    unmasked = mha(DIM, HEADS).eval()
    unmasked.load_state_dict(apart.state_dict())
    rows = []
    for length in LENGTHS:
        x = torch.randn(2, length, DIM)
        cases = {
            "fused": partial(fused, x),
            "separate": partial(apart, x),
            "separate, no mask": partial(unmasked, x),
        }
        times = seconds(cases, budget)
        found, to = fastest(times), ratios(times, "separate")
        with torch.no_grad():
            error = float((fused(x) - apart(x)).abs().max())
        rows.append({"length": length, "seconds": found, "ratio": to["fused"], "no_mask": to["separate, no mask"], "error": error})  # fmt: skip
    work = [fused.describe(128), apart.describe(128)]
    return {
        **setting(), "dim": DIM, "heads": HEADS, "batch": 2, "by_length": rows,
        "flops": [one.flops_per_token.value for one in work],
        "parameters": [one.parameters.value for one in work],
    }  # fmt: skip


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    flops, parameters = numbers["flops"], numbers["parameters"]
    return [
        Check("both compute the same: largest difference", max(r["error"] for r in rows), high=1e-4),
        Check("both have as many parameters and FLOPs: ratios", max(flops[0] / flops[1], parameters[0] / parameters[1]), 1.0, 1.0),
        Check("fused takes less time: its share, geometric mean over the lengths", geometric_mean([r["ratio"] for r in rows]), high=0.95),
        *(
            Check(f"... at {r['length']} tokens", r["ratio"], high=0.95, essential=False)
            for r in rows
        ),
        Check("... and its mask is why: unmasked by masked, at the longest", rows[-1]["no_mask"], low=1.1, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "fused", "separate", "separate, no mask")
    return Picture("GPT's attention and multi-head attention, width 512, the same weights", "tokens", "milliseconds", lines, "xy")  # fmt: skip


CLAIM = Claim(
    id="fused",
    seeds=("S2.20", "S2.21", "S2.25", "E2.8", "X5"),
    says="GPT's attention is faster than standard multi-head attention (the note times them once, cold, with dropout in one of them).",
    predicts="Equal arithmetic: a fused matrix saves two calls and two readings of the input, which shows at few tokens at most.",
    scale="One layer of GPT-1's head count on this CPU, warm, in turns, without dropout. On a GPU, where a call costs more, fusing saves more.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="No arithmetic is saved (E2.8); timings compare only warm, in turns, and with dropout off in both (X5).",
)
"""S2.20."""
