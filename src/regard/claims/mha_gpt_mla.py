"""The notes' timing of MHA, GPT's attention and MLA side by side, warm and in turns; and what a
fused matrix and a mask save.

The note timed MHA and GPT with a dropout of 0.1 and MLA with 0.0, once each and cold, MHA first.
Here every kind runs with dropout 0.1 in training mode, in evaluation mode, and MLA also in training
mode without dropout, as the note had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from regard import plan
from regard.claims.claim import ATTN_JOURNEY, Claim, Criterion, NoteSection, median_criterion
from regard.claims.cpu_timing import round_ratios, time_cases, timing_settings
from regard.compare.experiment import Numbers
from regard.masks import Causal, Window
from regard.nn import Attention, Fused, Separate
from regard.nn.variants import gpt, mha, mla
from regard.view.charts import Line, Picture

DIM, HEADS, BATCH, TOKENS = 512, 16, 4, 128
DROPOUT = 0.1
LATENT: dict[str, Any] = {"kv_rank": 64, "nope_dim": 16, "rope_dim": 16, "value_dim": 16}
"""Values of 16 numbers a head, where those of MHA and GPT have 32, as in the note."""
MODES = ("training", "evaluation")


def _kinds() -> dict[str, nn.Module]:
    """Name -> module: standard attention sees everything, GPT's sees the past, as in the note."""
    latent = mla(DIM, HEADS, **LATENT)
    latent.dropout = DROPOUT
    return {
        "MHA": mha(DIM, HEADS, dropout=DROPOUT),
        "MHA, causal": mha(DIM, HEADS, is_causal=True, dropout=DROPOUT),
        "GPT": gpt(DIM, HEADS, dropout=DROPOUT),
        "MLA": latent,
        "MLA, dropout 0.0": mla(DIM, HEADS, **LATENT),
    }


