"""The command `regard inspect`, with the experiments of `regard.inspect` on one model and one text.

They are tasks of one command because they share the model, the text, the measured answer and the
output; an option that does not apply to a task is refused.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    AllowMissing,
    Device,
    Dtype,
    Finite,
    Ignore,
    LoadOptions,
    Revision,
    Source,
    check_files,
    load,
    usage_error,
)
from regard.did_you_mean import suggest
from regard.untrusted_text import escape_controls

if TYPE_CHECKING:
    from regard.inspect import EffectTable
    from regard.inspect.metrics.measure import CorpusMeasures

EPILOG = 'For example: regard inspect ablate "to be or not to" --answer " be"'
WHAT, OUT = "What to measure", "Output"
TASKS = {
    "ablate": "replace one head after the other",
    "patch": "put activations of TEXT into a run on --corrupt",
    "attribute": "split a logit, or another metric, among heads and layers",
    "lens": "read the states of every layer with the last norm and head",
    "rollout": "combine the patterns of all layers",
    "compare": "compare the patterns of TEXT with those of --other",
    "measure": "metrics of every head, over one or several TEXTs",
    "taps": "list the names that Trace captures and edits",
}
"""Task -> what it does."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ablate": ("answer", "versus", "method", "reference", "seed"),
    "patch": ("answer", "versus", "corrupt", "what", "receiver"),
    "attribute": ("answer", "versus", "method", "corrupt", "by_key", "steps"),
    "lens": ("answer",),
    "rollout": ("method", "query"),
    "compare": ("other",),
    "measure": ("metric",),
    "taps": (),
}
"""Task -> the options that apply to it, besides those of the model and of the output."""

Task = Annotated[
    str, typer.Argument(metavar="TASK", help="; ".join(f"{k}: {v}" for k, v in TASKS.items()) + ".")
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="The text; measure takes several.", show_default=False),
]
Answer = Annotated[
    str | None,
    typer.Option(
        help="The token whose probability is measured, with its space; for a text encoder a text.",
        show_default="the model's own most likely token",
        rich_help_panel=WHAT,
    ),
]
Versus = Annotated[
    str | None,
    typer.Option(
        help="Measure the logit of --answer minus that of this token.",
        show_default="none",
        rich_help_panel=WHAT,
    ),
]
Corrupt = Annotated[
    str | None,
    typer.Option(
        help="The other text, with as many tokens.", show_default="none", rich_help_panel=WHAT
    ),
]
Other = Annotated[
    str | None,
    typer.Option(
        help="compare: another text with as many tokens.",
        show_default="none",
        rich_help_panel=WHAT,
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "ablate: zero, mean, resample; attribute: direct, gradient, integrated_gradients; "
            "rollout: rollout, flow."
        ),
        show_default="the first",
        rich_help_panel=WHAT,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="ablate: the text whose outputs mean and resample use.",
        show_default="TEXT",
        rich_help_panel=WHAT,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="ablate: random seed of resample.", show_default="0", rich_help_panel=WHAT),
]
WhatOption = Annotated[
    str | None,
    typer.Option(
        help="patch: residual, mlp, out, heads or paths.",
        show_default="residual",
        rich_help_panel=WHAT,
    ),
]
ReceiverOption = Annotated[
    str | None,
    typer.Option(
        help="patch --what paths: the end of the paths, LAYER:HEAD:q, k or v.",
        show_default="the logits",
        rich_help_panel=WHAT,
    ),
]
ByKey = Annotated[
    bool,
    typer.Option(
        "--by-key", help="attribute: split heads by the key they read.", rich_help_panel=WHAT
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="attribute: points of integrated gradients.", show_default="8", rich_help_panel=WHAT
    ),
]
Query = Annotated[
    int | None,
    typer.Option(
        help="rollout --method flow: the row to compute.",
        show_default="all",
        rich_help_panel=WHAT,
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="measure: the metric to print, such as induction or previous_token.",
        show_default="entropy",
        rich_help_panel=WHAT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Also write the table (.csv, .json, .npy) or its map (.svg, .png, .pdf) to this file.",
        show_default="none",
        rich_help_panel=OUT,
    ),
]
Top = Annotated[int, typer.Option(help="Number of cells to print.", min=1, rich_help_panel=OUT)]
Json = Annotated[
    bool, typer.Option("--json", help="Print all numbers as JSON.", rich_help_panel=OUT)
]


