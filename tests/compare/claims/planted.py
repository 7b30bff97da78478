"""Numbers as each claim predicts them, and changes that contradict it: what a rule must tell apart."""

from __future__ import annotations

from typing import Any

Numbers = dict[str, Any]


def _lengths(lengths: tuple[int, ...], **seconds: float) -> list[Numbers]:
    """Rows whose seconds grow as length^exponent."""
    return [
        {"length": n, "seconds": {name: 1e-6 * n**power for name, power in seconds.items()}}
        for n in lengths
    ]


def scale() -> Numbers:
    one = {"entropy": 3.7, "largest": 0.1, "gradient": 0.1, "steepest": 0.2}
    rows = [
        {"dim": d, "spread": d**0.5, "scaled": dict(one), "unscaled": {**one, "largest": 0.99, "gradient": 1e-4}}
        for d in (4, 64, 4096)
    ]  # fmt: skip
    return {"rows": 256, "keys": 64, "by_dim": rows}


def forgetting() -> Numbers:
    def row(model: str, shares: tuple[int, ...], validation: float, longer: float) -> Numbers:
        bins = [
            {"low": low, "high": low + 5, "right": right, "examples": 100}
            for low, right in zip((1, 7, 13, 19), shares, strict=True)
        ]
        return {"model": model, "bins": bins, "validation": validation, "longer": longer}

    models = [row("lstm", (99, 90, 40, 10), 0.6, 0.0), row("lstm+bahdanau", (99, 98, 97, 95), 0.97, 0.8)]  # fmt: skip
    return {"trained": 24, "models": models}


def order() -> Numbers:
    return {"by_length": _lengths((64, 256, 1024), attention=0.5, lstm=1.0)}


def heads() -> Numbers:
    rows = [
        {"heads": n, "text": [loss, loss + 0.005], "places": [share], "parameters": 9, "flops": 9}
        for n, loss, share in ((1, 2.3, 0.13), (2, 2.25, 0.4), (8, 2.2, 0.5))
    ]
    return {"by_heads": rows}


def fused() -> Numbers:
    rows = [{"length": n, "ratio": 0.8, "no_mask": 1.2, "error": 1e-7, "seconds": {"fused": 0.8, "separate": 1.0, "separate, no mask": 1.0}} for n in (1, 16)]  # fmt: skip
    return {"by_length": rows, "flops": [4, 4], "parameters": [4, 4]}


def mla() -> Numbers:
    ratio = {"MHA": 1.0, "MLA, naive": 9.0, "MLA, absorbed": 0.8}
    rows = [{"length": n, "ratio": ratio, "seconds": ratio, "error": 1e-7} for n in (256, 4096)]
    return {
        "kept": {"MHA": 1024, "MLA": 160},
        "pair_flops": {"MHA": 256, "MLA, naive": 240, "MLA, absorbed": 576},
        "by_length": rows,
    }


def kv_cache() -> Numbers:
    rows = [
        {"length": n, "seconds": {"cache": 1e-3, "no cache": 1e-4 * n}, "speedup": n / 10, "bytes": 64 * n, "error": 0.0}
        for n in (32, 128, 1024)
    ]  # fmt: skip
    return {"by_length": rows}


def groups() -> Numbers:
    rows = [
        {"name": name, "bytes": size, "score_flops": 512, "text": [loss], "recall": [0.9]}
        for name, size, loss in (("mha", 640, 2.0), ("gqa", 320, 2.01), ("mqa", 160, 2.03), ("mla", 200, 2.0))
    ]  # fmt: skip
    return {"heads": 4, "tokens": 64, "by_name": rows}


def exponents() -> Numbers:
    rows = _lengths((1024, 2048, 4096, 8192), full=2.0, window=1.0, strided=1.5, linear=0.99)
    for row in rows:
        n = row["length"]
        row["pairs"] = {"full": n * n, "window": 128 * n, "strided": int(n**1.5)}
    return {"by_length": rows}


def longer() -> Numbers:
    methods = ("linear", "ntk", "dynamic", "yarn", "llama3")
    toy = {"1": {"nats": 0.5, "passkey": 0.9}, "2": {"nats": 0.7, "passkey": 0.1}, "4": {"nats": 0.9, "passkey": 0.0}}  # fmt: skip
    by: Numbers = {"unscaled": toy, "alibi": {t: {"nats": 0.5, "passkey": 0.9} for t in "124"}}
    by |= {m: {t: {"nats": 0.6, "passkey": 0.5} for t in "24"} for m in methods}
    by |= {f"{m}, tuned": {"2": {"nats": 0.5, "passkey": 0.8}} for m in ("linear", "yarn")}
    nats = {"unscaled": [2.7, 4.9], **{m: [2.75, 2.9] for m in methods}}
    return {"trained": 56, "by_method": by, "tiny": {"trained": 256, "lengths": [256, 1024], "nats": nats}}  # fmt: skip


