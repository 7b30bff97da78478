"""For every claim, numbers under which its sentence is true, and changes that contradict it: what a
rule must tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Numbers = dict[str, Any]
Path = tuple[str | int, ...]
Change = tuple[Path, Any]


def changed(numbers: Numbers, path: Path, value: Any) -> Numbers:
    """The numbers with one of them in place of another."""
    at: Any = numbers
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return numbers


def _rounds(value: float) -> list[float]:
    """Five rounds close to one another."""
    return [value * x for x in (1.0, 1.01, 0.99, 1.02, 0.98)]


WIDE = [0.4, 0.6, 1.0, 1.8, 3.0]
"""Five rounds of a busy machine, around 1."""


def _lengths(lengths: tuple[int, ...], **powers: float) -> list[Numbers]:
    """Rows whose times grow as length^power."""
    return [
        {"length": n, "times": {name: [1e-6 * n**p] * 5 for name, p in powers.items()}}
        for n in lengths
    ]


def scale() -> Numbers:
    rows = [
        {
            "dim": d,
            "spread": d**0.5,
            "scaled": {"entropy": 3.7, "largest": 0.1},
            "unscaled": {"entropy": 0.1, "largest": 0.99},
        }
        for d in (4, 64, 4096)
    ]
    return {"rows": 256, "keys": 64, "by_dim": rows}


def gradients(weights: float, largest: float, steepest: float) -> Numbers:
    """Most queries get nothing; what W_q and the largest query get is given, by what they get with
    the scale.
    """
    rows = []
    for dim, share in ((16, 0.1), (1024, 1.0)):
        unscaled = {
            "weights": weights * share,
            "per_query_median": 0.01,
            "per_query_largest": largest,
            "slope": 0.001,
            "steepest": steepest,
        }
        scaled = {
            "weights": 1.0,
            "per_query_median": 1.0,
            "per_query_largest": 1.0,
            "slope": 0.1,
            "steepest": 0.2,
        }
        rows.append(
            {
                "dim": dim,
                "unscaled": {k: _rounds(v) for k, v in unscaled.items()},
                "scaled": {k: [v] * 5 for k, v in scaled.items()},
            }
        )
    return {"tokens": 64, "draws": 5, "by_dim": rows}


def training_of_scale() -> Numbers:
    def way(loss: float, largest: float) -> Numbers:
        return {
            "loss": [loss, loss + 0.01],
            "largest": [largest, largest + 1],
            "median": [0.6, 0.6],
        }

    rows = [{"dim": d, "unscaled": way(2.9, 9.0), "scaled": way(2.6, 2.0)} for d in (16, 256)]
    return {"steps": 9, "seeds": 2, "by_dim": rows}


def minus_infinity() -> Numbers:
    leaks = [
        {"scale": s, "fills": [{"fill": -10.0, "weight": 0.04}, {"fill": -1e9, "weight": 0.0}]}
        for s in (1.0, 10.0, 100.0)
    ]
    return {
        "leaks": leaks,
        "ours": 0.0,
        "empty_row": 0.0,
        "filled_row": 0.0,
        "bare_softmax_is_nan": 0.0,
        "fill_is_finite_in_fp16": 1.0,
        "nan_after_multiplying": 0.0,
        "nan_after_masking": 0.0,
    }


def dropout() -> Numbers:
    rows = [
        {
            "rate": p,
            "row_sum_std": 0.0,
            "row_sum_std_expected": 1e-9,
            "mean_off_in_deviations": 2.0,
            "dropped_share": p,
            "exactly_half": 1.0,
        }
        for p in (0.1, 0.5)
    ]
    return {"draws": 2000, "weights": 16, "by_rate": rows, "eval_change": 0.0, "train_change": 0.5}


def scattered_dropout() -> Numbers:
    """As it is: sums scatter as the formula says."""
    numbers = dropout()
    for row in numbers["by_rate"]:
        row["row_sum_std"] = row["row_sum_std_expected"] = 0.3
    return numbers


def forgetting() -> Numbers:
    def row(model: str, shares: tuple[int, ...], longer: float) -> Numbers:
        bins = [
            {"low": low, "high": low + 5, "right": right, "examples": 100}
            for low, right in zip((1, 7, 13, 19), shares, strict=True)
        ]
        return {
            "model": model,
            "bins": bins,
            "longer": longer,
            "thirds": [[10, 100], [40, 100], [70, 100]],
        }

    return {
        "trained": 24,
        "models": [row("lstm", (99, 90, 40, 10), 0.0), row("lstm+bahdanau", (99, 98, 97, 95), 0.8)],
    }


def order() -> Numbers:
    return {
        "by_length": [{"length": n, "steps": {"attention": 12, "lstm": 6 * n}} for n in (16, 256)]
    }


def places() -> Numbers:
    rows = [
        {"heads": n, "places": shares}
        for n, shares in ((1, [0.12, 0.13]), (2, [0.9, 0.2]), (8, [0.8, 0.9]))
    ]
    return {"chance": 0.125, "by_heads": rows}


def text_of_heads() -> Numbers:
    return {
        "by_heads": [
            {"heads": n, "text": [loss, loss + 0.005]}
            for n, loss in ((1, 2.3), (2, 2.25), (8, 2.2))
        ]
    }


def cost_of_heads(wide: int) -> Numbers:
    """What one wide head costs, where several that share its width cost 100."""
    rows = [
        {
            "heads": n,
            "list": {"parameters": 100 * n, "flops": 100 * n},
            "split": {"parameters": cost, "flops": cost},
        }
        for n, cost in ((1, wide), (8, 100))
    ]
    return {"by_heads": rows}


def side_by_side() -> Numbers:
    names = {"MHA": 1.0, "MHA, causal": 1.0, "GPT": 0.7, "MLA": 0.7, "MLA, dropout 0.0": 0.3}
    times = {name: _rounds(value) for name, value in names.items()}
    # every round of the others is as slow as that round of MHA, so that ratios do not scatter
    out = [{"name": name, "shape": [4, 128, 512], "mean": 0.0, "std": 0.2} for name in names]
    return {
        "by_mode": [
            {"mode": mode, "times": dict(times), "out": out} for mode in ("training", "evaluation")
        ]
    }


def work() -> Numbers:
    done = {name: {"plain": 1.0, "ours": 1.0} for name in ("causal", "window")}
    return {"error": 0.0, "done": done, "flops": [3, 4], "parameters": [3, 4]}


def latent_counts() -> Numbers:
    return {
        "kept": {"MHA": 1024, "MLA": 160},
        "pair_flops": {"MHA": 256, "MLA, expanded": 240, "MLA, absorbed": 200},
    }


def latent_steps() -> Numbers:
    times = {"MHA": [1.0] * 5, "MLA, naive": [0.9] * 5, "MLA, absorbed": [0.1] * 5}
    return {"by_length": [{"length": n, "times": dict(times), "error": 1e-7} for n in (256, 4096)]}


def kv_cache() -> Numbers:
    rows = [
        {
            "length": n,
            "times": {"cache": [1e-3] * 5, "no cache": [1e-4 * n] * 5},
            "bytes": 64 * n,
            "error": 0.0,
        }
        for n in (32, 128, 1024)
    ]
    return {"by_length": rows}


def groups_counts() -> Numbers:
    rows = [
        {"name": name, "bytes": size, "score_flops": [n, 10 * n]}
        for name, size, n in (
            ("mha", 640, 64),
            ("gqa", 320, 64),
            ("mqa", 160, 64),
            ("mla", 200, 80),
        )
    ]
    return {"heads": 4, "tokens": 64, "lengths": [64, 640], "by_name": rows}


def quality() -> Numbers:
    rows = [
        {"name": name, "text": [loss, loss + 0.1], "recall": [0.9]}
        for name, loss in (("mha", 2.0), ("gqa", 2.01), ("mqa", 2.03), ("mla", 2.0))
    ]
    return {"by_name": rows}


def pairs() -> Numbers:
    def row(n: int) -> Numbers:
        log = n.bit_length() - 1  # lengths are powers of two
        return {
            "length": n,
            "pairs": {"full": n * n, "window": n * log, "strided": 3 * n * log},
            "linear": 7 * n,
        }

    return {"by_length": [row(n) for n in (1024, 2048, 4096, 8192)]}


def sparse_times() -> Numbers:
    return {
        "by_length": _lengths(
            (1024, 2048, 4096, 8192), full=2.0, window=1.0, strided=1.5, linear=0.99
        )
    }


def loops() -> Numbers:
    rows = _lengths((6, 16, 48), loops=2.0, product=0.1)
    return {"by_length": [row | {"error": 0.0} for row in rows]}


def positions() -> Numbers:
    falling = [1 - i / 256 for i in range(256)]
    moved = dict.fromkeys(
        ("sinusoidal alone", "sinusoidal, with content", "rotary, with content"), 0.0
    )
    return {
        "sinusoidal": falling,
        "rotary": list(falling),
        "alibi": [list(falling)] * 2,
        "moved": moved,
        "formula": 0.0,
    }


def longer() -> Numbers:
    methods = ("linear", "ntk", "dynamic", "yarn", "llama3")
    toy = {
        "1": {"nats": 0.5, "passkey": 0.9},
        "2": {"nats": 0.7, "passkey": 0.1},
        "4": {"nats": 0.9, "passkey": 0.0},
    }
    by: Numbers = {"unscaled": toy, "alibi": {t: {"nats": 0.5, "passkey": 0.9} for t in "124"}}
    by |= {m: {t: {"nats": 0.6, "passkey": 0.5} for t in "24"} for m in methods}
    by |= {f"{m}, tuned": {"2": {"nats": 0.5, "passkey": 0.8}} for m in ("linear", "yarn")}
    nats = {"unscaled": [2.7, 4.9], **{m: [2.75, 2.9] for m in methods}}
    return {
        "trained": 56,
        "by_method": by,
        "tiny": {"trained": 256, "lengths": [256, 1024], "nats": nats},
    }


def values() -> Numbers:
    ways = (
        ("q, k", 2.2, 1e-14),
        ("q, k, v rotated back", 2.2, 1e-14),
        ("q, k, v not rotated back", 2.3, 0.5),
    )
    return {"by_way": [{"way": w, "losses": [x, x + 0.01, x], "moved": m} for w, x, m in ways]}


def decode_mask(error: float = 0.0) -> Numbers:
    steps = [
        {"step": name, "error": error, "needs": needs}
        for name, needs in (("one token", False), ("three tokens", True))
    ]
    layers = [{"layers": n, "error": 2.0 * (n > 1)} for n in (1, 2)]
    return {"steps": steps, "no_cache": layers, "padded": 0.0, "padded_without_positions": error}


def training_of_mask() -> Numbers:
    return {
        "by_mask": [
            {"trained": name, "last": 2.5, "as_trained": 2.5, "in_use": 2.5}
            for name in ("causal", "none")
        ]
    }


def infini() -> Numbers:
    rows = []
    for name, share, added in (
        ("window", 0.12, 0.8),
        ("infini", 0.8, 0.0),
        ("all keys", 0.82, 0.82),
    ):
        rows.append(
            {
                "name": name,
                "right": share,
                "tried": [{"rate": 3e-3, "right": share, "with_memory": added}],
            }
        )
    return {"chance": 0.125, "by_name": rows}


def features() -> Numbers:
    rows = [
        {"name": n, "direction": 0.95, "best_dim": 0.93, "shuffled": 0.5}
        for n in ("begins a word", "has letters")
    ]
    return {"by_feature": rows}


def swapped() -> Numbers:
    return {"by_layers": [{"layers": n, "all": 0.0, "causal": 0.0} for n in (1, 2, 3)]}


def generation() -> Numbers:
    return {"tokens": 12, "training": 1, "generation": 1}


def image_text() -> Numbers:
    return {"text": 7, "image": 7, "rows": {"text": 7, "image": 7}}


def times_of_order() -> Numbers:
    return {"by_length": _lengths((128, 512, 2048), attention=0.5, lstm=1.0)}


PLANTED: dict[str, Callable[[], Numbers]] = {
    "scale": scale,
    "scale-vanish": lambda: gradients(0.01, 0.01, 0.2),
    "scale-explode": lambda: gradients(20.0, 50.0, 3.0),
    "scale-training": training_of_scale,
    "minus-infinity": minus_infinity,
    "minus-infinity-hides": minus_infinity,
    "large-negative": minus_infinity,
    "dropout": scattered_dropout,
    "dropout-rows": dropout,
    "dropout-half": dropout,
    "forgetting": forgetting,
    "forgetting-beginning": forgetting,
    "looking-back": forgetting,
    "order": order,
    "order-time": times_of_order,
    "order-generation": generation,
    "loops": loops,
    "heads": places,
    "heads-text": text_of_heads,
    "heads-wide": lambda: cost_of_heads(800),
    "heads-more": lambda: cost_of_heads(10),
    "fused": side_by_side,
    "mla-time": side_by_side,
    "fused-work": work,
    "mask-work": work,
    "mla-cache": latent_counts,
    "mla-work": latent_counts,
    "mla-absorbed": latent_steps,
    "mla-step": latent_steps,
    "kv-cache": kv_cache,
    "groups-cache": groups_counts,
    "mqa-linear": groups_counts,
    "groups-quality": quality,
    "full-work": pairs,
    "sparse-work": pairs,
    "linear-work": pairs,
    "sparse-time": sparse_times,
    "order-information": swapped,
    "positions": positions,
    "positions-distance": positions,
    "longer": lambda: changed(longer(), ("tiny", "nats", "unscaled"), [2.7, 2.8]),
    **dict.fromkeys(
        (
            "longer-linear",
            "longer-ntk",
            "longer-dynamic",
            "longer-yarn",
            "longer-llama3",
            "longer-alibi",
        ),
        longer,
    ),
    "yarn-tuning": lambda: changed(longer(), ("tiny", "nats", "yarn"), [2.75, 4.0]),
    "values": values,
    "values-inverse": values,
    "decode-mask": decode_mask,
    "decode-mask-always": lambda: decode_mask(0.5),
    "training-mask": training_of_mask,
    "infini": infini,
    "infini-free": infini,
    "features": features,
    "image-text": image_text,
}
"""Claim -> numbers under which its sentence is true, whether or not numbers like these can be."""

NO, LIMITS, OPEN = "does not hold", "holds with limits", "undecided"
CONTRARY: list[tuple[str, Path, Any, str]] = [
    ("scale", ("by_dim", 2, "spread"), 4096.0, NO),
    ("scale", ("by_dim", 2, "unscaled", "largest"), 0.1, NO),
    ("scale", ("by_dim", 0, "scaled", "entropy"), 1.0, NO),
    ("scale-vanish", ("by_dim", 1, "unscaled", "slope"), [0.1] * 5, NO),
    ("scale-vanish", ("by_dim", 1, "unscaled", "per_query_median"), [1.0] * 5, NO),
    ("scale-vanish", ("by_dim", 1, "unscaled", "weights"), [20.0] * 5, LIMITS),
    ("scale-vanish", ("by_dim", 1, "unscaled", "slope"), [0.001, 0.01, 0.02, 0.05, 0.2], OPEN),
    ("scale-explode", ("by_dim", 1, "unscaled", "weights"), [1.0] * 5, NO),
    ("scale-explode", ("by_dim", 0, "unscaled", "weights"), [20.0] * 5, NO),
    ("scale-explode", ("by_dim", 1, "unscaled", "per_query_largest"), [1.0] * 5, NO),
    ("scale-training", ("by_dim", 1, "unscaled", "largest"), [2.0, 3.0], NO),
    ("scale-training", ("by_dim", 1, "unscaled", "loss"), [2.6, 2.61], NO),
    ("scale-training", ("by_dim", 1, "unscaled", "loss"), [2.6, 2.9], OPEN),
    ("scale-training", ("by_dim", 0, "unscaled", "loss"), [2.6, 2.61], LIMITS),
    ("minus-infinity", ("ours",), 1e-9, NO),
    ("minus-infinity", ("bare_softmax_is_nan",), 1.0, LIMITS),
    ("minus-infinity-hides", ("nan_after_multiplying",), 1.0, NO),
    ("large-negative", ("leaks", 2, "fills", 1, "weight"), 1e-6, NO),
    ("large-negative", ("filled_row",), 0.6, LIMITS),
    ("large-negative", ("leaks", 2, "fills", 0, "weight"), 0.0, OPEN),
    ("dropout", ("by_rate", 1, "dropped_share"), 0.4, NO),
    ("dropout", ("by_rate", 0, "mean_off_in_deviations"), 20.0, NO),
    ("dropout", ("eval_change",), 1e-7, NO),
    ("dropout-rows", ("by_rate", 1, "row_sum_std"), 0.3, NO),
    ("dropout-half", ("by_rate", 1, "exactly_half"), 0.2, NO),
    ("forgetting", ("models", 0, "bins", 2, "right"), 150, NO),
    ("forgetting", ("models", 0, "bins", 0, "right"), 10, OPEN),
    ("forgetting-beginning", ("models", 0, "thirds"), [[70, 100], [40, 100], [10, 100]], NO),
    ("looking-back", ("models", 1, "bins", 3, "right"), 20, NO),
    ("looking-back", ("models", 1, "longer"), 0.1, LIMITS),
    ("looking-back", ("models", 0, "bins", 3, "right"), 150, OPEN),
    ("order", ("by_length", 1, "steps", "lstm"), 96, NO),
    ("order", ("by_length", 1, "steps", "attention"), 192, NO),
    ("order-time", ("by_length", 2, "times", "attention"), [1.0] * 5, NO),
    ("order-time", ("by_length", 2, "times", "attention"), [2e-3 * x for x in WIDE], OPEN),
    ("order-generation", ("training",), 12, NO),
    ("order-generation", ("generation",), 12, LIMITS),
    ("loops", ("by_length", 2, "times", "loops"), [1e-6] * 5, NO),
    ("loops", ("by_length", 0, "error"), 0.1, NO),
    ("heads", ("by_heads", 0, "places"), [0.1, 0.9], NO),
    ("heads", ("by_heads", 1, "places"), [0.2, 0.2], "holds"),
    ("heads-text", ("by_heads", 0, "text"), [2.2, 2.205], NO),
    ("heads-text", ("by_heads", 0, "text"), [2.2, 2.4], OPEN),
    ("heads-wide", ("by_heads", 0, "split", "flops"), 100, NO),
    ("heads-more", ("by_heads", 1, "list", "flops"), 100, NO),
    ("heads-more", ("by_heads", 1, "split", "flops"), 10, LIMITS),
    ("fused", ("by_mode", 1, "times", "GPT"), [1.0] * 5, NO),
    ("fused", ("by_mode", 0, "times", "GPT"), WIDE, OPEN),
    ("mla-time", ("by_mode", 0, "times", "MLA"), [1.0] * 5, NO),
    ("mla-time", ("by_mode", 0, "times", "MLA, dropout 0.0"), [1.0] * 5, "holds"),
    ("mla-time", ("by_mode", 1, "times", "MLA"), WIDE, OPEN),
    ("fused-work", ("flops",), [4, 4], NO),
    ("fused-work", ("error",), 1.0, OPEN),
    ("mask-work", ("done", "causal", "plain"), 0.5, NO),
    ("mask-work", ("done", "window", "ours"), 0.1, LIMITS),
    ("mla-cache", ("kept", "MLA"), 1000, NO),
    ("mla-work", ("pair_flops", "MLA, expanded"), 320, NO),
    ("mla-absorbed", ("by_length", 1, "times", "MLA, absorbed"), [0.9] * 5, NO),
    ("mla-absorbed", ("by_length", 1, "times", "MLA, absorbed"), WIDE, OPEN),
    ("mla-step", ("by_length", 1, "times", "MLA, absorbed"), [1.2] * 5, NO),
    ("mla-step", ("by_length", 1, "times", "MLA, naive"), [9.0] * 5, LIMITS),
    ("mla-step", ("by_length", 1, "times", "MLA, absorbed"), WIDE, OPEN),
    ("kv-cache", ("by_length", 0, "times", "cache"), [1.0] * 5, NO),
    ("kv-cache", ("by_length", 0, "times", "cache"), [3.2e-3 * x for x in WIDE], OPEN),
    ("kv-cache", ("by_length", 1, "error"), 1.0, NO),
    ("groups-cache", ("by_name", 2, "bytes"), 320, NO),
    ("mqa-linear", ("by_name", 2, "score_flops"), [64, 6400], NO),
    ("groups-quality", ("by_name", 1, "text"), [2.2, 2.3], NO),
    ("groups-quality", ("by_name", 1, "text"), [2.0, 2.3], OPEN),
    ("groups-quality", ("by_name", 1, "recall"), [0.5], NO),
    ("full-work", ("by_length", 3, "pairs", "full"), 8192, NO),
    ("sparse-work", ("by_length", 3, "pairs", "window"), 128 * 8192, NO),
    ("sparse-work", ("by_length", 3, "pairs", "strided"), int(8192**1.5), NO),
    ("linear-work", ("by_length", 3, "linear"), 8192**2, NO),
    ("sparse-time", ("by_length", 3, "times", "window"), [60.0] * 5, NO),
    ("sparse-time", ("by_length", 3, "times", "window"), [34 * x for x in WIDE], OPEN),
    ("sparse-time", ("by_length", 3, "times", "strided"), [60.0] * 5, LIMITS),
    ("order-information", ("by_layers", 1, "causal"), 0.2, NO),
    ("order-information", ("by_layers", 1, "all"), 0.2, NO),
    ("positions", ("rotary",), [0.5] * 256, NO),
    ("positions", ("sinusoidal",), [1.0, 0.9] * 100 + [0.0] * 56, LIMITS),
    ("positions-distance", ("moved", "sinusoidal, with content"), 0.4, NO),
    ("positions-distance", ("formula",), 1.0, OPEN),
    ("longer", ("tiny", "nats", "unscaled"), [2.7, 4.9], NO),
    *(
        (f"longer-{m}", ("tiny", "nats", m), [2.7, 4.9], NO)
        for m in ("linear", "ntk", "dynamic", "yarn", "llama3")
    ),
    ("longer-yarn", ("by_method", "yarn", "2", "passkey"), 0.0, LIMITS),
    ("longer-yarn", ("tiny", "nats", "unscaled"), [2.7, 2.8], OPEN),
    ("longer-alibi", ("by_method", "alibi", "4", "nats"), 1.0, NO),
    ("longer-alibi", ("by_method", "alibi", "4", "passkey"), 0.2, LIMITS),
    ("yarn-tuning", ("tiny", "nats", "yarn"), [2.75, 2.9], NO),
    ("values", ("by_way", 1, "losses"), [1.9, 1.9, 1.9], NO),
    ("values", ("by_way", 1, "losses"), [2.2, 1.9, 2.2], OPEN),
    ("values-inverse", ("by_way", 1, "moved"), 0.5, NO),
    ("values-inverse", ("by_way", 2, "moved"), 1e-14, NO),
    ("values-inverse", ("by_way", 0, "moved"), 1.0, OPEN),
    ("decode-mask", ("steps", 0, "error"), 0.5, NO),
    ("decode-mask", ("steps", 1, "error"), 0.5, LIMITS),
    ("decode-mask-always", ("steps", 0, "error"), 0.0, NO),
    ("training-mask", ("by_mask", 1, "in_use"), 6.0, NO),
    ("infini", ("by_name", 1, "right"), 0.2, NO),
    ("infini", ("by_name", 0, "right"), 0.5, OPEN),
    ("infini-free", ("by_name", 0, "tried", 0, "with_memory"), 0.12, NO),
    ("infini-free", ("by_name", 2, "tried", 0, "with_memory"), 0.2, NO),
    ("infini-free", ("by_name", 1, "right"), 0.2, OPEN),
    ("features", ("by_feature", 0, "shuffled"), 0.7, OPEN),
    ("image-text", ("rows", "text"), 3, NO),
    ("image-text", ("image",), 64, LIMITS),
]
"""Claim, where its numbers change, to what, and the verdict then."""

ONE_DIM = [{"name": "begins a word", "direction": 0.95, "best_dim": 0.6, "shuffled": 0.5}]
CONTRARY.append(("features", ("by_feature",), ONE_DIM, NO))
