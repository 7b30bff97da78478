"""Claims about the time of MHA, GPT's attention and MLA, about fused projections, and about masks.

The note timed each once, without warm-up, MLA without dropout. Here all are timed in turns after
a warm-up, with dropout 0.1 in training and in evaluation mode; MLA also as in the note.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from experiments.claim import ATTN_JOURNEY, Claim, Criterion, NoteSection, median_criterion
from experiments.cpu_timing import round_ratios, time_cases, timing_settings
from regard import plan
from regard.compare.experiment import Numbers
from regard.language import Phrase
from regard.masks import Causal, Window
from regard.nn import Attention, FusedQKV, SeparateQKV
from regard.nn.variants import gpt, mha, mla
from regard.view.charts import Line, Picture

DIM, HEADS, BATCH, TOKENS = 512, 16, 4, 128
DROPOUT = 0.1
LATENT: dict[str, Any] = {"kv_rank": 64, "nope_dim": 16, "rope_dim": 16, "value_dim": 16}
"""The options of MLA. Its values have 16 dims per head and those of MHA and GPT 32, as in the
note.
"""
MODES = ("training", "evaluation")


def _kinds() -> dict[str, nn.Module]:
    """Return the modules by name. As in the note, MHA has no mask and GPT a causal mask."""
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
    x, modules = torch.randn(BATCH, TOKENS, DIM), _kinds()
    rows = []
    for mode in MODES:
        cases = {}
        for name, module in modules.items():
            module.train(mode == "training")
            cases[name] = partial(module, x)
        times = time_cases(cases, budget, rounds=15)
        with torch.inference_mode():
            outputs = {name: case() for name, case in cases.items()}
        rows.append(
            {
                "mode": mode,
                "times": times,
                "out": [
                    {
                        "name": kind,
                        "shape": list(z.shape),
                        "mean": float(z.mean()),
                        "std": float(z.std()),
                    }
                    for kind, z in outputs.items()
                ],
            }
        )
    settings = timing_settings() | {"dropout": DROPOUT, "mode": "both"}
    return {
        **settings,
        "dim": DIM,
        "heads": HEADS,
        "batch": BATCH,
        "tokens": TOKENS,
        "by_mode": rows,
    }


def _table(numbers: Numbers) -> list[list[str]]:
    """Return a table with the shape, mean, standard deviation and time of each module's output."""
    rows = [["", "mode", "shape", "mean", "std", "ms"]]
    for row in numbers["by_mode"]:
        for output in row["out"]:
            shape = " x ".join(map(str, output["shape"]))
            ms = f"{1e3 * median(row['times'][output['name']]):.2f}"
            rows.append(
                [
                    output["name"],
                    row["mode"],
                    shape,
                    f"{output['mean']:.4f}",
                    f"{output['std']:.4f}",
                    ms,
                ]
            )
    return rows


def _checks(numbers: Numbers) -> list[Criterion]:
    criteria = [
        median_criterion(
            Phrase("{mode} mode: GPT's time / MHA's time", mode=row["mode"]),
            round_ratios(row["times"], "GPT", "MHA"),
            high=0.95,
        )
        for row in numbers["by_mode"]
    ]
    last = numbers["by_mode"][-1]["times"]
    return [
        *criteria,
        median_criterion(
            "evaluation mode: GPT's time / time of MHA with the same mask",
            round_ratios(last, "GPT", "MHA, causal"),
            role="reported",
        ),
        median_criterion(
            "evaluation mode: time of MHA with a causal mask / time without a mask",
            round_ratios(last, "MHA, causal", "MHA"),
            role="reported",
        ),
    ]


