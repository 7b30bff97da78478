"""The results of context extensions as text for a terminal, as plots, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from regard.compare.context_extension import ExtensionResults
from regard.text_table import format_table
from regard.units import plural
from regard.view import html_page
from regard.view.charts import Line, Picture


def result_rows(results: ExtensionResults) -> list[list[str]]:
    """Return a row for each method: perplexities, passage retrieval, and cache consistency."""
    rows = []
    for name, numbers in results.methods.items():
        by_length = numbers["by_length"]
        saved_nats = [
            sum(n["saved"] for n in one["needle"]) / len(one["needle"]) for one in by_length
        ]
        cache = numbers["cache"]
        # a loaded model has the policy "recompute" if its frequencies depend on the length
        loaded_cache = cache.get("recompute") or next(iter(cache.values()))
        rows.append(
            [
                name,
                *(f"{one['perplexity']:.4g}" for one in by_length),
                *(f"{s:+.2f}" for s in saved_nats),
                f"{loaded_cache['difference']:.1g}",
            ]
        )
    return rows


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
        (
            f"{machine_facts['processor']}, {plural(machine_facts['threads'], 'thread')}, torch "
            f"{machine_facts['torch']}, regard {machine_facts['regard']}"
        ),
        "",
    ]
    lines.append(format_table([column_heads(results), *result_rows(results)]))
    lines += [
        "",
        (
            "ppl: perplexity of the same tokens; saved: by how many nats per token an earlier copy "
            "of a passage lowers the loss, mean over depths;"
        ),
        (
            "cache, with the policy of a loaded model: the largest difference of a logit from a "
            "pass "
            "over the whole sequence, in standard deviations"
        ),
    ]
    for name, numbers in results.methods.items():
        if len(numbers["cache"]) > 1:
            lines += [
                "",
                (
                    f"the frequencies of {name} depend on the length: cached decoding of "
                    f"{plural(metadata['steps'], 'token')} across "
                    f"{metadata['trained']}"
                ),
            ]
            policy_rows = [
                ["policy", "difference", "same token", "prefix recomputed"],
                *cache_rows(numbers),
            ]
            lines.append(format_table(policy_rows))
    return "\n".join(lines)


def cache_rows(numbers: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each cache policy of a method."""
    return [
        [policy, f"{one['difference']:.1g}", f"{one['agreement']:.0%}", str(one["reruns"])]
        for policy, one in numbers["cache"].items()
    ]


def plots(results: ExtensionResults) -> list[Picture]:
    """Return the plots of perplexity, passage retrieval, rotary frequencies and decay."""
    metadata, trained = results.metadata, float(results.metadata["trained"])
    named = results.methods.items()

    def per_length(value: Any) -> tuple[Line, ...]:
        return tuple(
            Line(name, tuple((float(one["length"]), value(one)) for one in numbers["by_length"]))
            for name, numbers in named
        )

    turns = tuple(
        Line(
            name,
            tuple(
                (float(i), max(trained, 1) * theta / math.tau)
                for i, theta in enumerate(numbers["theta"])
            ),
        )
        for name, numbers in named
    )
    decay = tuple(
        Line(name, tuple((float(m), b) for m, b in numbers["decay"])) for name, numbers in named
    )
    longest = [
        Line(
            name, tuple((one["depth"], one["saved"]) for one in numbers["by_length"][-1]["needle"])
        )
        for name, numbers in named
    ]
    return [
        Picture(
            f"{metadata['model']}: perplexity of the same tokens after more context",
            "tokens read",
            "perplexity",
            per_length(lambda one: one["perplexity"]),
            "xy",
            trained,
        ),
        Picture(
            "Passage retrieval: nats per token saved, mean over depths",
            "tokens read",
            "nats",
            per_length(lambda one: sum(n["saved"] for n in one["needle"]) / len(one["needle"])),
            "x",
            trained,
        ),
        Picture(
            f"Passage retrieval by depth, at {plural(metadata['target'], 'token')}",
            "depth",
            "nats",
            tuple(longest),
        ),
        Picture(
            f"How often each pair turns in {plural(metadata['trained'], 'token')}",
            "pair of dims",
            "turns",
            turns,
            "y",
        ),
        Picture(
            "Rotary similarity by distance: f^2 (2 / d) sum cos(m theta)",
            "distance",
            "share",
            decay,
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
        "machine": f"{machine_facts['processor']}, {plural(machine_facts['threads'], 'thread')}, "
        "torch "
        f"{machine_facts['torch']}",
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
            heads=[
                "",
                *(
                    f"{n}, depth {d:g}"
                    for n in metadata["lengths"][-1:]
                    for d in metadata["depths"]
                ),
            ],
            rows=[
                [
                    name,
                    *(
                        f"{n['right']:.0%} right, {n['guessed']:.0%} guessed"
                        for n in numbers["by_length"][-1]["needle"]
                    ),
                ]
                for name, numbers in results.methods.items()
            ],
        ),
        html_page.Section("Rotary frequencies", pictures=all_plots[3:]),
    ]
    for name, numbers in results.methods.items():
        if len(numbers["cache"]) > 1:
            sections.append(
                html_page.Section(
                    f"{name}: cached decoding",
                    heads=["policy", "difference", "same token", "prefix recomputed"],
                    rows=cache_rows(numbers),
                )
            )
    return html_page.page(
        "Context extensions",
        "One checkpoint with its rotary positions scaled by each method; no weight is changed.",
        facts,
        command,
        sections,
    )
