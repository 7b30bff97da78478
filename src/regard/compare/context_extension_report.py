"""The results of context extensions as text for a terminal, as plots, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard.compare.context_extension import ExtensionResults
from regard.compare.experiment import Numbers
from regard.language import translate, translate_count
from regard.text_table import format_table
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
    saved = (translate("saved {n}", n=n) for n in lengths)
    return ["", *(f"ppl {n}" for n in lengths), *saved, translate("cache")]


def render_table(results: ExtensionResults) -> str:
    """Return the results as text for a terminal."""
    metadata = results.metadata
    machine_facts = metadata["machine"]
    lines = [
        translate(
            "{model}: trained on {tokens}, base {base}, {turning} of {rotary_dim} rotary dims turn "
            "at least once",
            model=metadata["model"],
            tokens=translate_count(metadata["trained"], "token"),
            base=f"{metadata['base']:g}",
            turning=metadata["critical_dimension"],
            rotary_dim=metadata["rotary_dim"],
        ),
        translate(
            "extended to {target}; {windows} of {text}, loss on the last {tokens}; {passages} for "
            "each depth, seed {seed}",
            target=metadata["target"],
            windows=translate_count(metadata["windows"], "window"),
            text=metadata["text"],
            tokens=translate_count(metadata["counted"], "token"),
            passages=translate_count(metadata["trials"], "passage"),
            seed=metadata["seed"],
        ),
        f"{_machine(machine_facts)}, regard {machine_facts['regard']}",
        "",
        format_table([column_heads(results), *result_rows(results)]),
        "",
        translate(
            "ppl: perplexity of the same tokens; saved: by how many nats per token an earlier copy "
            "of a passage lowers the loss, mean over depths;"
        ),
        translate(
            "cache, with the policy of a loaded model: the largest difference of a logit from a "
            "pass over the whole sequence, in standard deviations"
        ),
    ]
    for name, rows in cache_tables(results).items():
        lines += [
            "",
            translate(
                "the frequencies of {name} depend on the length: cached decoding of {tokens} "
                "across {trained}",
                name=name,
                tokens=translate_count(metadata["steps"], "token"),
                trained=metadata["trained"],
            ),
            format_table([cache_heads(), *rows]),
        ]
    return "\n".join(lines)


def _machine(facts: Mapping[str, Any]) -> str:
    threads = translate_count(facts["threads"], "thread")
    return f"{facts['processor']}, {threads}, torch {facts['torch']}"


def cache_heads() -> list[str]:
    """Return the column heads of `cache_tables`."""
    policy, difference = translate("policy"), translate("difference")
    return [policy, difference, translate("same token"), translate("prefix recomputed")]


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
    read = translate("tokens read")

    def per_method(points: Callable[[Numbers], Iterable[tuple[float, float]]]) -> tuple[Line, ...]:
        """Return the line of each method through the points that its numbers give."""
        return tuple(
            Line(name, tuple((float(x), y) for x, y in points(numbers)))
            for name, numbers in results.methods.items()
        )

    return [
        Picture(
            translate(
                "{model}: perplexity of the same tokens after more context", model=metadata["model"]
            ),
            read,
            translate("perplexity"),
            per_method(lambda run: [(x["length"], x["perplexity"]) for x in run["by_length"]]),
            "xy",
            trained,
        ),
        Picture(
            translate("Passage retrieval: nats per token saved, mean over depths"),
            read,
            "nats",
            per_method(lambda run: [(x["length"], _saved(x)) for x in run["by_length"]]),
            "x",
            trained,
        ),
        Picture(
            translate(
                "Passage retrieval by depth, at {tokens}",
                tokens=translate_count(metadata["target"], "token"),
            ),
            translate("depth"),
            "nats",
            per_method(
                lambda run: [(x["depth"], x["saved"]) for x in run["by_length"][-1]["needle"]]
            ),
        ),
        Picture(
            translate(
                "How often each pair turns in {tokens}",
                tokens=translate_count(metadata["trained"], "token"),
            ),
            translate("pair of dims"),
            translate("turns"),
            per_method(lambda run: enumerate(max(trained, 1) * x / math.tau for x in run["theta"])),
            "y",
        ),
        Picture(
            translate("Rotary similarity by distance: f^2 (2 / d) sum cos(m theta)"),
            translate("distance"),
            translate("share"),
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
        translate("model"): str(metadata["model"]),
        translate("trained"): translate_count(metadata["trained"], "token"),
        translate("extended to"): str(metadata["target"]),
        translate("dims that turn at least once"): translate(
            "{n} of {all}", n=metadata["critical_dimension"], all=metadata["rotary_dim"]
        ),
        translate("windows"): str(metadata["windows"]),
        translate("passages per depth"): str(metadata["trials"]),
        translate("seed"): str(metadata["seed"]),
        translate("machine"): _machine(machine_facts),
    }
    sections = [
        html_page.Section(
            translate("Every method"),
            heads=column_heads(results),
            rows=result_rows(results),
            pictures=all_plots[:1],
            texts={translate("text"): translate(metadata["text"])},
        ),
        html_page.Section(
            translate("Passage retrieval"),
            pictures=all_plots[1:3],
            heads=["", *(_depth(metadata["lengths"][-1], d) for d in metadata["depths"])],
            rows=[
                [name, *(_retrieved(n) for n in needles)]
                for name, numbers in results.methods.items()
                for needles in [numbers["by_length"][-1]["needle"]]
            ],
        ),
        html_page.Section(translate("Rotary frequencies"), pictures=all_plots[3:]),
    ]
    sections += [
        html_page.Section(
            translate("{name}: cached decoding", name=name), heads=cache_heads(), rows=rows
        )
        for name, rows in cache_tables(results).items()
    ]
    return html_page.page(
        translate("Context extensions"),
        translate(
            "One checkpoint with its rotary positions scaled by each method; no weight is changed."
        ),
        facts,
        command,
        sections,
    )


def _depth(length: int, depth: float) -> str:
    """Return the column head of a depth at a length."""
    return translate("{length}, depth {depth}", length=length, depth=f"{depth:g}")


def _retrieved(needle: Numbers) -> str:
    """Return how often a passage was continued rightly, and how often without the copy."""
    return translate(
        "{right} right, {guessed} guessed",
        right=f"{needle['right']:.0%}",
        guessed=f"{needle['guessed']:.0%}",
    )
