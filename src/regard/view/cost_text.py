"""The text of `regard cost`: parameters by part, costs of a context, and bounds on a machine."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from textwrap import fill
from typing import Any

from regard import units
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.cost import CostReport
from regard.cost.mechanism_table import MAX_BATCH, MAX_TABLE_CONTEXT, MechanismCost
from regard.cost.ranks import RanksReport
from regard.cost.roofline import (
    MACHINES,
    Machine,
    arithmetic_intensity,
    memory_fit,
    roofline_bounds,
)
from regard.cost.softmax import SoftmaxSpec
from regard.cost.sweep import COMPARED_FIGURES, best_times
from regard.text_table import format_table, line_width

SUGGESTED, EVIDENCE = "sizes that were not given", "what is published about quality"
"""The titles of two parts of a table of mechanisms."""
BYTES = tuple(name for name in COMPARED_FIGURES if "bytes" in name)


def page(report: CostReport, machine: Machine | None) -> str:
    """Return the full text for one model."""
    blocks = [_head(report), _parts(report), _costs(report)]
    if machine is not None:
        blocks.append(_bounds(report, machine))
    if report.model.notes:
        blocks.append("\n".join(f"- {note}" for note in report.model.notes))
    return "\n\n".join(blocks)


def _head(report: CostReport) -> str:
    model = report.model
    kinds = [f"  {n} x {kind}" for kind, n in model.attention_kinds.items()]
    title = (
        f"{model.name}: {units.plural(model.parameters, 'parameter')}, "
        f"{model.active_parameters:,} active for one token"
    )
    return "\n".join([title, *kinds])


def _parts(report: CostReport) -> str:
    model = report.model
    rows = [("part", "parameters", "share", "active parameters")]
    rows += [
        (
            p.name,
            f"{p.parameters:,}",
            f"{p.parameters / model.parameters:.1%}",
            f"{p.active_parameters:,}",
        )
        for p in model.parts
    ]
    rows.append(("all", f"{model.parameters:,}", "100.0%", f"{model.active_parameters:,}"))
    lines, layers = [format_table(rows)], model.layers
    first = layers[0].mixer
    if isinstance(first, SoftmaxSpec) and not model.encoder:
        one = first.weights.matrices
        lines.append(
            f"attention of one layer: {one:,} = M (H D + G D + G E + H E); of "
            f"{units.plural(len(layers), 'layer')}: "
            f"{model.attention_parameters:,}, {model.attention_parameters / model.parameters:.1%} "
            "of all"
        )
    if model.tied:
        lines.append(
            "the head is the embedding: it has no parameters of its own, and all of it is active"
        )
    return "\n".join(lines)


def _costs(report: CostReport) -> str:
    setting, model = report.setting, report.model
    rows = [("weights", f"{report.weight_bytes:,} bytes", units.size(report.weight_bytes))]
    if model.decodes:
        rows += [
            (
                "cache, for each token",
                f"{report.kv_bytes_per_token:,} bytes",
                units.size(report.kv_bytes_per_token),
            ),
            ("cache, all", f"{report.kv_bytes:,} bytes", units.size(report.kv_bytes)),
        ]
        if report.kv_growth != report.kv_bytes_per_token:
            grows = f"{report.kv_growth:,} bytes"
            rows.insert(
                2, ("  in layers that keep all tokens", grows, units.size(report.kv_growth))
            )
        if report.state_bytes:
            rows.append(
                (
                    "  of which states",
                    f"{report.state_bytes:,} bytes",
                    units.size(report.state_bytes),
                )
            )
    rows.append(
        (
            "prompt",
            units.count(report.prefill_flops, "FLOP"),
            _bytes_and_intensity(report.prefill_flops, report.prefill_bytes),
        )
    )
    if model.decodes:
        rows.append(
            (
                "one token",
                units.count(report.decode_flops, "FLOP"),
                _bytes_and_intensity(report.decode_flops, report.decode_bytes),
            )
        )
    for form, count in report.decode_forms.items():
        rows.append((f"  latents, {form}", units.count(count, "FLOP"), ""))
    title = (
        f"context {setting.context:,}, batch {setting.batch}, weights {setting.dtype}, "
        f"cache {setting.format.name}"
    )
    return f"{title}\n{format_table(rows)}"


def _bytes_and_intensity(count: int, moved: int) -> str:
    intensity = float(f"{arithmetic_intensity(count, moved):.3g}")
    return f"{units.size(moved)} moved, {intensity:,g} FLOP/byte"


def _bounds(report: CostReport, machine: Machine) -> str:
    rate = units.count(machine.rate(report.setting.dtype), "FLOP/s")
    lines = [
        f"on {machine.name} at best: {units.rate(machine.bandwidth)}, {rate}",
        f"  ({machine.source})",
        f"  weights and cache are {_fit(report, machine)}",
        *([f"  (memory: {machine.memory_source})"] if machine.memory_source else []),
    ]
    if memory_fit(report, machine).fits is False:
        lines.append("  times are those of such a machine with more memory:")
    for what, bound in roofline_bounds(report, machine).items():
        line = f"  {what}: {units.seconds(bound.seconds)}, bound by {bound.by}"
        if what == "decode":
            tokens_per_second = report.setting.batch / bound.seconds
            line += f", {tokens_per_second:,.4g} " + "tokens/s"
        lines.append(line)
    return "\n".join(lines)


def _fit(report: CostReport, machine: Machine) -> str:
    """Describe how much memory weights and caches need, and whether it fits."""
    room = memory_fit(report, machine)
    if room.fits is None:
        return f"{units.size(room.needed)}; its memory is not known"
    if room.fits:
        left = units.size(room.memory - room.needed)
        return (
            f"{units.size(room.needed)}; its memory is {units.size(room.memory)}: they fit, with "
            f"{left} to spare"
        )
    return f"{units.size(room.needed)}; its memory is {units.size(room.memory)}: they do not fit"


def ranks_page(plan: RanksReport, method: str | None = None) -> str:
    """Return the text for a model over several ranks.

    Args:
        plan: the costs of every method.
        method: the one method to show; None shows all.
    """
    setting, ranks = plan.report.setting, units.plural(plan.ranks, "rank")
    rows = [
        ("", "method", "first token", "a token", "sent", "sent a token", "held", "fits", "why not")
    ]
    for x in plan.estimates:
        if method not in (None, x.method):
            continue
        name = x.method if x.tensor_ranks == 1 else f"{x.method}, {x.tensor_ranks} share a matrix"
        times = units.seconds(x.prefill_seconds), units.seconds(x.decode_seconds)
        sizes = units.size(x.sent), units.size(x.token_sent), units.size(x.memory)
        cells = (units.ABSENT,) * 6 if x.why_not else (*times, *sizes, _yes_or_no(plan.fits(x)))
        rows.append((">" if x.method == plan.best else "", name, *cells, x.why_not))
    head = (
        f"{plan.report.model.name} on {ranks} of {plan.machine.name}: "
        f"context {units.tokens(setting.context)}, batch {setting.batch}, {setting.dtype}"
    )
    link = f"A rank sends {units.rate(plan.bytes_per_second)}. " if plan.ranks > 1 else ""
    notes = (
        f"{link}Times are lower bounds: full rates, no latency, equal work on every rank.\n"
        "exchange sends while attention computes; the other methods do not overlap.\n"
        "sent: the most that one rank sends for the prompt. held: weights, cache and received\n"
        "blocks of one rank, without activations. >: the fastest method that fits."
    )
    return "\n\n".join([head, format_table(rows, left=(0, 1, 7, 8), gap=2), notes])


def _yes_or_no(fits: bool | None) -> str:  # noqa: FBT001  (a value, not an option)
    """Return "yes", "no", or the sign for an unknown value."""
    return units.ABSENT if fits is None else "yes" if fits else "no"


def comparison(reports: Sequence[CostReport], machine: Machine | None) -> str:
    """Return the figures of several models with their units; with two models, also their ratio.

    Args:
        reports: the models, at least two.
        machine: a machine for the times; None for none.
    """
    names = [report.model.name for report in reports]
    figures = [report.as_json() for report in reports]
    pair = len(reports) == 2
    rows: list[list[str]] = [["", *names, *([" / ".join(names)] if pair else [])]]
    for name in COMPARED_FIGURES:
        unit = _figure_format(name)
        values = [one[name] for one in figures]
        ratio = [_ratio(*values)] if pair else []
        rows.append([name.replace("_", " "), *map(unit, values), *ratio])
    setting, notes = reports[0].setting, []
    if machine is not None:
        answers = {True: "yes", False: "no", None: "not known"}
        fits = [memory_fit(report, machine).fits for report in reports]
        rows.append([f"fits {machine.name}", *(answers[one] for one in fits)])
        for what, seconds in best_times(reports, machine).items():
            cells = ["does not fit" if t is None else units.seconds(t) for t in seconds]
            known = [t for t in seconds if t is not None]
            ratio = [_ratio(*known) if len(known) == 2 else "-"] if pair else []
            rows.append([f"{what} on {machine.name}", *cells, *ratio])
        notes = [
            f"on {machine.name}: {machine.source}"
            + (f"; memory: {machine.memory_source}" if machine.memory_source else "")
        ]
        notes += [
            f"{report.model.name}: weights and cache are {_fit(report, machine)}"
            for report in reports
        ]
    title = f"context {setting.context:,}, batch {setting.batch}"
    if pair:
        title += (
            f"; the last column is {names[0]} divided by {names[1]}: above 1x, {names[0]} needs "
            "more"
        )
    return "\n".join([title, format_table(rows), *notes])


def _figure_format(name: str) -> Callable[[int], str]:
    """Return the function that formats a figure: bytes, FLOPs, or a plain number."""
    if name in BYTES:
        return units.size
    return partial(units.count, unit="FLOP") if "flops" in name else "{:,}".format


def _ratio(a: float, b: float) -> str:
    """Format a ratio, or "-" for a zero denominator."""
    return f"{a / b:.4g}x" if b else "-"


def mechanisms_page(
    rows: Sequence[MechanismCost], machine: Machine | None, model_sizes: str = ""
) -> str:
    """Return the text of a table of mechanisms: sizes, work, suggested sizes, and evidence.

    Args:
        rows: one row for each mechanism.
        machine: the machine of the times and limits; None for none.
        model_sizes: the sizes of the model that were not given, with their source, or "".
    """
    blocks = [mechanisms_title(rows, machine)]
    for title, table in mechanism_tables(rows, machine).items():
        blocks.append(f"{title}\n{format_table(table)}")
    sizes = suggested_sizes(rows, model_sizes)
    if sizes:
        lines = _wrapped(f"{label}: {text}" for label, text in sizes)
        blocks.append("\n".join([SUGGESTED, *lines]))
    evidence = (f"{row.label}: {quoted_evidence(row)}" for row in rows)
    blocks.append("\n".join([EVIDENCE, *_wrapped(evidence)]))
    return "\n\n".join(blocks)


def mechanisms_title(rows: Sequence[MechanismCost], machine: Machine | None) -> str:
    """Return the line above a table of mechanisms: the model and the setting."""
    setting, model = rows[0].report.setting, rows[0].report.model
    on = "" if machine is None else f", {machine.name}"
    return (
        f"{model.name}: {units.plural(len(model.layers), 'layer')} of width {model.dim:,}; context "
        f"{units.tokens(setting.context)}, batch {setting.batch}, weights {setting.dtype}, cache "
        f"{setting.format.name}{on}"
    )


def mechanism_tables(
    rows: Sequence[MechanismCost], machine: Machine | None
) -> dict[str, list[tuple[str, ...]]]:
    """Return the two tables of mechanisms by title; the first row of each has the headings.

    Args:
        rows: one row for each mechanism.
        machine: the machine of the times and limits; None for none.
    """
    memory: list[tuple[str, ...]] = [
        ("mechanism", "parameters", "in attention", "cache a token", "cache")
    ]
    work: list[tuple[str, ...]] = [
        ("mechanism", "prompt", "moved", "a token", "moved"),
    ]
    for row in rows:
        report = row.report
        memory.append(
            (
                row.label,
                units.count(report.model.parameters),
                units.count(report.model.attention_parameters),
                units.size(report.kv_bytes_per_token),
                units.size(report.kv_bytes),
            )
        )
        work.append(
            (
                row.label,
                units.count(report.prefill_flops, "FLOP"),
                units.size(report.prefill_bytes),
                units.count(report.decode_flops, "FLOP"),
                units.size(report.decode_bytes),
            )
        )
    if machine is not None:
        memory[0] += ("batch that fits", "context that fits")
        work[0] += ("prompt at best", "token at best")
        for i, row in enumerate(rows, 1):
            memory[i] += (
                _limit(row.max_batch, MAX_BATCH),
                _limit(row.max_context, row.report.model.max_context or MAX_TABLE_CONTEXT),
            )
            work[i] += (units.seconds(row.prefill_seconds), units.seconds(row.decode_seconds))
    return {"memory": memory, "work": work}


def _limit(n: int | None, most: int) -> str:
    """Format the largest number that fits; a number that was not bounded has a sign."""
    if n is None:
        return units.ABSENT
    return "does not fit" if n == 0 else f">= {n:,}" if n == most else f"{n:,}"


def suggested_sizes(rows: Sequence[MechanismCost], model_sizes: str = "") -> list[tuple[str, str]]:
    """Return the sizes that were not given and their sources, by the mechanism that has them.

    Args:
        rows: one row for each mechanism.
        model_sizes: those of the model itself, or "".
    """
    lines = [("the model", model_sizes)] if model_sizes else []
    for row in rows:
        by_source: dict[str, list[str]] = {}
        for option, source in row.suggested.items():
            by_source.setdefault(source, []).append(f"{option} {row.options[option]:,}")
        texts = [f"as {source}: {', '.join(sizes)}" for source, sizes in by_source.items()]
        lines += [(row.label, "; ".join(texts))] if texts else []
    return lines


def quoted_evidence(row: MechanismCost) -> str:
    """Return what is published about the quality of a mechanism, with its source."""
    source = f" [{row.evidence.source}]" if row.evidence.source else ""
    return f"{row.evidence.finding}{source}"


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines wrapped at the width of the terminal."""
    width = line_width()
    return [fill(x, width, initial_indent="  ", subsequent_indent="    ") for x in lines]