def inspect(
    task: Task,
    texts: Texts = None,
    model: Source = "tiny",
    answer: Answer = None,
    versus: Versus = None,
    corrupt: Corrupt = None,
    other: Other = None,
    method: MethodOption = None,
    reference: Reference = None,
    seed: Seed = None,
    what: WhatOption = None,
    receiver: ReceiverOption = None,
    by_key: ByKey = False,
    steps: Steps = None,
    query: Query = None,
    metric: MetricOption = None,
    out: Out = None,
    top: Top = 10,
    json: Json = False,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    allow_missing: AllowMissing = None,
    ignore: Ignore = None,
    finite: Finite = False,
) -> None:
    """Change what a model computes and measure the effect, or measure its heads: ablation,
    activation patching, attribution, the logit lens, rollout, metrics.
    """
    values = {
        "answer": answer,
        "versus": versus,
        "corrupt": corrupt,
        "other": other,
        "method": method,
        "reference": reference,
        "seed": seed,
        "what": what,
        "receiver": receiver,
        "by_key": by_key or None,
        "steps": steps,
        "query": query,
        "metric": metric,
    }
    options = {name: value for name, value in values.items() if value is not None}
    _check(task, texts or [], options, out)
    loaded = load(model, LoadOptions(dtype, allow_missing, ignore, finite, revision, device=device))
    result = _RUNS[task](loaded, texts or [], options)
    _print(result, metric, out, top, json=json)


def _check(task: str, texts: list[str], options: Mapping[str, Any], out: Path | None) -> None:
    """Refuse an unknown task, a missing text, and options that do not apply."""
    if task not in TASKS:
        raise usage_error(
            "TASK",
            "{task!r} is no task; the tasks are {tasks}{hint}",
            task=task,
            tasks=", ".join(TASKS),
            hint=suggest(task, TASKS),
        )
    count = len(texts)
    if (task != "taps" and not count) or (task != "measure" and count > 1):
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
    needed = {"patch": "corrupt", "compare": "other"}.get(task)
    if needed is not None and needed not in options:
        raise usage_error(f"--{needed}", "{task} needs it: another text", task=task)
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


def _ablate(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import ablate

    chosen = _chosen(options, "method", "reference", "seed")
    return ablate(model, texts[0], _metric(options), **chosen)


def _patch(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
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
    return patch(model, texts[0], options["corrupt"], _metric(options), **chosen)


def _attribute(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import attribute

    chosen = _chosen(options, "method", "corrupt", "by_key", "steps")
    return attribute(model, texts[0], _metric(options), **chosen)


def _lens(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import logit_lens

    return logit_lens(model, texts[0], options.get("answer"))


def _rollout(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import rollout

    return rollout(model, texts[0], **_chosen(options, "method", "query"))


def _compare(model: Any, texts: list[str], options: Mapping[str, Any]) -> EffectTable:
    from regard.inspect import compare, record

    return compare(record(model, texts[0]), record(model, options["other"]))


def _measure(model: Any, texts: list[str], _options: Mapping[str, Any]) -> CorpusMeasures:
    from regard.inspect import measure

    return measure(model, texts)


def _taps(model: Any, texts: list[str], _options: Mapping[str, Any]) -> tuple[str, ...]:
    from regard.inspect import taps

    return taps(model, texts[0] if texts else None)


_RUNS: Mapping[str, Callable[[Any, list[str], Mapping[str, Any]], Any]] = {
    "ablate": _ablate,
    "patch": _patch,
    "attribute": _attribute,
    "lens": _lens,
    "rollout": _rollout,
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
    table = result
    if not hasattr(result, "chart"):  # the metrics of a corpus
        table = result.table(metric or "entropy")
    if out is not None:
        (result if out.suffix == ".csv" else table).to(out)
        typer.echo(f"{escape_controls(str(out))}: written", err=True)
    if json:
        data = table.as_dict() if table is result else {"heads": result.records()}
        typer.echo(json_format.dumps(data, allow_nan=False))
    else:
        typer.echo(table.text(top))
