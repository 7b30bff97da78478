"""Claims about multi-head latent attention (MLA): its cache, its FLOPs, and the time of a step.

In the expanded (naive) form the cache is expanded to keys and values of every head at each step. In
the absorbed form the queries are projected to the latent space instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.claim import ATTN_JOURNEY, Claim, Criterion, NoteSection, median_criterion
from experiments.cpu_timing import round_ratios, time_cases, timing_lines, timing_settings
from regard import attend
from regard.compare.experiment import Numbers
from regard.language import Phrase, counted
from regard.masks import Causal
from regard.nn import Attention
from regard.nn.variants import mha, mla
from regard.span import Span
from regard.view.charts import Line, Picture

DIM, HEADS = 512, 8
RANK, ROPE_DIM = 128, 32
LENGTHS = (256, 1024, 4096)


def _step(module: Attention, form: Any, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that decodes one token with a full cache, in a form of the projection."""
    S = x.shape[1]
    memory = module.project.remember(x, Span(0, S))
    last, last_position, positions = x[:, -1:], Span(S - 1, 1), Span(0, S)

    def step() -> Tensor:
        module.project.remember(last, last_position)  # the new entry of a cache
        q, (k, v) = form.query(last, last_position), form.recall(memory, positions)
        z = attend(
            q,
            k,
            v,
            mask=Causal(),
            scale=module.scale,
            q_positions=last_position,
            k_positions=positions,
        )
        out: Tensor = module.output(form.postprocess(z, last).transpose(1, 2).flatten(2))
        return out

    return step


def _pair(seed: int) -> tuple[Attention, Attention]:
    """Return multi-head attention and latent attention with random weights."""
    torch.manual_seed(seed)
    heads = mha(DIM, HEADS, is_causal=True).eval()
    latent = mla(DIM, HEADS, kv_rank=RANK, nope_dim=64, rope_dim=ROPE_DIM, value_dim=64).eval()
    return heads, latent


def _measure_counts(_budget: float, seed: int) -> Numbers:
    heads, latent = _pair(seed)
    E, R, P, V = RANK, ROPE_DIM, DIM // HEADS, DIM // HEADS
    return {
        "kv_rank": E,
        "rope_dim": R,
        "dim": DIM,
        "heads": HEADS,
        "kept": {"MHA": sum(heads.project.shape.memory), "MLA": sum(latent.project.shape.memory)},
        "pair_flops": {
            "MHA": 4 * P,
            "MLA, expanded": 2 * (P + R + V),
            "MLA, absorbed": 2 * (2 * E + R),
        },
    }


@torch.inference_mode()
def _measure(budget: float, seed: int) -> Numbers:
    heads, latent = _pair(seed)
    naive, absorbed = latent.project, latent.project.select_form(1, LENGTHS[-1])
    rows = []
    for length in LENGTHS:
        x = torch.randn(1, length, DIM)
        cases = {
            "MHA": _step(heads, heads.project, x),
            "MLA, naive": _step(latent, naive, x),
            "MLA, absorbed": _step(latent, absorbed, x),
        }
        error = float((cases["MLA, naive"]() - cases["MLA, absorbed"]()).abs().max())
        rows.append(
            {"length": length, "times": time_cases(cases, budget, rounds=9), "error": error}
        )
    return {**timing_settings(), "dim": DIM, "heads": HEADS, "by_length": rows}


def _checks_cache(numbers: Numbers) -> list[Criterion]:
    values_per_token = numbers["kept"]
    return [
        Criterion(
            "values cached per token: MHA / MLA",
            values_per_token["MHA"] / values_per_token["MLA"],
            low=2.0,
        )
    ]


def _checks_work(numbers: Numbers) -> list[Criterion]:
    work = numbers["pair_flops"]
    criteria = [
        Criterion(
            Phrase("FLOPs per query-key pair and head: {name} / MHA", name=name),
            work[name] / work["MHA"],
            high=0.999,
        )
        for name in work
        if name != "MHA"
    ]
    return criteria


def _checks_absorbed(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        Criterion(
            "largest difference of the outputs of the two forms",
            max(r["error"] for r in rows),
            high=1e-3,
            role="control",
        ),
        *(
            median_criterion(
                Phrase(
                    "a step after {tokens}: time of absorbed MLA / time of expanded MLA",
                    tokens=counted(r["length"], "token"),
                ),
                round_ratios(r["times"], "MLA, absorbed", "MLA, naive"),
                high=0.9,
            )
            for r in rows
        ),
    ]


