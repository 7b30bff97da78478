"""What latent attention saves, and what it costs: numbers per token in a cache, FLOPs of a step, and time of a step.

Naive: the cache is expanded to keys and values of every head at each step. Absorbed: queries go down to the latent instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard import attend
from regard.compare.claims.base import Check, Claim
from regard.compare.claims.timed import by_length, fastest, ratios, seconds, setting
from regard.compare.experiment import Numbers
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.project import facing
from regard.nn.variants import gpt, mha, mla
from regard.span import Span
from regard.view.curves import Picture

DIM, HEADS = 512, 8
RANK, TURNED = 128, 32
LENGTHS = (256, 1024, 4096)


def _step(module: Attention, form: Any, x: Tensor) -> Callable[[], Tensor]:
    """One token behind a cache that is full: the form decides how memory becomes keys."""
    S = x.shape[1]
    memory = module.project.remember(x, Span(0, S))
    last, at, held = x[:, -1:], Span(S - 1, 1), Span(0, S)

    def step() -> Tensor:
        module.project.remember(last, at)  # what a cache would keep of it
        q, (k, v) = form.query(last, at), form.recall(memory, held)
        z = attend(q, k, v, mask=Causal(), scale=module.scale, q_positions=at, k_positions=held)
        return module.output(form.finish(z, last).transpose(1, 2).flatten(2))

    return step


@torch.inference_mode()
def _measure(budget: float, _seed: int) -> Numbers:
    heads = mha(DIM, HEADS, is_causal=True).eval()
    latent = mla(DIM, HEADS, kv_rank=RANK, nope_dim=64, rope_dim=TURNED, value_dim=64).eval()
    naive, absorbed = latent.project, facing(latent.project, 1, LENGTHS[-1])
    rows = []
    for length in LENGTHS:
        x = torch.randn(1, length, DIM)
        cases = {
            "MHA": _step(heads, heads.project, x), "MLA, naive": _step(latent, naive, x), "MLA, absorbed": _step(latent, absorbed, x),
        }  # fmt: skip
        error = float((cases["MLA, naive"]() - cases["MLA, absorbed"]()).abs().max())
        times = seconds(cases, budget, rounds=9)
        rows.append({"length": length, "seconds": fastest(times), "ratio": ratios(times, "MHA"), "error": error})  # fmt: skip
    E, R, P, V = RANK, TURNED, DIM // HEADS, DIM // HEADS
    return {
        **setting(), "kv_rank": E, "rope_dim": R, "dim": DIM, "heads": HEADS, "by_length": rows,
        "kept": {"MHA": sum(heads.project.shape.memory), "MLA": sum(latent.project.shape.memory)},
        "pair_flops": {"MHA": 4 * P, "MLA, naive": 2 * (P + R + V), "MLA, absorbed": 2 * (2 * E + R)},
        "side_by_side": _side_by_side(heads, latent),
    }  # fmt: skip


def _side_by_side(heads: Attention, latent: Attention) -> list[dict[str, Any]]:
    """MHA, GPT and MLA on one input: shape, mean, deviation, and time."""
    x = torch.randn(2, 128, DIM)
    made = {"MHA": heads, "GPT": gpt(DIM, HEADS).eval(), "MLA": latent}
    cases = {name: partial(module, x) for name, module in made.items()}
    times = fastest(seconds(cases, 1.0, rounds=5))
    out = {name: case() for name, case in cases.items()}
    return [
        {"name": n, "shape": list(z.shape), "mean": float(z.mean()), "std": float(z.std()), "seconds": times[n]}
        for n, z in out.items()
    ]  # fmt: skip


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    kept, work, last = numbers["kept"], numbers["pair_flops"], numbers["by_length"][-1]
    return [
        Check("its cache is smaller: MHA's numbers per token by MLA's", kept["MHA"] / kept["MLA"], low=2.0),
        Check("naive and absorbed are one function: largest difference", max(r["error"] for r in numbers["by_length"]), high=1e-3),
        Check("absorbed is faster than naive at the longest: its share of the time", last["ratio"]["MLA, absorbed"] / last["ratio"]["MLA, naive"], high=0.9),
        Check("it computes less than MHA: FLOPs per pair and head, the better form by MHA's", min(work["MLA, naive"], work["MLA, absorbed"]) / work["MHA"], high=1.0, essential=False),
        Check("a step is faster than MHA's at the longest: absorbed by MHA", last["ratio"]["MLA, absorbed"], high=1.0, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    lines = by_length(numbers, "MHA", "MLA, naive", "MLA, absorbed")
    return Picture("One token behind a full cache, width 512, 8 heads", "tokens in the cache", "milliseconds", lines, "xy")  # fmt: skip


CLAIM = Claim(
    id="mla",
    seeds=("S2.15", "S2.18", "S2.19", "S2.25", "E2.6", "E2.7"),
    says="MLA compresses keys and values: a small cache, fewer operations, hence faster.",
    predicts="A smaller cache, and more arithmetic per pair than MHA, not less; absorbed beats expanding the cache at every step.",
    scale="One layer of width 512 with a rank of 128. At DeepSeek's shape the cache is 57 times smaller and a GPU is bound by reading it; here a CPU computes.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    lesson="It saves cache and traffic, not operations (E2.7); absorption saves against expanding the cache, not against MHA.",
)
"""S2.19."""
