"""The speed of one layer of every mechanism: a prompt, and one token after it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.bench.measurement import interleaved, median, quartiles
from regard.compare.experiment import ReportProgress
from regard.nn.variants import VARIANTS
from tests.compare.catalogue_table.kept import SPEED, append, machine
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


def run(report: ReportProgress) -> None:
    """Measure all mechanisms in turns, and keep a line for each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, DIM)
    prompts: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name in VARIANTS:
        module = small_layer(name)
        begun = time.process_time()
        prompts[name] = functools.partial(prefill, module, name, x)
        prompts[name]()
        if decodes(name):
            steps[name] = filled_step(module, name, x)
        report(f"{name}: built, {time.process_time() - begun:.1f} s")
    clock = time.process_time
    prefill_times = interleaved(prompts, rounds=ROUNDS, sample=0.0, clock=clock)
    step_times = interleaved(steps, rounds=ROUNDS, sample=0.01, clock=clock)
    SPEED.unlink(missing_ok=True)
    append(SPEED, {**SETTINGS, **machine()})
    for name in VARIANTS:
        line: dict[str, object] = {"name": name}
        for work, times in (("prefill", prefill_times), ("step", step_times)):
            if name in times:
                low, high = quartiles(times[name])
                line[work] = [float(f"{x:.4g}") for x in (low, median(times[name]), high)]
        append(SPEED, line)