def values() -> Numbers:
    ways = (("q, k", 2.2, 1e-14), ("q, k, v turned back", 2.2, 0.5), ("q, k, v not turned back", 2.3, 0.5))  # fmt: skip
    return {"by_way": [{"way": w, "losses": [x, x + 0.01], "moved": m} for w, x, m in ways]}


def infini() -> Numbers:
    shares = (("window", 0.12), ("infini", 0.8), ("all keys", 0.82))
    rows = [{"name": n, "right": x, "tried": [{"rate": 3e-3, "right": x}]} for n, x in shares]
    return {"chance": 0.125, "by_name": rows}


def features() -> Numbers:
    rows = [{"name": n, "direction": 0.95, "best_dim": 0.93, "shuffled": 0.5} for n in ("begins a word", "has letters")]  # fmt: skip
    return {"by_feature": rows}


PLANTED = {
    "scale": scale, "forgetting": forgetting, "order": order, "heads": heads, "fused": fused, "mla": mla, "kv-cache": kv_cache,
    "groups": groups, "exponents": exponents, "longer": longer, "values": values, "infini": infini, "features": features,
}  # fmt: skip
"""Claim -> numbers under which it holds."""

Path = tuple[str | int, ...]
CONTRARY: list[tuple[str, Path, Any, str]] = [
    ("scale", ("by_dim", 2, "spread"), 4096.0, "does not hold"),
    ("scale", ("by_dim", 2, "unscaled", "gradient"), 0.1, "does not hold"),
    ("scale", ("by_dim", 1, "unscaled", "steepest"), 0.6, "does not hold"),
    ("scale", ("by_dim", 0, "scaled", "entropy"), 1.0, "does not hold"),
    ("forgetting", ("models", 0, "validation"), 0.95, "does not hold"),
    ("forgetting", ("models", 0, "bins", 3, "right"), 100, "holds"),
    ("forgetting", ("models", 1, "longer"), 0.1, "holds with limits"),
    ("order", ("by_length", 0, "seconds", "attention"), 1.0, "does not hold"),
    ("order", ("by_length", 2, "seconds", "attention"), 1.0, "holds with limits"),
    ("heads", ("by_heads", 0, "places"), [0.5], "does not hold"),
    ("heads", ("by_heads", 0, "text"), [2.2, 2.2], "does not hold"),
    ("heads", ("by_heads", 0, "flops"), 10, "does not hold"),
    ("heads", ("by_heads", 2, "text"), [2.27, 2.27], "holds with limits"),
    ("fused", ("by_length", 0, "ratio"), 2.0, "does not hold"),
    ("fused", ("by_length", 0, "error"), 1.0, "does not hold"),
    ("fused", ("by_length", 1, "ratio"), 0.97, "holds with limits"),
    ("mla", ("kept", "MLA"), 1000, "does not hold"),
    ("mla", ("by_length", 1, "ratio", "MLA, absorbed"), 9.0, "does not hold"),
    ("mla", ("pair_flops", "MLA, naive"), 320, "holds with limits"),
    ("kv-cache", ("by_length", 0, "speedup"), 0.5, "does not hold"),
    ("kv-cache", ("by_length", 2, "speedup"), 5.0, "does not hold"),
    ("kv-cache", ("by_length", 1, "error"), 1.0, "does not hold"),
    ("groups", ("by_name", 2, "bytes"), 320, "does not hold"),
    ("groups", ("by_name", 1, "text"), [2.2], "does not hold"),
    ("groups", ("by_name", 2, "text"), [2.2], "holds with limits"),
    ("exponents", ("by_length", 3, "pairs", "window"), 8192**2, "does not hold"),
    ("exponents", ("by_length", 3, "seconds", "linear"), 1.0, "does not hold"),
    ("longer", ("tiny", "nats", "unscaled"), [2.7, 2.7], "does not hold"),
    ("longer", ("tiny", "nats", "yarn"), [2.7, 4.9], "does not hold"),
    ("longer", ("tiny", "nats", "linear"), [2.7, 4.9], "holds with limits"),
    ("longer", ("by_method", "alibi", "4", "nats"), 1.0, "does not hold"),
    ("longer", ("by_method", "alibi", "4", "passkey"), 0.2, "holds with limits"),
    ("values", ("by_way", 1, "losses"), [1.9, 1.9], "does not hold"),
    ("values", ("by_way", 0, "moved"), 1.0, "does not hold"),
    ("values", ("by_way", 1, "moved"), 1e-14, "holds with limits"),
    ("features", ("by_feature", 0, "shuffled"), 0.7, "does not hold"),
    ("features", ("by_feature", 1, "best_dim"), 0.5, "holds with limits"),
    ("infini", ("by_name", 1, "right"), 0.2, "does not hold"),
    ("infini", ("by_name", 0, "right"), 0.5, "does not hold"),
    ("infini", ("by_name", 2, "right"), 1.0, "holds with limits"),
]  # fmt: skip
"""Claim, where its numbers change, to what, and the verdict then."""


def changed(numbers: Numbers, path: Path, value: Any) -> Numbers:
    """The numbers with one of them in place of another."""
    at: Any = numbers
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return numbers
