"""The speed of one layer of every mechanism: a prompt, and one token after it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from regard.compare.experiment import ReportProgress
from regard.nn.variants import VARIANTS
from regard.timing import interleaved, median, quartiles
from tests.compare.catalogue_table.kept import SPEED, append, machine, read
from tests.compare.catalogue_table.sizes import DIM, GROUPS, HEADS, TOKENS, decodes, small_layer

ROUNDS = 5
SETTINGS = {"dim": DIM, "heads": HEADS, "groups": GROUPS, "tokens": TOKENS, "rounds": ROUNDS}


def prefill(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Read all tokens, into a new cache where the mechanism has one."""
    with torch.inference_mode():
        if VARIANTS[name].family in ("cross", "additive"):
            out: Tensor = module(x, None, module.new_cache(), memory=x)
        elif decodes(name):
            out = module(x, None, module.new_cache())
        else:
            out = module(x)
        return out


def filled_step(module: nn.Module, name: str, x: Tensor) -> Callable[[], Tensor]:
    """A function that reads the last token after all others, and then restores the cache."""
    cache, last = module.new_cache(), x[:, -1:]
    with torch.inference_mode():
        if VARIANTS[name].family in ("cross", "additive"):
            module(x[:, :-1], None, cache, memory=x)
        else:
            module(x[:, :-1], None, cache)

    def step() -> Tensor:
        mark = cache.mark()
        with torch.inference_mode():
            out: Tensor = module(last, None, cache)
            cache.restore(mark)
        return out

    return step


def measure(names: Iterable[str], report: ReportProgress) -> dict[str, dict[str, object]]:
    """Time these mechanisms in turns; return the line of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, DIM)
    prompts: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        module = small_layer(name)
        prompts[name] = functools.partial(prefill, module, name, x)
        if decodes(name):
            steps[name] = filled_step(module, name, x)
        report(f"{name} is built")
    clock = time.process_time
    times = {
        "prefill": interleaved(prompts, rounds=ROUNDS, sample=0.0, clock=clock),
        "step": interleaved(steps, rounds=ROUNDS, sample=0.01, clock=clock),
    }
    lines: dict[str, dict[str, object]] = {}
    for name in prompts:
        lines[name] = {"name": name}
        for work in ("prefill", "step"):
            if name in times[work]:
                low, high = quartiles(times[work][name])
                values = (low, median(times[work][name]), high)
                lines[name][work] = [float(f"{x:.4g}") for x in values]
    return lines


def run(names: Sequence[str], report: ReportProgress) -> None:
    """Measure all mechanisms and keep a line for each, or only these beside those that are kept.

    A line of a later day has its own date and machine.
    """
    before = read(SPEED) if names else []
    new = measure(names or VARIANTS, report)
    kept = {line["name"]: line for line in before[1:]}
    if names:
        new = {name: {**line, **machine()} for name, line in new.items()}
    SPEED.unlink(missing_ok=True)
    append(SPEED, before[0] if names else {**SETTINGS, **machine()})
    for name in VARIANTS:
        if line := new.get(name) or kept.get(name):
            append(SPEED, line)
