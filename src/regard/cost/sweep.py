"""Figures of one model over a range of contexts (`sweep`), and of two models (`compare_models`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from regard.cost.model import ModelSpec
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, as_json, memory_fit, roofline_bounds
from regard.errors import ArgumentError

TOKEN_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}
MAX_CONTEXT = 1 << 40
"""The longest context that is accepted."""
COMPARED_FIGURES = (
    "parameters",
    "active_parameters",
    "attention_parameters",
    "weight_bytes",
    "kv_bytes_per_token",
    "kv_bytes",
    "prefill_flops",
    "prefill_bytes",
    "decode_flops",
    "decode_bytes",
)
"""What two models are compared by."""


def parse_tokens(text: str) -> int:
    """A number of tokens; k is 1024 and M is 1024^2.

    Raises:
        ArgumentError: it is no number, less than 1, or beyond all sense.

    >>> parse_tokens("8k"), parse_tokens("1M"), parse_tokens("4096")
    (8192, 1048576, 4096)
    """
    found = re.fullmatch(r"(\d{1,18})([kKmM]?)", text.strip())
    value = int(found[1]) * TOKEN_SUFFIXES[found[2].lower()] if found else 0
    if not 1 <= value <= MAX_CONTEXT:
        raise ArgumentError(f"{text!r} is no number of tokens; write such as 4096, 8k or 1M")
    return value


def parse_context_range(text: str) -> list[int]:
    """The contexts of `context=1k..1M`: doubled from the first on, and the last in any case.

    Raises:
        ArgumentError: it has another form, or ends before it begins.

    >>> parse_context_range("context=1k..5k")
    [1024, 2048, 4096, 5120]
    """
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name.strip() != "context" or not dots:
        raise ArgumentError(f"{text!r} is no range; write such as context=1k..1M")
    start, stop = parse_tokens(first), parse_tokens(last)
    if stop < start:
        raise ArgumentError(f"{text!r} ends before it begins; write such as context=1k..1M")
    found = []
    while start < stop:
        found.append(start)
        start *= 2
    return [*found, stop]


def contexts_within_positions(contexts: list[int], *models: ModelSpec) -> list[int]:
    """Those that the learned positions of all models reach.

    Raises:
        ArgumentError: there is none.
    """
    least = min((m.max_context for m in models if m.max_context is not None), default=MAX_CONTEXT)
    found = [context for context in contexts if context <= least]
    if not found:
        raise ArgumentError(f"learned positions end at {least:,} tokens; begin the range below")
    return found


def sweep(
    model: ModelSpec, setting: Setting, contexts: list[int], machine: Machine | None = None
) -> list[dict[str, Any]]:
    """A row for each context: what is kept, what a prompt and a token cost; with a machine, seconds
    at best, and whether it fits.

    >>> from regard.cost import model_of
    >>> rows = sweep(model_of("gemma-3-1b"), Setting(), [1024, 2048])
    >>> [row["kv_bytes"] for row in rows]  # 4 layers of 26 keep everything
    [15728640, 19922944]
    """
    rows = []
    for context in contexts:
        report = CostReport(model, replace(setting, context=context))
        row: dict[str, Any] = {"context": context}
        row |= {name: report.as_json()[name] for name in COMPARED_FIGURES[5:]}
        if machine is not None:
            row |= {
                f"{what}_seconds": one.seconds
                for what, one in roofline_bounds(report, machine).items()
            }
            row["fits"] = memory_fit(report, machine).fits
        rows.append(row)
    return rows


def compare_models(
    first: CostReport, second: CostReport, machine: Machine | None = None
) -> dict[str, Any]:
    """Two models, and the first's figures divided by the second's; null where those are 0.

    With a machine, `ratios` has the seconds, too; null where one of the two does not fit it: there
    is no such time.

    >>> from regard.cost import CostReport, Setting, model_of
    >>> both = [CostReport(model_of(name), Setting()) for name in ("llama-2-7b", "llama-3-8b")]
    >>> compare_models(*both)["ratios"]["kv_bytes"]
    4.0
    """
    models = [model_figures(report, machine) for report in (first, second)]
    a, b = models
    ratios = {name: a[name] / b[name] if b[name] else None for name in COMPARED_FIGURES}
    if machine is not None:
        ratios |= {
            f"{what}_seconds": None if x is None or y is None else x / y
            for what, (x, y) in best_times(first, second, machine).items()
        }
    direction = f"{first.model.name} / {second.model.name}"
    return {"models": models, "ratio": direction, "ratios": ratios}


def best_times(
    first: CostReport, second: CostReport, machine: Machine
) -> dict[str, tuple[float | None, float | None]]:
    """Seconds at best of two models, for what both can do; None where a model does not fit the
    machine.

    >>> from regard.cost import CostReport, Setting, machine_of, model_of
    >>> both = [CostReport(model_of(name), Setting()) for name in ("deepseek-v3", "llama-3-8b")]
    >>> [second is None for second in best_times(*both, machine_of("h100-sxm"))["decode"]]
    [True, False]
    """
    found = [roofline_bounds(report, machine) for report in (first, second)]
    held = [memory_fit(report, machine).fits is not False for report in (first, second)]
    return {
        what: (
            found[0][what].seconds if held[0] else None,
            found[1][what].seconds if held[1] else None,
        )
        for what in found[0]
        if what in found[1]
    }


def model_figures(report: CostReport, machine: Machine | None = None) -> dict[str, Any]:
    """All figures of one model; with a machine, the bounds there.

    >>> from regard.cost import CostReport, Setting, model_of
    >>> model_figures(CostReport(model_of("gpt2"), Setting(1024)))["kv_bytes_per_token"]
    36864
    """
    found = report.as_json()
    return found if machine is None else {**found, "roofline": as_json(report, machine)}
