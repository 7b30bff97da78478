"""Every wrong implementation, how it is audited, and the names that it must be given, no
more and no fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.audit.faulty_code import base, calls, masks, steps


class Wrong(NamedTuple):
    target: Callable[..., Any]
    names: tuple[str, ...]
    options: dict[str, Any]


def wrong(target: Callable[..., Any], *names: str, **options: Any) -> Wrong:
    return Wrong(target, names, options)


SIZES = {"dim": 16, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}
WINDOW = {**SIZES, "causal": True, "window": 4}
HALF = {"adapter": "rotary"}

FAULTY_CODE = (
    wrong(masks.SeedOne, "mask-polarity", **SIZES),
    wrong(masks.inverted, "mask-polarity", mask="keep"),
    wrong(masks.inverted, "mask-polarity"),
    wrong(masks.Unmasked, "future-leak", **SIZES, causal=True),
    wrong(masks.first_row, "mask-rows"),
    wrong(masks.empty_row, "empty-row", "garbage-leak", strict=True),
    wrong(masks.PaddingCounted, "padding-leak", **GROUPED, causal=False),
    wrong(steps.Unscaled, "scale-missing", **SIZES),
    wrong(steps.one_more, "weights-sum"),
    wrong(steps.BrainScores, "precision-lost", **SIZES),
    wrong(steps.NaiveSoftmax, "softmax-overflow", **SIZES),
    wrong(steps.Tiled, "gqa-head-order", **GROUPED),
    wrong(steps.TiledTwiceScaled, "gqa-head-order", "scale-twice", **GROUPED),
    wrong(steps.JoinedRows, "heads-joined", **SIZES),
    wrong(steps.Mixed, "rotary-mixed", **SIZES),
    wrong(steps.OneMore, "window-off-by-one", **WINDOW),
    wrong(steps.OneLess, "window-off-by-one", **WINDOW),
    wrong(steps.half_precision, "rotary-precision", **HALF),
    wrong(calls.dropout_on, "dropout-in-eval"),
    wrong(calls.FirstLength, "state-kept", **SIZES),
    wrong(calls.Clocked, "not-repeatable", **SIZES),
    wrong(calls.in_place, "input-changed"),
    wrong(calls.MixedRows, "batch-mixing", **SIZES),
    wrong(calls.Restarted, "cache-differs", **GROUPED),
    wrong(calls.TopLeft, "cache-differs", **GROUPED),
    wrong(calls.UnmaskedWithCache, "cache-differs", **GROUPED),
    wrong(calls.Unbounded, "cache-grows", **WINDOW),
    wrong(calls.LastOnly, "cache-output-length", **SIZES),
    wrong(calls.Miscounted, "cache-differs", **SIZES),
    wrong(calls.Slots, "left-padding-shift", **GROUPED),
    wrong(calls.Absolute, "position-shift", **SIZES),
    wrong(calls.Saved, "cache-in-state-dict", **SIZES),
    wrong(calls.NotFinite, "parameters-not-finite", **SIZES),
    wrong(base.attend, "garbage-leak", strict=True),
    wrong(masks.first_row, "mask-rows", "empty-row", "garbage-leak", strict=True),
)
