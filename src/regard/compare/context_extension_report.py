"""The results of context extensions as text for a terminal, as plots, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard.compare.context_extension import ExtensionResults
from regard.compare.experiment import Numbers
from regard.text_table import format_table
from regard.units import plural
from regard.view import html_page
from regard.view.charts import Line, Picture


def result_rows(results: ExtensionResults) -> list[list[str]]:
    """Return a row for each method: perplexities, passage retrieval, and cache consistency."""
    rows = []
    for name, numbers in results.methods.items():
        by_length = numbers["by_length"]
        cache = numbers["cache"]
        # a loaded model has the policy "recompute" if its frequencies depend on the length
        loaded_cache = cache.get("recompute") or next(iter(cache.values()))
        rows.append(
            [
                name,
                *(f"{one['perplexity']:.4g}" for one in by_length),
                *(f"{_saved(one):+.2f}" for one in by_length),
                f"{loaded_cache['difference']:.1g}",
            ]
        )
    return rows


def _saved(row: Numbers) -> float:
    """Return the nats that a passage saves at one length, the mean over depths."""
    return float(sum(n["saved"] for n in row["needle"]) / len(row["needle"]))


def column_heads(results: ExtensionResults) -> list[str]:
    """Return the column heads of `result_rows`."""
    lengths = results.metadata["lengths"]
    return ["", *(f"ppl {n}" for n in lengths), *(f"saved {n}" for n in lengths), "cache"]


def render_table(results: ExtensionResults) -> str:
    """Return the results as text for a terminal."""
    metadata = results.metadata
    machine_facts = metadata["machine"]
    lines = [
        (
            f"{metadata['model']}: trained on {plural(metadata['trained'], 'token')}, base "
            f"{metadata['base']:g}, {metadata['critical_dimension']} of {metadata['rotary_dim']} "
            "rotary dims turn at least once"
        ),
        (
            f"extended to {metadata['target']}; {plural(metadata['windows'], 'window')} of "
            f"{metadata['text']}, loss on the last {plural(metadata['counted'], 'token')}; "
            f"{plural(metadata['trials'], 'passage')} for each depth, seed {metadata['seed']}"
        ),
        f"{_machine(machine_facts)}, regard {machine_facts['regard']}",
        "",
        format_table([column_heads(results), *result_rows(results)]),
        "",
        (
            "ppl: perplexity of the same tokens; saved: by how many nats per token an earlier copy "
            "of a passage lowers the loss, mean over depths;"
        ),
        (
            "cache, with the policy of a loaded model: the largest difference of a logit from a "
            "pass over the whole sequence, in standard deviations"
        ),
    ]
    for name, rows in cache_tables(results).items():
        lines += [
            "",
            (
                f"the frequencies of {name} depend on the length: cached decoding of "
                f"{plural(metadata['steps'], 'token')} across {metadata['trained']}"
            ),
            format_table([CACHE_HEADS, *rows]),
        ]
    return "\n".join(lines)


def _machine(facts: Mapping[str, Any]) -> str:
    return f"{facts['processor']}, {plural(facts['threads'], 'thread')}, torch {facts['torch']}"


CACHE_HEADS = ["policy", "difference", "same token", "prefix recomputed"]
"""The column heads of `cache_tables`."""


def cache_tables(results: ExtensionResults) -> dict[str, list[list[str]]]:
    """Return a row for each cache policy, by method, of the methods that have several."""
    return {
        name: [
            [policy, f"{one['difference']:.1g}", f"{one['agreement']:.0%}", str(one["reruns"])]
            for policy, one in numbers["cache"].items()
        ]
        for name, numbers in results.methods.items()
        if len(numbers["cache"]) > 1
    }


def plots(results: ExtensionResults) -> list[Picture]:
    """Return the plots of perplexity, passage retrieval, rotary frequencies and decay."""
    metadata, trained = results.metadata, float(results.metadata["trained"])

    def per_method(points: Callable[[Numbers], Iterable[tuple[float, float]]]) -> tuple[Line, ...]:
        """Return the line of each method through the points that its numbers give."""
        return tuple(
            Line(name, tuple((float(x), y) for x, y in points(numbers)))
            for name, numbers in results.methods.items()
        )

    return [
        Picture(
            f"{metadata['model']}: perplexity of the same tokens after more context",
            "tokens read",
            "perplexity",
            per_method(lambda run: [(x["length"], x["perplexity"]) for x in run["by_length"]]),
            "xy",
            trained,
        ),
        Picture(
            "Passage retrieval: nats per token saved, mean over depths",
            "tokens read",
            "nats",
            per_method(lambda run: [(x["length"], _saved(x)) for x in run["by_length"]]),
            "x",
            trained,
        ),
        Picture(
            f"Passage retrieval by depth, at {plural(metadata['target'], 'token')}",
            "depth",
            "nats",
            per_method(
                lambda run: [(x["depth"], x["saved"]) for x in run["by_length"][-1]["needle"]]
            ),
        ),
        Picture(
            f"How often each pair turns in {plural(metadata['trained'], 'token')}",
            "pair of dims",
            "turns",
            per_method(lambda run: enumerate(max(trained, 1) * x / math.tau for x in run["theta"])),
            "y",
        ),
        Picture(
            "Rotary similarity by distance: f^2 (2 / d) sum cos(m theta)",
            "distance",
            "share",
            per_method(lambda run: run["decay"]),
            "",
            trained,
        ),
    ]


def render_page(results: ExtensionResults, command: str) -> str:
    """Return the results as an HTML page that needs no other file."""
    metadata, machine_facts = results.metadata, results.metadata["machine"]
    all_plots = plots(results)
    facts = {
        "model": str(metadata["model"]),
        "trained": plural(metadata["trained"], "token"),
        "extended to": str(metadata["target"]),
        "dims that turn at least once": f"{metadata['critical_dimension']} of "
        f"{metadata['rotary_dim']}",
        "windows": str(metadata["windows"]),
        "passages per depth": str(metadata["trials"]),
        "seed": str(metadata["seed"]),
        "machine": _machine(machine_facts),
    }
    sections = [
        html_page.Section(
            "Every method",
            heads=column_heads(results),
            rows=result_rows(results),
            pictures=all_plots[:1],
            texts={"text": str(metadata["text"])},
        ),
        html_page.Section(
            "Passage retrieval",
            pictures=all_plots[1:3],
            heads=["", *(f"{metadata['lengths'][-1]}, depth {d:g}" for d in metadata["depths"])],
            rows=[
                [name, *(f"{n['right']:.0%} right, {n['guessed']:.0%} guessed" for n in needles)]
                for name, numbers in results.methods.items()
                for needles in [numbers["by_length"][-1]["needle"]]
            ],
        ),
        html_page.Section("Rotary frequencies", pictures=all_plots[3:]),
    ]
    sections += [
        html_page.Section(f"{name}: cached decoding", heads=CACHE_HEADS, rows=rows)
        for name, rows in cache_tables(results).items()
    ]
    return html_page.page(
        "Context extensions",
        "One checkpoint with its rotary positions scaled by each method; no weight is changed.",
        facts,
        command,
        sections,
    )
