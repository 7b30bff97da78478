"""Generation in a loop, to see whether memory grows: `python -m tests.endurance --seconds 600`.

A round makes one text with each kind of cache, by sampling, beams and proposals, from a prefix that
was read once, and reads a batch of padded rows. All rounds are the same, so that whatever is left
behind by one of them is left behind by each.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import regard

WARM = 5
"""Rounds after which tables and pools of memory are expected to be full."""
MIB = 1 << 20


class State(NamedTuple):
    """What a process holds: objects that Python's collector knows, tensors, resident bytes."""

    objects: int
    tensors: int
    resident: int


def state() -> State:
    """Collect garbage and look."""
    gc.collect()
    known = gc.get_objects()
    tensors = sum(issubclass(type(x), torch.Tensor) for x in known)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return State(len(known), tensors, pages * 4096)


def jobs(model: Any, length: int) -> list[Callable[[], object]]:
    """What a round does, with texts of so many tokens."""
    text = "to be or not to be, that is the"

    def generate(prompt: Any = text, **options: Any) -> str:
        return "".join(model.generate(prompt, max_tokens=length, **options))

    def continue_prefix() -> str:
        return generate("question", prefix=model.cache_prefix(text))

    kinds = ("fixed", "ring", "streaming", "paged", "quantized", "fp8", "h2o", "quest")
    return [
        generate,
        lambda: generate(temperature=1.0, seed=3, top_p=0.9),
        lambda: generate(speculate="lookup"),
        lambda: model.beam_search(text, beams=3, max_tokens=4),
        lambda: list(model.generate([text, "to be"], max_tokens=length)),
        continue_prefix,
        *(lambda kind=kind: generate(cache=kind, max_context=64) for kind in kinds),
    ]


def run(model: Any, length: int, until: Callable[[int], bool]) -> tuple[int, list[State]]:
    """Do rounds until a function of their number says so; return the texts, and the states."""
    work, states = jobs(model, length), []
    while not until(len(states)):
        for job in work:
            job()
        states.append(state())
    return len(states) * len(work), states


def main() -> int:
    """Run for some time, print the figures; 0 if objects and tensors did not grow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    model = regard.load(options.model)
    texts, states = run(model, 12, lambda n: n > 2 * WARM and time.monotonic() > end)
    early, middle, last = states[WARM], states[len(states) // 2], states[-1]
    facts = {
        "date": f"{dt.date.today()}",
        "model": options.model,
        "seconds": round(options.seconds),
        "texts": texts,
        "tensors": [early.tensors, last.tensors],
        "objects": [early.objects, last.objects],
        "resident MiB": [round(x.resident / MIB, 1) for x in (early, middle, last)],
    }
    print(json.dumps(facts, indent=1))
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    return int(last.tensors > early.tensors or last.objects > 1.01 * early.objects)


if __name__ == "__main__":
    sys.exit(main())