def _checks_step(numbers: Numbers) -> list[Criterion]:
    *_, last = numbers["by_length"]
    return [
        median_criterion(
            Phrase(
                "a step after {tokens}: time of absorbed MLA / time of MHA",
                tokens=counted(last["length"], "token"),
            ),
            round_ratios(last["times"], "MLA, absorbed", "MHA"),
            high=0.95,
        ),
        median_criterion(
            Phrase(
                "a step after {tokens}: time of expanded MLA / time of MHA",
                tokens=counted(last["length"], "token"),
            ),
            round_ratios(last["times"], "MLA, naive", "MHA"),
            high=0.95,
            role="limit",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    lines = timing_lines(numbers, "MHA", "MLA, naive", "MLA, absorbed")
    return Picture(
        "One token after a full cache, width 512, 8 heads",
        "tokens in the cache",
        "milliseconds",
        lines,
        "xy",
    )


def _picture_cache(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(name, ((0.0, 0.0), (4096.0, 4.0 * 4096 * values)))
        for name, values in numbers["kept"].items()
    )
    return Picture("Cache of one layer in fp32, width 512, 8 heads", "tokens", "bytes", lines)


_SIZE = (
    "One layer of width 512 with 8 heads and a rank of 128. With DeepSeek-V3's sizes the cache is "
    "57 times smaller than that of MHA with as many heads."
)

CACHE = Claim(
    id="mla-cache",
    sources=(NoteSection(ATTN_JOURNEY, "6"), NoteSection(ATTN_JOURNEY, "6.1")),
    statement="MLA's cache is smaller than that of multi-head attention.",
    prediction="At most half as many values are cached per token.",
    scope=Phrase("{size} Counted.", size=Phrase(_SIZE)),
    measure=_measure_counts,
    checks=_checks_cache,
    picture=_picture_cache,
    measured_with="mla-cache",
    takeaway="The cache has one latent and one rotary key per token, in place of a key and a value "
    "for every head.",
)

WORK = Claim(
    id="mla-work",
    sources=(NoteSection(ATTN_JOURNEY, "6"), NoteSection(ATTN_JOURNEY, "6.1")),
    statement="MLA computes less than multi-head attention, because its dimensions are smaller.",
    prediction="Fewer FLOPs per query-key pair and head.",
    scope=Phrase("{size} Counted.", size=Phrase(_SIZE)),
    measure=_measure_counts,
    checks=_checks_work,
    picture=_picture_cache,
    measured_with="mla-cache",
    takeaway="MLA computes more per pair in either form; it trades arithmetic for memory traffic.",
)

ABSORBED = Claim(
    id="mla-absorbed",
    sources=(NoteSection(ATTN_JOURNEY, "6"),),
    statement="A decoding step is faster when queries are absorbed than when the cache is expanded "
    "to all heads.",
    prediction="The absorbed form takes at most 0.9 of the time, after 256 to 4096 tokens.",
    scope=Phrase("{size} Timed on this CPU.", size=Phrase(_SIZE)),
    measure=_measure,
    checks=_checks_absorbed,
    picture=_picture,
    timed=True,
    measured_with="mla-absorbed",
    takeaway="Absorption saves time relative to expanding the cache, not relative to MHA.",
)

STEP = Claim(
    id="mla-step",
    sources=(NoteSection(ATTN_JOURNEY, "6"), NoteSection(ATTN_JOURNEY, "6.1")),
    statement="A decoding step is faster with MLA than with multi-head attention.",
    prediction="MLA takes at most 0.95 of the time with a long cache.",
    scope=Phrase(
        "{size} Timed on this CPU, which computes where a GPU would wait for memory.",
        size=Phrase(_SIZE),
    ),
    measure=_measure,
    checks=_checks_step,
    picture=_picture,
    timed=True,
    measured_with="mla-absorbed",
    takeaway="MLA reads fewer bytes and computes more; the machine decides which of the two "
    "matters.",
)

CLAIMS = (CACHE, WORK, ABSORBED, STEP)
