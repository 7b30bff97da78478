"""The rows of both tables: counted costs, measured speeds, and results of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.compare.quality import RecallTask, TextTask, run_name
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import in_teaching_order
from tests.compare.catalogue_table.kept import QUALITY, SPEED, read
from tests.compare.catalogue_table.quality import MOST_USED, RATE, SEEDS, STEPS
from tests.compare.catalogue_table.sizes import decodes, reference_report

KINDS = ("softmax", "latent", "selected", "linear", "memory", "cross", "additive")


@dataclass(frozen=True)
class Row:
    """One mechanism: bytes and FLOPs of the whole reference model, and seconds of one small layer.

    Attributes:
        name: its name in the catalogue.
        token_bytes: bytes that one token adds to the caches; None if it does not decode.
        state_bytes: bytes of all states, whatever the length.
        cache_bytes: bytes of all caches at the context.
        prompt_flops, token_flops: FLOPs of a prompt, and of the token at its end.
        prompt_seconds, token_seconds: measured medians.
    """

    name: str
    token_bytes: int | None
    state_bytes: int | None
    cache_bytes: int | None
    prompt_flops: int
    token_flops: int | None
    prompt_seconds: float
    token_seconds: float | None


def speeds(path: Path = SPEED) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings of the measurement, and the line of each mechanism."""
    settings, *lines = read(path)
    return settings, {line["name"]: line for line in lines}


def cost_rows() -> Iterator[Row]:
    """One row for each mechanism of the catalogue: first the most used, then the others by kind."""
    _, measured = speeds()
    others = [entry.name for entry in in_teaching_order() if entry.name not in MOST_USED]
    for name in (*MOST_USED, *sorted(others, key=lambda name: KINDS.index(VARIANTS[name].family))):
        report, line = reference_report(name), measured[name]
        if not decodes(name):
            flops, seconds = report.prefill_flops, line["prefill"][1]
            yield Row(name, None, None, None, flops, None, seconds, None)
            continue
        yield Row(
            name,
            report.kv_bytes_per_token,
            report.state_bytes,
            report.kv_bytes,
            report.prefill_flops,
            report.decode_flops,
            line["prefill"][1],
            line["step"][1],
        )


Results = Mapping[tuple[str, str], list[float]]
"""(task, mechanism) -> the result of each seed, in order."""


def quality_results(path: Path = QUALITY) -> Results:
    """The results with those seeds of a task with which every mechanism was trained."""
    found = {line["name"]: line["numbers"] for line in read(path)}
    results: dict[tuple[str, str], list[float]] = {}
    for task in STEPS:
        metric = TextTask.metric if task == "text" else RecallTask.metric
        for seed in SEEDS:
            names = {one: run_name(task, one, RATE, seed) for one in MOST_USED}
            if all(name in found for name in names.values()):
                for one, name in names.items():
                    results.setdefault((task, one), []).append(found[name][metric])
    return results