def sweep_table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with one row per context."""
    timed = "decode_seconds" in rows[0]
    lines = [
        (
            "context",
            "cache",
            "prompt",
            "one token",
            "moved",
            *(("prompt at best", "token at best", "fits") if timed else ()),
        )
    ]
    for row in rows:
        answers = {True: "yes", False: "no", None: "not known"}
        at_best = (
            (
                units.seconds(row["prefill_seconds"]),
                units.seconds(row["decode_seconds"]),
                answers[row["fits"]],
            )
            if timed
            else ()
        )
        lines.append(
            (
                f"{row['context']:,}",
                units.size(row["kv_bytes"]),
                units.count(row["prefill_flops"], "FLOP"),
                units.count(row["decode_flops"], "FLOP"),
                units.size(row["decode_bytes"]),
                *at_best,
            )
        )
    return f"{name}\n{format_table(lines, left=())}"


def listing(*, json: bool) -> str:
    """Return the known models with their parameters, and the machines with their sources."""
    sizes = {name: model_of(name).parameters for name in PUBLISHED_MODELS}
    if json:
        models = {
            name: {"parameters": n, "source": PUBLISHED_MODELS[name].source}
            for name, n in sizes.items()
        }
        machines = {
            name: {
                "bandwidth": m.bandwidth,
                "flops": dict(m.flops),
                "source": m.source,
                "memory_bytes": m.memory or None,
                "memory_source": m.memory_source or None,
            }
            for name, m in MACHINES.items()
        }
        return json_format.dumps({"models": models, "machines": machines}, indent=1)
    rates = [
        (
            name,
            units.rate(m.bandwidth),
            units.size(m.memory) if m.memory else "",
            *(f"{k} {units.count(v, 'FLOP/s')}" for k, v in m.flops.items()),
        )
        for name, m in MACHINES.items()
    ]
    most = max(map(len, rates))
    rates = [(*row, *[""] * (most - len(row))) for row in rates]
    return "\n\n".join(
        [
            "models, with their numbers of parameters\n"
            + format_table([(name, f"{n:,}") for name, n in sizes.items()]),
            "machines, with their peak bandwidth, memory and FLOP/s\n" + format_table(rates),
            "sources of these numbers\n"
            + "\n".join(
                f"{name}: {m.source}" + (f"; memory: {m.memory_source}" if m.memory_source else "")
                for name, m in MACHINES.items()
            ),
        ]
    )
