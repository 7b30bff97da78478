"""The command `regard inspect`, with the experiments of `regard.inspect` on one model and one text.

They are tasks of one command because they share the model, the text, the measured answer and the
output; an option that does not apply to a task is refused.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.options import (
    JSON,
    SOURCE,
    LoadOptions,
    PromptOptions,
    argument,
    check_files,
    grouped,
    load,
    option,
    progress_bar,
    usage_error,
)
from regard.did_you_mean import suggest
from regard.language import translate
from regard.untrusted_text import escape_controls, parse_integer

if TYPE_CHECKING:
    from regard.inspect import Circuit, EffectTable
    from regard.inspect.metrics.measure import CorpusMeasures

EPILOG = 'For example: regard inspect ablate "to be or not to" --answer " be"'
task_option = partial(option, panel="What to measure")
output_option = partial(option, panel="Output")
TASKS = {
    "ablate": "replace one head after the other",
    "patch": "put activations of TEXT into a run on --corrupt",
    "attribute": "split a logit, or another metric, among heads and layers",
    "lens": "read the states of every layer with the last norm and head",
    "rollout": "combine the patterns of all layers",
    "knockout": "hide --keys from --queries in one layer after the other",
    "circuit": "find few edges that keep the result of TEXT against --corrupt",
    "weights": "copying scores of heads, or how heads read one another, from weights alone",
    "compare": "compare the patterns of TEXT with those of --other",
    "measure": "metrics of every head, over one or several TEXTs",
    "taps": "list the names that Trace captures and edits",
}
"""Task -> what it does."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ablate": ("answer", "versus", "method", "reference", "seed", "layers", "heads", "lines"),
    "patch": (
        *("answer", "versus", "corrupt", "what", "receiver"),
        *("layers", "heads", "positions", "lines"),
    ),
    "attribute": ("answer", "versus", "whole", "method", "corrupt", "by_key", "steps"),
    "lens": ("answer",),
    "rollout": ("method", "query"),
    "knockout": ("answer", "versus", "queries", "keys", "window", "layers", "heads", "lines"),
    "circuit": ("answer", "versus", "corrupt", "threshold"),
    "weights": ("what", "distance"),
    "compare": ("other",),
    "measure": ("metric",),
    "taps": (),
}
"""Task -> the options that apply to it, besides those of the model and of the output."""
WITHOUT_TEXT = ("weights", "taps")
"""The tasks that take no TEXT, or need none."""
OTHERS = ("corrupt", "other", "reference")
"""The options that are texts, read as TEXT is."""


@dataclass(frozen=True)
class TaskOptions:
    """The options that apply to some of the tasks."""

    answer: str | None = task_option(
        "The token whose probability is measured, with its space; for a text encoder a text.",
        shown="the model's own most likely token",
    )
    versus: str | None = task_option("Measure the logit of --answer minus that of this token.")
    corrupt: str | None = task_option("The other text, with as many tokens.")
    other: str | None = task_option("compare: another text with as many tokens.")
    method: str | None = task_option(
        "ablate: zero, mean, resample; attribute: direct, gradient, integrated_gradients; "
        "rollout: rollout, flow.",
        shown="the first",
    )
    reference: str | None = task_option(
        "ablate: the text whose outputs mean and resample use.", shown="TEXT"
    )
    seed: int | None = task_option("ablate: random seed of resample.", shown="0")
    what: str | None = task_option(
        "patch: residual, mlp, out, heads, paths or edges; weights: copying, or q, k or v for how "
        "heads read one another.",
        shown="the first",
    )
    receiver: str | None = task_option(
        "With patch --what paths or edges: their end, LAYER:HEAD:q, k or v; for edges also "
        "LAYER:0:mlp.",
        shown="the logits",
    )
    by_key: bool = task_option(
        "attribute: split heads by the key they read.", "--by-key", default=False
    )
    whole: bool = task_option(
        "attribute: --answer is a whole answer of several tokens.", "--whole", default=False
    )
    queries: str | None = task_option(
        "knockout: positions of the queries, such as -1.", shown="the last"
    )
    keys: str | None = task_option(
        "knockout: positions of the keys that they no longer see, such as 0,3."
    )
    window: int | None = task_option(
        "knockout: how many layers around each are cut together.", shown="1"
    )
    threshold: float | None = task_option(
        "circuit: the share of the difference by which the edges may be off.", shown="0.1"
    )
    distance: int | None = task_option(
        "weights: how many tokens the key stands before the query.", shown="0"
    )
    layers: str | None = task_option(
        "With ablate, patch or knockout: layers by index or name, separated by commas, such as "
        "0,1,-1.",
        shown="all",
    )
    heads: str | None = task_option(
        "With ablate, patch or knockout: query heads, such as 0,3.", shown="all"
    )
    positions: str | None = task_option(
        "With patch: positions of tokens, such as 4,-1.", shown="all"
    )
    lines: bool = output_option(
        "With ablate, patch or knockout: print each number as a line of JSON as soon as it is "
        "measured.",
        "--lines",
        default=False,
    )
    steps: int | None = task_option("attribute: points of integrated gradients.", shown="8")
    query: int | None = task_option("rollout --method flow: the row to compute.", shown="all")
    metric: str | None = task_option(
        "measure: the metric to print, such as induction or previous_token.", shown="entropy"
    )


