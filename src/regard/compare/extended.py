"""What `regard extend` finds, as data, as a table, as pictures and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.bench.machine import machine
from regard.compare.cached import policies
from regard.compare.experiment import Numbers, Tell, silent
from regard.compare.extension import (  # fmt: skip
    METHODS,
    UNSCALED,
    Reading,
    about,
    extended,
    lengths_for,
    read,
    spectrum,
)
from regard.errors import ArgumentError
from regard.models.model import Model
from regard.view import findings
from regard.view.curves import Line, Picture


@dataclass(frozen=True)
class Asked:
    """What the command asks for.

    Attributes:
        length: tokens to reach; None is four times the trained length.
        methods: extensions; none are all. The model as it is always stands beside them.
        windows, trials, seed: as `Reading`.
        steps: tokens that are decoded one by one across the trained length.
    """

    length: int | None = None
    methods: tuple[str, ...] = ()
    windows: int = 8
    trials: int = 6
    steps: int = 24
    seed: int = 0


@dataclass(frozen=True)
class Extended:
    """What was found.

    Attributes:
        start: model, text, trained length, head, base, critical dimension, machine, and how it was asked.
        methods: name -> by_length, theta, rotary_factor, decay, cache.
    """

    start: Mapping[str, Any]
    methods: Mapping[str, Numbers]

    def as_dict(self, command: str) -> dict[str, Any]:
        """As plain values, with the command that makes them again."""
        return {"command": command, **self.start, "methods": dict(self.methods)}


def extend_all(
    model: Model, ids: Int[Tensor, " N"], asked: Asked, names: Mapping[str, str], tell: Tell = silent
) -> Extended:  # fmt: skip
    """Every method, read at every length.

    Args:
        model: with rotary positions that are not scaled yet.
        ids: a text, longer than the length to reach.
        asked: above.
        names: what model and text are called.
        tell: told what is being done.

    Raises:
        ArgumentError: a method is unknown, the text is too short, or the model cannot be extended.
    """
    facts = about(model)
    trained = facts["trained"]
    target = asked.length or 4 * trained
    methods = (UNSCALED, *(m for m in dict.fromkeys(asked.methods or METHODS) if m != UNSCALED))
    networks = {
        method: extended(model, method, target) for method in methods
    }  # refuses before anything is measured
    start = max(1, trained - asked.steps // 2)
    need = max(target, start + asked.steps) + 1
    if len(ids) < need:
        raise ArgumentError(f"the text has {len(ids)} tokens, and {need} are needed for a length of {target}: give a longer text, or a smaller length")  # fmt: skip
    how = _reading(lengths_for(trained, target), asked)
    found: dict[str, Numbers] = {}
    for method, network in networks.items():
        tell(f"{method}: {', '.join(map(str, how.lengths))} tokens, and a cache")
        cache = policies(network, ids[None, : start + asked.steps], start, target)
        found[method] = {**read(network, ids, how), **spectrum(network, target), "cache": cache}
    told = {
        **names, **facts, "target": target, "lengths": list(how.lengths), "depths": list(how.depths),
        "windows": how.windows, "counted": how.counted, "trials": how.trials, "key": how.key, "mark": how.mark, "seed": how.seed, "steps": asked.steps,
        "machine": machine(torch.device("cpu")),
    }  # fmt: skip
    return Extended(told, found)


def _reading(lengths: tuple[int, ...], asked: Asked) -> Reading:
    """How models are asked: less of each where the shortest length has no room for it."""
    shortest = lengths[0]
    passage = max(2, min(20, (shortest + 1) // 3))
    key = max(1, passage * 2 // 5)
    return Reading(
        lengths, counted=max(1, min(64, shortest // 2)), windows=asked.windows, trials=asked.trials, key=key,
        mark=passage - key, seed=asked.seed,
    )  # fmt: skip


def rows(found: Extended) -> list[list[str]]:
    """A row for each method: perplexity at each length, the passage, and the cache."""
    table = []
    for name, numbers in found.methods.items():
        by = numbers["by_length"]
        saved = [sum(n["saved"] for n in one["needle"]) / len(one["needle"]) for one in by]
        cache = numbers["cache"]
        kept = cache.get("recompute") or next(iter(cache.values()))  # as a loaded model does it
        table.append([name, *(f"{one['perplexity']:.4g}" for one in by), *(f"{s:+.2f}" for s in saved), f"{kept['difference']:.1g}"])  # fmt: skip
    return table


def heads(found: Extended) -> list[str]:
    """The heads of `rows`."""
    lengths = found.start["lengths"]
    return ["", *(f"ppl {n}" for n in lengths), *(f"saved {n}" for n in lengths), "cache"]


def table(found: Extended) -> str:
    """What came of each method, for a terminal."""
    s = found.start
    m = s["machine"]
    lines = [
        f"{s['model']}: trained on {s['trained']} tokens, base {s['base']:g}, {s['critical_dimension']} of {s['rotary_dim']} rotary dims have turned fully",
        f"extended to {s['target']}; {s['windows']} windows of {s['text']}, the last {s['counted']} tokens counted; {s['trials']} passages for each depth, seed {s['seed']}",
        f"{m['processor']}, {m['threads']} threads, torch {m['torch']}, regard {m['regard']}", "",
    ]  # fmt: skip
    lines += _aligned([heads(found), *rows(found)])
    lines += ["", "ppl: perplexity of the same tokens; saved: nats per token less when a passage stood before, mean over depths;",
              "cache, as the model is loaded: the largest difference of a logit from a pass over everything, in deviations"]  # fmt: skip
    for name, numbers in found.methods.items():
        if len(numbers["cache"]) > 1:
            lines += [
                "",
                f"{name} follows the length: cached decoding of {s['steps']} tokens across {s['trained']}",
            ]
            lines += _aligned([["policy", "difference", "same token", "read again"], *cache_rows(numbers)])  # fmt: skip
    return "\n".join(lines)


def cache_rows(numbers: Mapping[str, Any]) -> list[list[str]]:
    """A row for each policy of a method."""
    return [
        [policy, f"{one['difference']:.1g}", f"{one['agreement']:.0%}", str(one["reruns"])]
        for policy, one in numbers["cache"].items()
    ]


def pictures(found: Extended) -> list[Picture]:
    """Perplexity, passages, spectrum and decay."""
    s, trained = found.start, float(found.start["trained"])
    named = found.methods.items()

    def per_length(value: Any) -> tuple[Line, ...]:
        return tuple(Line(name, tuple((float(one["length"]), value(one)) for one in numbers["by_length"])) for name, numbers in named)  # fmt: skip

    turns = tuple(
        Line(name, tuple((float(i), max(trained, 1) * theta / math.tau) for i, theta in enumerate(numbers["theta"])))
        for name, numbers in named
    )  # fmt: skip
    decay = tuple(Line(name, tuple((float(m), b) for m, b in numbers["decay"])) for name, numbers in named)  # fmt: skip
    longest = [
        Line(
            name, tuple((one["depth"], one["saved"]) for one in numbers["by_length"][-1]["needle"])
        )
        for name, numbers in named
    ]
    return [
        Picture(f"{s['model']}: perplexity of the same tokens behind more context", "tokens read", "perplexity", per_length(lambda one: one["perplexity"]), "xy", trained),
        Picture("A passage found again: nats per token saved, mean over depths", "tokens read", "nats", per_length(lambda one: sum(n["saved"] for n in one["needle"]) / len(one["needle"])), "x", trained),
        Picture(f"... by depth, at {s['target']} tokens", "depth", "nats", tuple(longest)),
        Picture(f"How often each pair turns in {s['trained']} tokens", "pair of dims", "turns", turns, "y"),
        Picture("What is left of a match at a distance: f^2 (2 / d) sum cos(m theta)", "distance", "share", decay, "", trained),
    ]  # fmt: skip


def page(found: Extended, command: str) -> str:
    """The page: HTML that needs nothing else."""
    s, m = found.start, found.start["machine"]
    drawn = pictures(found)
    facts = {
        "model": str(s["model"]), "trained": f"{s['trained']} tokens", "extended to": str(s["target"]),
        "turned fully": f"{s['critical_dimension']} of {s['rotary_dim']} dims", "windows": str(s["windows"]),
        "passages": str(s["trials"]), "seed": str(s["seed"]), "machine": f"{m['processor']}, {m['threads']} threads, torch {m['torch']}",
    }  # fmt: skip
    sections = [
        findings.Section("Every method", heads=heads(found), rows=rows(found), pictures=drawn[:1], texts={"text": str(s["text"])}),
        findings.Section("A passage found again", pictures=drawn[1:3], heads=["", *(f"{n}, depth {d:g}" for n in s["lengths"][-1:] for d in s["depths"])],
                         rows=[[name, *(f"{n['right']:.0%} right, {n['guessed']:.0%} guessed" for n in numbers["by_length"][-1]["needle"])] for name, numbers in found.methods.items()]),
        findings.Section("The rotations", pictures=drawn[3:]),
    ]  # fmt: skip
    for name, numbers in found.methods.items():
        if len(numbers["cache"]) > 1:
            sections.append(findings.Section(f"{name}: cached decoding", heads=["policy", "difference", "same token", "read again"], rows=cache_rows(numbers)))  # fmt: skip
    return findings.page("Context extensions", "One checkpoint, its rotary positions scaled in every way, no weight changed.", facts, command, sections)  # fmt: skip


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in cells]  # fmt: skip
