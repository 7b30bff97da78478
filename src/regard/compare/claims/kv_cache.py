"""What a cache of keys and values saves: a step that reads one token against one that reads all of them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim
from regard.compare.claims.timed import by_length, exponent, fastest, ratios, seconds, setting
from regard.compare.claims.training import decoder
from regard.compare.experiment import Numbers
from regard.compare.work import decode
from regard.view.curves import Picture

LENGTHS = (32, 128, 512, 1024)


def _measure(budget: float, seed: int) -> Numbers:
    config, model = decoder(256, dim=256, layers=4, heads=8, seed=seed)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(length))
        cases: dict[str, Callable[[], object]] = {
            "cache": decode(model, config, length),
            "no cache": partial(model, ids, last=1),
        }
        with torch.inference_mode():
            caches = model.new_caches()
            model(ids[:, :-1], None, caches)
            error = float((model(ids[:, -1:], None, caches)[:, -1] - model(ids)[:, -1]).abs().max())
        times = seconds(cases, budget, rounds=7)
        rows.append({
            "length": length, "seconds": fastest(times), "speedup": ratios(times, "cache")["no cache"],
            "bytes": sum(cache.bytes for cache in caches), "error": error,
        })  # fmt: skip
    return {**setting(), "dim": 256, "layers": 4, "by_length": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    lengths = [r["length"] for r in rows]
    grows = exponent(lengths, [r["seconds"]["no cache"] for r in rows])
    flat = exponent(lengths, [r["seconds"]["cache"] for r in rows])
    return [
        Check("the next token is the same: largest difference of a logit", max(r["error"] for r in rows), high=1e-4),
        Check("a step with the cache is faster at every length: least speed-up", min(r["speedup"] for r in rows), low=1.0),
        Check("... ten times or more at the longest", rows[-1]["speedup"], low=10.0),
        Check("without it the time of a step grows with the tokens: exponent", grows, low=0.5),
        Check("with it the time hardly grows at these lengths: exponent", flat, high=0.4),
        Check("the price is memory: bytes at the longest by bytes at the shortest, per token", rows[-1]["bytes"] / rows[0]["bytes"] / lengths[-1] * lengths[0], 0.9, 1.1),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "cache", "no cache")
    return Picture("One more token, 4 layers of width 256", "tokens so far", "milliseconds", lines, "xy")  # fmt: skip


CLAIM = Claim(
    id="kv-cache",
    seeds=("S4.23", "E4.12"),
    says="A cache of keys and values speeds generation up.",
    predicts="A step reads one token instead of all: the speed-up grows with the length, for memory that grows with it too.",
    scale="A small model on this CPU, up to 1024 tokens; at great lengths a step with a cache grows as well, since it reads all keys.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="Generation is one pass per token with attention as well (E4.12): the cache makes each pass small, it does not make them parallel.",
)
"""E4.12."""
