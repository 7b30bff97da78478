"""What a cache of keys and values saves: a step that reads one token against one that reads all of
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from regard.compare.claims.base import Check, Claim, scattered
from regard.compare.claims.timed import by_length, ratios, seconds, setting, slopes
from regard.compare.claims.training import decoder
from regard.compare.experiment import Numbers
from regard.compare.speed import decode
from regard.view.charts import Picture

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
        rows.append(
            {
                "length": length,
                "times": times,
                "bytes": sum(cache.bytes for cache in caches),
                "error": error,
            }
        )
    return {**setting(), "dim": 256, "layers": 4, "by_length": rows}


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    rows = numbers["by_length"]
    return [
        Check(
            "the next token is the same: largest difference of a logit",
            max(r["error"] for r in rows),
            high=1e-4,
        ),
        *(
            scattered(
                f"a step behind {r['length']} tokens: time without the cache by time with it",
                ratios(r["times"], "no cache", "cache"),
                low=1.0,
            )
            for r in rows
        ),
        scattered(
            "time of a step without it: exponent of n", slopes(rows, "no cache"), role="told"
        ),
        scattered("time of a step with it: exponent of n", slopes(rows, "cache"), role="told"),
        Check("the price: bytes of the cache at the longest", rows[-1]["bytes"], role="told"),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "cache", "no cache")
    return Picture(
        "One more token, 4 layers of width 256", "tokens so far", "milliseconds", lines, "xy"
    )


CLAIM = Claim(
    id="kv-cache",
    seeds=("S4.23", "E4.12"),
    says="A cache of keys and values speeds generation up.",
    predicts="The same tokens in less time, at every length.",
    scale="A small model on this CPU, up to 1024 tokens; at great lengths a step with a cache "
    "grows as well, since it reads all keys.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="Generation is one pass per token with attention as well (E4.12): the cache makes each "
    "pass small, it does not make them parallel. The price is memory that grows with the "
    "tokens.",
)
"""E4.12."""