@grouped
def inspect(
    task: str = argument(
        "; ".join((f"{k}: {v}" for k, v in TASKS.items())) + ".", default=..., metavar="TASK"
    ),
    texts: list[str] | None = argument("The text; measure takes several.", metavar="TEXT"),
    model: str = SOURCE,
    out: Path | None = output_option(
        "Also write the table (.csv, .json, .npy) or its map (.svg, .png, .pdf) to this file."
    ),
    top: int = output_option("Number of cells to print.", default=10, min=1),
    json: bool = JSON,
    *,
    task_options: TaskOptions,
    reading: PromptOptions,
    load_options: LoadOptions,
) -> None:
    """Change what a model computes and measure the effect, or measure its heads: ablation,
    activation patching, attribution, the logit lens, rollout, metrics.
    """
    values = vars(task_options)
    options = {name: x for name, x in values.items() if x is not None and x is not False}
    own_texts = texts or []
    _check(task, len(own_texts) + (reading.messages is not None), options, out)
    if reading.messages is not None and (other := next((x for x in OTHERS if x in options), None)):
        raise usage_error("--messages", "is one prompt, and --{other} is another", other=other)
    prompts = (
        reading.prompts(lambda: own_texts, has_texts=bool(own_texts))
        if own_texts or reading.messages
        else []
    )
    loaded = load(model, load_options)
    for name in OTHERS:
        if name in options:
            options[name] = reading.prompts(lambda: [options[name]], has_texts=True)[0]  # noqa: B023
    read = reading.read(loaded, [*prompts, *(options[x] for x in OTHERS if x in options)])
    options |= dict(zip((x for x in OTHERS if x in options), read[len(prompts) :], strict=True))
    stopped = False
    try:
        result = _RUNS[task](loaded, read[: len(prompts)], options)
    except KeyboardInterrupt as stop:
        result, stopped = getattr(stop, "table", None), True
        if result is None:
            raise
    if "lines" not in options or out is not None:
        _print(result, task_options.metric, out, top, json=json)
    if stopped:
        raise KeyboardInterrupt


def _check(task: str, count: int, options: Mapping[str, Any], out: Path | None) -> None:
    """Refuse an unknown task, a missing text, and options that do not apply."""
    if task not in TASKS:
        raise usage_error(
            "TASK",
            "{task!r} is no task; the tasks are {tasks}{hint}",
            task=task,
            tasks=", ".join(TASKS),
            hint=suggest(task, TASKS),
        )
    if (task not in WITHOUT_TEXT and not count) or (task != "measure" and count > 1):
        raise usage_error(
            "TEXT",
            "{task} got {count} texts; give at least 1"
            if task == "measure"
            else "{task} got {count} texts; give 1",
            task=task,
            count=count,
        )
    for name in options:
        if name not in OPTIONS[task]:
            applies = ", ".join(each for each, names in OPTIONS.items() if name in names)
            raise usage_error(
                f"--{name.replace('_', '-')}",
                "does not apply to {task}; it applies to {applies}",
                task=task,
                applies=applies,
            )
    needed = {"patch": "corrupt", "circuit": "corrupt", "compare": "other"}.get(task)
    if needed is not None and needed not in options:
        raise usage_error(f"--{needed}", "{task} needs it: another text", task=task)
    if task == "knockout" and "keys" not in options:
        raise usage_error("--keys", "{task} needs it: positions of keys", task=task)
    if "whole" in options and ("answer" not in options or {"method", "versus"} & {*options}):
        raise usage_error("--whole", "is an answer; give --answer, without --versus and --method")
    if "versus" in options and "answer" not in options:
        raise usage_error("--versus", "is compared with --answer; give both")
    pictures = out is not None and out.suffix.lower() in (".svg", ".png", ".pdf")
    check_files({} if pictures else {"--out": out}, pictures={"--out": out} if pictures else {})


def _metric(options: Mapping[str, Any]) -> Any:
    """Return the metric that --answer and --versus mean."""
    if "versus" in options:
        return options["answer"], options["versus"]
    return options.get("answer")