def _measure(budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    x, made = torch.randn(BATCH, TOKENS, DIM), _kinds()
    rows = []
    for mode in MODES:
        cases = {}
        for name, module in made.items():
            module.train(mode == "training")
            cases[name] = partial(module, x)
        times = time_cases(cases, budget, rounds=15)
        with torch.inference_mode():
            out = {name: case() for name, case in cases.items()}
        rows.append(
            {
                "mode": mode,
                "times": times,
                "out": [
                    {
                        "name": n,
                        "shape": list(z.shape),
                        "mean": float(z.mean()),
                        "std": float(z.std()),
                    }
                    for n, z in out.items()
                ],
            }
        )
    told = timing_settings() | {"dropout": DROPOUT, "mode": "both"}
    return {**told, "dim": DIM, "heads": HEADS, "batch": BATCH, "tokens": TOKENS, "by_mode": rows}


def _table(numbers: Mapping[str, Any]) -> list[list[str]]:
    """MHA, GPT and MLA side by side: shape, mean, deviation and time of what each gives."""
    found = [["", "mode", "shape", "mean", "std", "ms"]]
    for row in numbers["by_mode"]:
        for one in row["out"]:
            shape = " x ".join(map(str, one["shape"]))
            ms = f"{1e3 * median(row['times'][one['name']]):.2f}"
            found.append(
                [one["name"], row["mode"], shape, f"{one['mean']:.4f}", f"{one['std']:.4f}", ms]
            )
    return found


def _checks(numbers: Mapping[str, Any]) -> list[Criterion]:
    found = [
        median_criterion(
            f"in {row['mode']} mode: GPT's time by MHA's",
            round_ratios(row["times"], "GPT", "MHA"),
            high=0.95,
        )
        for row in numbers["by_mode"]
    ]
    last = numbers["by_mode"][-1]["times"]
    return [
        *found,
        median_criterion(
            "... by that of MHA with the same mask, in evaluation mode",
            round_ratios(last, "GPT", "MHA, causal"),
            role="reported",
        ),
        median_criterion(
            "what the mask does to MHA: its time by that without a mask, in evaluation mode",
            round_ratios(last, "MHA, causal", "MHA"),
            role="reported",
        ),
    ]


def _checks_mla(numbers: Mapping[str, Any]) -> list[Criterion]:
    training, evaluation = (row["times"] for row in numbers["by_mode"])
    return [
        median_criterion(
            "in training mode, dropout 0.1 in both: MLA's time by MHA's",
            round_ratios(training, "MLA", "MHA"),
            high=0.95,
        ),
        median_criterion(
            "in evaluation mode: MLA's time by MHA's",
            round_ratios(evaluation, "MLA", "MHA"),
            high=0.95,
        ),
        median_criterion(
            "as the note timed it, MLA without dropout and MHA with it",
            round_ratios(training, "MLA, dropout 0.0", "MHA"),
            role="reported",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    names = list(numbers["by_mode"][0]["times"])
    lines = tuple(
        Line(
            row["mode"],
            tuple((float(i), 1e3 * median(row["times"][n])) for i, n in enumerate(names)),
        )
        for row in numbers["by_mode"]
    )
    named = ", ".join(f"{i} {name}" for i, name in enumerate(names))
    return Picture("One layer of width 512, 16 heads, 4 x 128 tokens", named, "milliseconds", lines)


_SETTING = (
    "One layer on one thread of this CPU, warm, in turns, in processor time, with the "
    "quartiles of the ratios of rounds; a difference below 5 % does not count as faster."
)

CLAIM = Claim(
    id="fused",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"), NoteSection(ATTN_JOURNEY, "code")),
    statement="GPT's attention is faster than standard multi-head attention.",
    prediction="At most 0.95 of its time, in training mode with a dropout of 0.1 in both, and in "
    "evaluation mode.",
    scope=_SETTING + " On a GPU, where a call costs more, one fused matrix saves more.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    measured_with="fused",
    table=_table,
    takeaway="No arithmetic is saved. A cold, single run in a fixed order, with dropout in "
    "some of the kinds, compares nothing.",
)

MLA_TIME = Claim(
    id="mla-time",
    sources=(NoteSection(ATTN_JOURNEY, "6.1"), NoteSection(ATTN_JOURNEY, "code")),
    statement="MLA is faster than standard multi-head attention.",
    prediction="At most 0.95 of its time with the same dropout in both, and in evaluation mode.",
    scope=_SETTING
    + " The note timed MLA with dropout 0.0 against 0.1 of the others, and values of 16 numbers a "
    "head against 32.",
    measure=_measure,
    checks=_checks_mla,
    picture=_picture,
    timed=True,
    measured_with="fused",
    table=_table,
    takeaway="With narrower values it computes less in a prompt. Most of what the note measured is "
    "the missing dropout, and in decoding it is another question: `mla-step`.",
)


def _pair() -> tuple[Attention, Attention]:
    """Fused and separate, with the same weights."""
    fused, apart = gpt(DIM, HEADS, bias=False).eval(), mha(DIM, HEADS, is_causal=True).eval()
    rows, parts = fused.project, apart.project
    assert isinstance(rows, Fused)
    assert isinstance(parts, Separate)
    with torch.no_grad():
        rows.linear.weight.copy_(
            torch.cat([part.linear.weight for part in (parts.q, parts.k, parts.v)])
        )
    fused.output.load_state_dict(apart.output.state_dict())
    return fused, apart


def _measure_work(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    fused, apart = _pair()
    x = torch.randn(2, 7, DIM)
    with torch.no_grad():
        error = float((fused(x) - apart(x)).abs().max())
    work = [fused.describe(TOKENS), apart.describe(TOKENS)]
    q = torch.zeros(1, 1, 4096, 32)
    every = plan(q, q, q).flops
    done = {}
    for name, mask in (("causal", Causal()), ("window", Causal() & Window(128))):
        told = plan(q, q, q, mask=mask)
        done[name] = {
            "plain": told["reference"].flops / every,
            "ours": told[told.kernel].flops / every,
        }
    return {
        "dim": DIM,
        "heads": HEADS,
        "error": error,
        "done": done,
        "flops": [one.flops_per_token.value for one in work],
        "parameters": [one.parameters.value for one in work],
    }


def _checks_work(numbers: Mapping[str, Any]) -> list[Criterion]:
    flops, parameters = numbers["flops"], numbers["parameters"]
    return [
        Criterion(
            "both compute the same: largest difference", numbers["error"], high=1e-4, role="control"
        ),
        Criterion("FLOPs of the fused one by those of the other", flops[0] / flops[1], high=0.99),
        Criterion("parameters, likewise", parameters[0] / parameters[1], role="reported"),
    ]


def _checks_mask(numbers: Mapping[str, Any]) -> list[Criterion]:
    done = numbers["done"]
    return [
        Criterion(
            "of the plain computation, with a causal mask: FLOPs by those without a mask",
            done["causal"]["plain"],
            low=0.99,
        ),
        Criterion(
            "of the kernel that regard chooses, with a causal mask",
            done["causal"]["ours"],
            low=0.99,
            role="limit",
        ),
        Criterion(
            "... and with a window of 128 in 4096", done["window"]["ours"], low=0.99, role="limit"
        ),
    ]


def _picture_work(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            name,
            (
                (0.0, 1.0),
                (1.0, numbers["done"]["causal"][who]),
                (2.0, numbers["done"]["window"][who]),
            ),
        )
        for name, who in (("plain", "plain"), ("regard's kernel", "ours"))
    )
    return Picture(
        "FLOPs of 4096 queries and keys, by those without a mask",
        "0 no mask, 1 causal, 2 window of 128",
        "share",
        lines,
    )


WORK = Claim(
    id="fused-work",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"),),
    statement="One matrix for queries, keys and values computes less than three.",
    prediction="Fewer FLOPs for the same result.",
    scope="Counted exactly, at width 512; the same at any size.",
    measure=_measure_work,
    checks=_checks_work,
    picture=_picture_work,
    measured_with="fused-work",
    takeaway="The same arithmetic in one call: what it can save is calls and readings of the input.",
)

MASK = Claim(
    id="mask-work",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"),),
    statement="A mask saves no multiplications.",
    prediction="As many FLOPs with a mask as without one.",
    scope="Counted by regard.plan at 4096 tokens.",
    measure=_measure_work,
    checks=_checks_mask,
    picture=_picture_work,
    measured_with="fused-work",
    takeaway="True of code that multiplies everything and fills in minus infinity afterwards; a "
    "kernel that skips masked tiles does half of the causal work, and a twentieth with a "
    "window.",
)

CLAIMS = (CLAIM, MLA_TIME, WORK, MASK)