def _checks_mla(numbers: Numbers) -> list[Criterion]:
    training, evaluation = (row["times"] for row in numbers["by_mode"])
    return [
        median_criterion(
            "training mode, dropout 0.1 in both: MLA's time / MHA's time",
            round_ratios(training, "MLA", "MHA"),
            high=0.95,
        ),
        median_criterion(
            "evaluation mode: MLA's time / MHA's time",
            round_ratios(evaluation, "MLA", "MHA"),
            high=0.95,
        ),
        median_criterion(
            "training mode, MLA without dropout and MHA with it, as in the note: MLA's time / "
            "MHA's time",
            round_ratios(training, "MLA, dropout 0.0", "MHA"),
            role="reported",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
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
    "One layer on one thread of this CPU, after a warm-up, in turns, in processor time, with the "
    "quartiles of the ratios over rounds. A difference below 5 % does not count as faster."
)

CLAIM = Claim(
    id="fused",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"), NoteSection(ATTN_JOURNEY, "code")),
    statement="GPT's attention is faster than standard multi-head attention.",
    prediction="GPT's attention takes at most 0.95 of the time, in training mode with a dropout of "
    "0.1 in both, and in evaluation mode.",
    scope=Phrase(
        "{setting} On a GPU a call costs more, so that one fused matrix saves more.",
        setting=Phrase(_SETTING),
    ),
    measure=_measure,
    checks=_checks,
    picture=_picture,
    timed=True,
    measured_with="fused",
    table=_table,
    takeaway="A fused matrix saves no arithmetic. A single run without warm-up, in a fixed order "
    "and with dropout in some of the modules, is not a comparison.",
)

MLA_TIME = Claim(
    id="mla-time",
    sources=(NoteSection(ATTN_JOURNEY, "6.1"), NoteSection(ATTN_JOURNEY, "code")),
    statement="MLA is faster than standard multi-head attention.",
    prediction="MLA takes at most 0.95 of the time, with the same dropout in both and in "
    "evaluation mode.",
    scope=Phrase(
        "{setting} The note timed MLA with dropout 0.0 and the others with 0.1; MLA's values have "
        "16 dims per head, those of the others 32.",
        setting=Phrase(_SETTING),
    ),
    measure=_measure,
    checks=_checks_mla,
    picture=_picture,
    timed=True,
    measured_with="fused",
    table=_table,
    takeaway="With smaller values MLA computes less for a prompt. Most of the difference in the "
    "note is due to the missing dropout. For decoding see `mla-step`.",
)


def _pair() -> tuple[Attention, Attention]:
    """Return attention with fused and with separate projections of the same weights."""
    fused, separate = gpt(DIM, HEADS, bias=False).eval(), mha(DIM, HEADS, is_causal=True).eval()
    fused_project, separate_project = fused.project, separate.project
    assert isinstance(fused_project, FusedQKV)
    assert isinstance(separate_project, SeparateQKV)
    with torch.no_grad():
        fused_project.linear.weight.copy_(
            torch.cat(
                [
                    part.linear.weight
                    for part in (separate_project.q, separate_project.k, separate_project.v)
                ]
            )
        )
    fused.output.load_state_dict(separate.output.state_dict())
    return fused, separate


def _measure_work(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    fused, separate = _pair()
    x = torch.randn(2, 7, DIM)
    with torch.no_grad():
        error = float((fused(x) - separate(x)).abs().max())
    descriptions = [fused.describe(TOKENS), separate.describe(TOKENS)]
    q = torch.zeros(1, 1, 4096, 32)
    full_flops = plan(q, q, q).flops
    flops_share = {}
    for name, mask in (("causal", Causal()), ("window", Causal() & Window(128))):
        kernel_plan = plan(q, q, q, mask=mask)
        flops_share[name] = {
            "plain": kernel_plan["reference"].flops / full_flops,
            "ours": kernel_plan[kernel_plan.kernel].flops / full_flops,
        }
    return {
        "dim": DIM,
        "heads": HEADS,
        "error": error,
        "done": flops_share,
        "flops": [description.flops_per_token.value for description in descriptions],
        "parameters": [description.parameters.value for description in descriptions],
    }


def _checks_work(numbers: Numbers) -> list[Criterion]:
    flops, parameters = numbers["flops"], numbers["parameters"]
    return [
        Criterion("largest difference of the outputs", numbers["error"], high=1e-4, role="control"),
        Criterion("FLOPs: fused / separate", flops[0] / flops[1], high=0.99),
        Criterion("parameters: fused / separate", parameters[0] / parameters[1], role="reported"),
    ]


def _checks_mask(numbers: Numbers) -> list[Criterion]:
    share = numbers["done"]
    return [
        Criterion(
            "plain computation with a causal mask: FLOPs / FLOPs without a mask",
            share["causal"]["plain"],
            low=0.99,
        ),
        Criterion(
            "kernel that regard chooses, with a causal mask: FLOPs / FLOPs without a mask",
            share["causal"]["ours"],
            low=0.99,
            role="limit",
        ),
        Criterion(
            "kernel that regard chooses, with a window of 128 in 4096 tokens: FLOPs / FLOPs "
            "without a mask",
            share["window"]["ours"],
            low=0.99,
            role="limit",
        ),
    ]


def _picture_work(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            name,
            (
                (0.0, 1.0),
                (1.0, numbers["done"]["causal"][key]),
                (2.0, numbers["done"]["window"][key]),
            ),
        )
        for name, key in (("plain", "plain"), ("regard's kernel", "ours"))
    )
    return Picture(
        "FLOPs of 4096 queries and keys, relative to those without a mask",
        "0 no mask, 1 causal, 2 window of 128",
        "share",
        lines,
    )


WORK = Claim(
    id="fused-work",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"),),
    statement="One matrix for queries, keys and values computes less than three.",
    prediction="The fused projection has fewer FLOPs for the same result.",
    scope="Counted exactly, at width 512; the same at any size.",
    measure=_measure_work,
    checks=_checks_work,
    picture=_picture_work,
    measured_with="fused-work",
    takeaway="One call does the same arithmetic; it can save calls and reads of the input.",
)

MASK = Claim(
    id="mask-work",
    sources=(NoteSection(ATTN_JOURNEY, "6.2"),),
    statement="A mask saves no multiplications.",
    prediction="There are as many FLOPs with a mask as without one.",
    scope="Counted by regard.plan at 4096 tokens.",
    measure=_measure_work,
    checks=_checks_mask,
    picture=_picture_work,
    measured_with="fused-work",
    takeaway="True of code that computes every score and then writes minus infinity. A kernel that "
    "skips masked tiles does half of the work with a causal mask, and less with a window.",
)

CLAIMS = (CLAIM, MLA_TIME, WORK, MASK)