def _chosen(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _indices(options: Mapping[str, Any]) -> dict[str, list[int | str]]:
    """Return the layers, heads and positions that were chosen; layers may be names."""
    chosen: dict[str, list[int | str]] = {}
    for name in ("layers", "heads", "positions", "queries", "keys"):
        for word in options.get(name, "").split(",") if name in options else ():
            number = parse_integer(word.strip())
            if number is None and name != "layers":
                raise usage_error(
                    f"--{name}",
                    "{word!r} is no integer; give integers separated by commas",
                    word=word,
                )
            chosen.setdefault(name, []).append(word.strip() if number is None else number)
    return chosen


@contextmanager
def _measuring(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Report each number: as a line of JSON on request, else by a bar on a terminal."""
    if "lines" in options:
        report = lambda _done, _total, cell: typer.echo(json_format.dumps(cell))  # noqa: E731
        yield {"report": report, **_indices(options)}
        return
    with progress_bar() as progress:
        report = lambda done, total, _: progress(translate("measuring"), done, total)  # noqa: E731
        yield {"report": report, **_indices(options)}


def _ablate(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import ablate

    chosen = _chosen(options, "method", "reference", "seed")
    with _measuring(options) as report:
        return ablate(model, texts[0], _metric(options), **chosen, **report)


def _patch(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import patch

    chosen = _chosen(options, "what")
    if "receiver" in options:
        layer, _, end = options["receiver"].partition(":")
        head, _, tap = end.partition(":")
        if not head.isdigit():
            raise usage_error(
                "--receiver",
                "{receiver!r} is not LAYER:HEAD:TAP, such as layers.1:0:k",
                receiver=options["receiver"],
            )
        chosen["receiver"] = (layer, int(head), tap)
    with _measuring(options) as report:
        return patch(model, texts[0], options["corrupt"], _metric(options), **chosen, **report)


def _attribute(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import attribute, attribute_answer

    if "whole" in options:
        chosen = _chosen(options, "by_key")
        return attribute_answer(model, texts[0], options["answer"], **chosen)
    chosen = _chosen(options, "method", "corrupt", "by_key", "steps")
    return attribute(model, texts[0], _metric(options), **chosen)


def _lens(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import logit_lens

    return logit_lens(model, texts[0], options.get("answer"))


def _rollout(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import rollout

    return rollout(model, texts[0], **_chosen(options, "method", "query"))


def _knockout(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import knockout

    chosen = _chosen(options, "window")
    with _measuring(options) as report:
        return knockout(model, texts[0], _metric(options), **chosen, **report)


def _circuit(model: Any, texts: list[Any], options: Mapping[str, Any]) -> Circuit:
    from regard.inspect import find_circuit

    chosen = _chosen(options, "threshold")
    with progress_bar() as progress:
        # how many runs it will take is not known
        report = lambda done: progress(translate("measuring"), done, done + 20)  # noqa: E731
        return find_circuit(
            model, texts[0], options["corrupt"], _metric(options), report=report, **chosen
        )


def _weights(model: Any, _texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import composition_scores, copying_scores

    what = options.get("what", "copying")
    if what in ("q", "k", "v"):
        return composition_scores(model, what, **_chosen(options, "distance"))
    if what != "copying" or "distance" in options:
        raise usage_error(
            "--what",
            "{what!r} is not copying, q, k or v, or has no --distance, as copying has none",
            what=what,
        )
    return copying_scores(model)


def _compare(model: Any, texts: list[Any], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import compare, record

    return compare(record(model, texts[0]), record(model, options["other"]))


def _measure(model: Any, texts: list[Any], _options: Mapping[str, Any]) -> CorpusMeasures:
    from regard.inspect import measure

    return measure(model, texts)


def _taps(model: Any, texts: list[Any], _options: Mapping[str, Any]) -> tuple[str, ...]:
    from regard.inspect import taps

    return taps(model, texts[0] if texts else None)


_RUNS: Mapping[str, Callable[[Any, list[Any], Mapping[str, Any]], Any]] = {
    "ablate": _ablate,
    "patch": _patch,
    "attribute": _attribute,
    "lens": _lens,
    "rollout": _rollout,
    "knockout": _knockout,
    "circuit": _circuit,
    "weights": _weights,
    "compare": _compare,
    "measure": _measure,
    "taps": _taps,
}


def _print(result: Any, metric: str | None, out: Path | None, top: int, *, json: bool) -> None:
    """Print a result, and write it to a file if one is named."""
    if isinstance(result, tuple):
        if out is not None:
            raise usage_error("--out", "taps prints names only")
        typer.echo(json_format.dumps(list(result)) if json else "\n".join(result))
        return
    table, shown = result, result
    if hasattr(result, "edges"):  # a circuit: a file has the scores of all edges
        table = result.table
    elif not hasattr(result, "chart"):  # the metrics of a corpus
        table = shown = result.table(metric or "entropy")
    if out is not None:
        (result if out.suffix == ".csv" and shown is table else table).to(out)
        typer.echo(translate("{file}: written", file=escape_controls(str(out))), err=True)
    if json:
        data = shown.as_dict() if shown is result else {"heads": result.records()}
        typer.echo(json_format.dumps(data, allow_nan=False))
    else:
        typer.echo(shown.text(top))
