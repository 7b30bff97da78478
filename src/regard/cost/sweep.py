"""Figures of a model over contexts (`sweep`), and of models side by side (`compare_models`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regard.cost.memory_fit import DOES_NOT_FIT
from regard.cost.model import ModelSpec
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, as_json, memory_fit, roofline_bounds
from regard.errors import ArgumentError
from regard.units import plural

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
"""The figures by which two models are compared."""


def parse_tokens(text: str) -> int:
    """Return a number of tokens from its text; k is 1024 and M is 1024^2."""
    match = re.fullmatch(r"(\d{1,18})([kKmM]?)", text.strip())
    value = int(match[1]) * TOKEN_SUFFIXES[match[2].lower()] if match else 0
    if not 1 <= value <= MAX_CONTEXT:
        raise ArgumentError(
            f"{text!r} is not a number of tokens; write for example 4096, 8k or 1M",
            argument="context",
            value=text,
        )
    return value


def parse_context_range(text: str) -> list[int]:
    """Return the contexts of a range such as "context=1k..1M": doubled, and the last one."""
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name.strip() != "context" or not dots:
        raise ArgumentError(
            f"{text!r} is not a range of contexts; write for example context=1k..1M",
            argument="sweep",
            value=text,
        )
    start, stop = parse_tokens(first), parse_tokens(last)
    if stop < start:
        raise ArgumentError(
            f"the range {text!r} ends before it starts; write for example context=1k..1M"
        )
    contexts = []
    while start < stop:
        contexts.append(start)
        start *= 2
    return [*contexts, stop]


def contexts_within_positions(contexts: list[int], *models: ModelSpec) -> list[int]:
    """Return the contexts that the learned positions of all models allow."""
    longest = min((m.max_context for m in models if m.max_context is not None), default=MAX_CONTEXT)
    allowed = [context for context in contexts if context <= longest]
    if not allowed:
        raise ArgumentError(
            f"the models have learned positions for {plural(longest, 'token')} only; start the "
            "range at or below that"
        )
    return allowed


def sweep(
    model: ModelSpec, setting: Setting, contexts: list[int], machine: Machine | None = None
) -> list[dict[str, object]]:
    """Return for each context the cache bytes and the cost of a prompt and of a token, and with a
    machine the least seconds and how it fits.
    """
    rows = []
    for context in contexts:
        report = CostReport(model, replace(setting, context=context))
        row: dict[str, object] = {"context": context, "batch": setting.batch}
        row |= {name: report.as_json()[name] for name in COMPARED_FIGURES[5:]}
        if machine is not None:
            row |= {
                f"{what}_seconds": one.seconds
                for what, one in roofline_bounds(report, machine).items()
            }
            row["fit"] = memory_fit(report, machine).verdict
        rows.append(row)
    return rows


def compare_models(
    reports: Sequence[CostReport], machine: Machine | None = None
) -> dict[str, object]:
    """Return the figures of models and ratios to the first; null for 0, or where one does not
    fit.
    """
    models = [model_figures(report, machine) for report in reports]
    first, *others = reports
    times = {} if machine is None else best_times(reports, machine)
    ratios = []
    for i in range(1, len(reports)):
        a, b = models[0], models[i]
        one = {name: a[name] / b[name] if b[name] else None for name in COMPARED_FIGURES}
        for what, seconds in times.items():
            x, y = seconds[0], seconds[i]
            one[f"{what}_seconds"] = None if x is None or y is None else x / y
        ratios.append(one)
    names = [f"{first.model.name} / {other.model.name}" for other in others]
    if len(others) == 1:
        return {"models": models, "ratio": names[0], "ratios": ratios[0]}
    return {"models": models, "ratios": dict(zip(names, ratios, strict=True))}


def best_times(
    reports: Sequence[CostReport], machine: Machine
) -> dict[str, tuple[float | None, ...]]:
    """Return the least seconds of each model for the work that all can do; None if a model does not
    fit in the memory of the machine.
    """
    bounds = [roofline_bounds(report, machine) for report in reports]
    fits = [memory_fit(report, machine).verdict != DOES_NOT_FIT for report in reports]
    return {
        what: tuple(
            one[what].seconds if fit else None for one, fit in zip(bounds, fits, strict=True)
        )
        for what in bounds[0]
        if all(what in one for one in bounds)
    }


def model_figures(report: CostReport, machine: Machine | None = None) -> dict[str, Any]:
    """Return all figures of one model; with a machine, also the bounds on that machine."""
    figures = report.as_json()
    return figures if machine is None else {**figures, "roofline": as_json(report, machine)}
