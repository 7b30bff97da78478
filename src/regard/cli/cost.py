"""The command `regard cost`, which computes the parameters, FLOPs, cache bytes and lower bounds of
the times of a model from its sizes alone.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from regard.cli.options import JSON, argument, check_files, grouped, note, option, usage_error
from regard.configs.measured_speeds import Work, reached
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.cost.memory_fit import Runtime
from regard.cost.model import ModelSpec, StoredSize
from regard.cost.ranks import METHODS, RanksReport
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import Machine, machine_of
from regard.cost.speculation import DraftCost
from regard.cost.stored_forms import STORED_FORMS, with_weights
from regard.cost.sweep import (
    compare_models,
    contexts_within_positions,
    model_figures,
    parse_context_range,
    parse_tokens,
    sweep,
)
from regard.cost.training import TrainingReport, TrainingRun
from regard.language import Phrase, counted, translate
from regard.view import cost_text as text

if TYPE_CHECKING:
    import torch

    from regard.configs.base import Raw
    from regard.configs.suggested_sizes import BaseModel, CountedLayer, MechanismChoice


EPILOG = "For example: regard cost llama-3-8b --context 32k --machine h100-sxm --vs deepseek-v3"
DEFAULT_CONTEXT, DEFAULT_RANGE = 4096, "context=1k..128k"
"""The default of --context, and the default range of --plot."""
Rows = dict[str, list[dict[str, object]]]


@dataclass(frozen=True)
class SizeOptions:
    """The sizes of a model that is not named."""

    layers: int | None = option("Number of layers.")
    dim: int | None = option("Model width M.")
    heads: int | None = option("Number of query heads H.")
    attention: str | None = option(
        "Attention mechanism, by its name in regard describe.", shown="mha or gqa, depending on G"
    )
    global_every: int | None = option("With --window: every n-th layer has no window.")
    ff: int | None = option("Hidden width F of the feed-forward layers.", "--ff", shown="4 M")
    gated: bool | None = option(
        "Whether the feed-forward layers have a gate.", "--gated/--plain", shown="gated"
    )
    vocab: int | None = option("Vocabulary size V.", shown="32000")
    tied: bool | None = option(
        "Whether the output head is the embedding.", "--tied/--untied", shown="untied"
    )
    experts: int | None = option("Number of experts.")
    active: int | None = option("Number of experts that a token uses.")
    expert_ff: int | None = option("Hidden width F of an expert.", "--expert-ff", shown="--ff")
    shared: int | None = option("Number of shared experts, which all tokens use.")
    dense_layers: int | None = option("Number of first layers without experts.")


@dataclass(frozen=True)
class MechanismOptions:
    """The options of the attention of a model that is not named."""

    kv_heads: int | None = option("Number of key/value heads G.", shown="H")
    head_dim: int | None = option("Width D of a head.", shown="M / H")
    settings: list[str] | None = option(
        "Another option of the mechanism, such as kv_rank=512. Repeatable.", "--set"
    )
    window: int | None = option("Maximum number of keys that a query attends to.", shown="no limit")

    def named(self) -> dict[str, Any]:
        """Collect the options of the mechanism from its flags and from `--set name=value`."""
        named = {"groups": self.kv_heads, "head_dim": self.head_dim, "window": self.window}
        options: dict[str, Any] = {name: x for name, x in named.items() if x is not None}
        for setting in self.settings or []:
            name, sign, value = setting.partition("=")
            if not sign or not (value.isdecimal() or name == "form"):
                raise usage_error(
                    "--set",
                    "{setting!r} must be name=value with a whole number, such as kv_rank=512",
                    setting=setting,
                )
            if name in options:
                raise usage_error(None, "{name} is given twice; give it once", name=name)
            options[name] = value if name == "form" else int(value)
        return options


@dataclass(frozen=True)
class RuntimeOptions:
    """What the program that runs a model on the machine takes of its memory."""

    utilization: float = option(
        "With --machine: the share of its memory that the program may use.", default=0.9
    )
    prefill_chunk: int = option(
        "With --machine: the most tokens of prompts that are computed at once.", default=2048, min=1
    )
    reserve: float | None = option(
        "With --machine: GiB besides weights and cache.",
        shown="libraries and activations, counted",
        min=0,
    )

    def runtime(self) -> Runtime:
        """Return them as the cost of a model takes them."""
        reserve = None if self.reserve is None else int(self.reserve * 2**30)
        return Runtime(self.utilization, self.prefill_chunk, reserve)


@dataclass(frozen=True)
class MachineOptions:
    """The machine, and the ranks or cards that divide a model."""

    machine: str | None = option(
        "Also print lower bounds of the times on a machine: a name that --list shows, 8x before "
        "it for eight that divide the model, or here, which measures this machine."
    )
    bandwidth: float | None = option(
        "Memory bandwidth of another machine in bytes per second, with --flops."
    )
    flops: float | None = option("FLOPs per second of another machine, with --bandwidth.")
    ranks: int | None = option(
        "Also plan the model over this many ranks of the machine, by each method.",
        shown="one process",
        min=1,
    )
    link: float | None = option(
        "Bytes per second that a rank, or one of several cards, sends to others.",
        shown="that of the machine",
    )
    method: str | None = option(
        "With --ranks: show one method only: exchange, gather, heads, tensor or 'tensor x "
        "exchange'.",
        shown="all",
    )

    def named(self, options: RuntimeOptions, host: float | None) -> Machine | None:
        """Return the machine that is named, given by its rates, or measured, with its program."""
        runtime = options.runtime()
        name, bandwidth, flops = self.machine, self.bandwidth, self.flops
        if (bandwidth is None) != (flops is None):
            raise usage_error(
                None, "--bandwidth and --flops need each other; give both, or a --machine"
            )
        if bandwidth is not None and flops is not None:
            if name is not None:
                raise usage_error(
                    "--machine",
                    "already has a bandwidth and a rate: leave out --bandwidth and --flops, or "
                    "--machine",
                )
            if not (0 < bandwidth < float("inf") and 0 < flops < float("inf")):
                raise usage_error(
                    None,
                    "--bandwidth and --flops must be above 0, per second, such as 5e10 and 1e12",
                )
            rates = {"fp32": flops}
            machine = Machine("the given machine", bandwidth, rates, 0, "--bandwidth and --flops")
            return replace(machine, link=self.link, host=host)
        if name is None:
            if runtime != Runtime():
                raise usage_error(
                    None,
                    "--utilization, --prefill-chunk and --reserve belong to a --machine; name one",
                )
            return None
        known_machine = _measure_this_machine() if name == "here" else machine_of(name)
        return replace(known_machine, runtime=runtime, link=self.link, host=host)

    def check(self, machine: Machine | None, *, alone: bool) -> None:
        """Raise if the options do not fit together; `alone` is False with options that take several
        models or contexts.
        """
        if self.ranks is None:
            several = machine is not None and machine.cards > 1
            if self.method is not None or (self.link is not None and not several):
                raise usage_error(
                    None,
                    "--link and --method belong to --ranks, and --link to several cards, too; "
                    "give the number of ranks, or a machine such as 8xh100-sxm",
                )
            return
        if machine is not None and machine.cards > 1:
            raise usage_error("--ranks", "counts the cards; name the machine without a number")
        if machine is None:
            raise usage_error("--ranks", "needs a --machine, such as h100-sxm")
        if not alone:
            raise usage_error(
                "--ranks",
                "plans one model at one context; leave out --vs, --mechanisms, --sweep and --plot",
            )
        if self.method is not None and self.method not in METHODS:
            raise usage_error(
                "--method",
                "{method!r} is not one of {names}",
                method=self.method,
                names=", ".join(METHODS),
            )


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, and where the figures go."""

    vs: list[str] | None = option(
        "Another model to compare with, named as for MODEL. Repeatable.", "--vs"
    )
    mechanisms: str | None = option(
        "Print one row for each of these mechanisms in place of the model's attention, such "
        "as mha,gqa:8,mla,window:4096,local_global,linear; `regard describe` lists them all. "
        "Sizes that are not given are those of published models of that width.",
        metavar="NAMES",
    )
    sweep: str | None = option(
        "Print a row for each context in a range, doubled from row to row: context=1k..1M."
    )
    plot: Path | None = option(
        "Draw the range of --sweep (default: 1k..128k) to this .svg, .png or .pdf file.",
        metavar="FILE",
    )
    html: Path | None = option(
        "With --mechanisms: write the tables, the charts and their sources to this HTML file.",
        metavar="FILE",
    )
    json: bool = JSON

    @property
    def alone(self) -> bool:
        """Whether one model at one context is asked for."""
        return not any((self.vs, self.mechanisms, self.sweep, self.plot))

    def check(self, *, attention: str | None, context: str | None) -> None:
        """Raise if options exclude each other."""
        if self.mechanisms is not None and (self.vs or self.sweep or attention is not None):
            raise usage_error(
                "--mechanisms",
                "compares mechanisms in one model; leave out --vs, --sweep and --attention",
            )
        if self.html is not None and self.mechanisms is None:
            raise usage_error("--html", "belongs to --mechanisms; give the mechanisms to compare")
        if self.mechanisms is None and context is not None and (self.sweep or self.plot):
            raise usage_error(
                None,
                "--context is one length, but --sweep and --plot take a range; leave one of them "
                "out",
            )


@dataclass(frozen=True)
class ServingOptions:
    """How sequences are served together, and with the help of what."""

    shared_prefix: str | None = option(
        "Number of first tokens that all sequences of the batch share: 512, 2k.", shown="none"
    )
    offload: float | None = option(
        "With --machine: keep the experts in the memory of the host, read at this many bytes per "
        "second: 64e9 over PCIe 5, or the bandwidth of the CPU's memory if it computes them.",
        shown="experts on the card",
        min=0,
    )
    draft: str | None = option(
        "With --machine: a smaller model that proposes tokens (speculative decoding).",
        metavar="MODEL",
    )
    draft_tokens: int = option("Tokens that --draft proposes at once.", default=4, min=1)
    accepted: float = option(
        "Probability that a proposed token is accepted.", default=0.8, min=0, max=1
    )

    def check(self, machine: Machine | None, *, alone: bool) -> None:
        """Raise if options of serving lack a machine, or come with several models or contexts."""
        if self.draft is None and (self.draft_tokens, self.accepted) != (4, 0.8):
            raise usage_error(None, "--draft-tokens and --accepted belong to --draft; name a model")
        for flag, value in (("--offload", self.offload), ("--draft", self.draft)):
            if value is not None and machine is None:
                raise usage_error(flag, "needs a --machine, such as h100-sxm")
        if self.draft is not None and not alone:
            raise usage_error(
                "--draft",
                "belongs to one model at one context; leave out --vs, --mechanisms, --sweep, "
                "--plot and --ranks",
            )

    def with_draft(self, reports: list[CostReport], form: _WeightForm) -> DraftCost | None:
        """Return the cost of the first model with the draft model, if one is named."""
        if self.draft is None:
            return None
        draft = CostReport(_find_model(self.draft, None, form), reports[0].setting)
        return DraftCost(reports[0], draft, self.draft_tokens, self.accepted)


@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained, with --train."""

    train: bool = option(
        "Print the memory and the least time of a training step in place of those of text.",
        "--train",
        default=False,
    )
    seq: str | None = option("With --train: tokens of a sequence: 2048, 4k.", shown="4096")
    optimizer: Literal["adamw", "adamw8bit", "sgd", "adafactor"] = option(
        "With --train: the optimizer; sgd is without momentum.", default="adamw"
    )
    precision: Literal["bf16", "fp32", "pure-bf16"] = option(
        "With --train: bf16 with fp32 copies in the optimizer, fp32, or bf16 for everything.",
        default="bf16",
    )
    zero: int = option(
        "With --train: what the cards divide: 0 nothing, 1 the optimizer, 2 and gradients, 3 and "
        "weights.",
        default=0,
        min=0,
        max=3,
    )
    checkpointing: Literal["none", "selective", "full"] = option(
        "With --train: what is computed again: nothing, attention weights, as flash attention "
        "does, or whole layers.",
        default="selective",
    )
    lora: int | None = option(
        "With --train: the rank of adapters on all matrices, beside frozen weights.",
        shown="all weights are trained",
        min=1,
    )
    cards: int | None = option(
        "With --train: the number of cards, each with sequences of its own.",
        shown="that of --machine",
        min=1,
    )

    def run(self, batch: int, machine: Machine | None) -> TrainingRun:
        """Return them as the cost of training takes them."""
        seq = DEFAULT_CONTEXT if self.seq is None else parse_tokens(self.seq)
        cards = self.cards or (1 if machine is None else machine.cards)
        own = vars(self) | {"batch": batch, "seq": seq, "cards": cards}
        return TrainingRun(**{k: v for k, v in own.items() if k != "train"})

    def check(self) -> None:
        """Raise if an option lacks --train."""
        train_options = [f.name for f in fields(self) if getattr(self, f.name) != _TRAINING[f.name]]
        if train_options and not self.train:
            names = ", ".join(map(_flag_of, train_options))
            raise usage_error(None, "{names} belong to --train; give it, too", names=names)


_TRAINING = {f.name: getattr(f.default, "default", None) for f in fields(TrainingOptions)}
"""The defaults of `TrainingOptions`."""


@grouped
def cost(
    source: str | None = argument(
        "A model: a name that --list shows, a config.json or its folder, a GGUF file, or "
        "org/name on the hub.",
        shown="sizes given as options",
        metavar="MODEL",
    ),
    revision: str | None = option(
        "The branch, tag or commit of MODEL on the hub.", shown="main branch"
    ),
    context: str | None = option("Number of tokens in the context: 4096, 8k, 1M.", shown="4096"),
    batch: int = option("Number of sequences at once.", default=1, min=1),
    dtype: str | None = option(
        "Number format of all weights, without scales: fp32, bf16, fp16, fp8, int8, int4 or int2.",
        shown="that of config.json, or bf16",
    ),
    weights: str | None = option(
        "The form in which files hold the weights, scales included: q8_0, q6_k, q5_k_m, q4_k_m, "
        "q4_0, awq, gptq, nf4, fp8, mxfp4, fp8_mxfp4, int4_experts, or int8 and int4 of regard "
        "convert.",
        shown="as released",
    ),
    kv_dtype: str | None = option(
        "Number format of the KV cache, named as for --dtype.",
        shown="that of weights, but at least 16 bits",
    ),
    list_: bool = option("List the known models and machines, and exit.", "--list", default=False),
    *,
    machine_options: MachineOptions,
    output: ComparisonOptions,
    size_options: SizeOptions,
    mechanism: MechanismOptions,
    runtime: RuntimeOptions,
    serving: ServingOptions,
    training: TrainingOptions,
) -> None:
    """Print the parameters of a model by part, the FLOPs of a prompt and of a token, the bytes of
    its cache, and the least time on a machine.

    A multiplication and an addition are two FLOPs. A prompt counts the logits of its last token
    only. Times are lower bounds: the time of moving the bytes at full bandwidth or of computing the
    FLOPs at full rate, whichever is longer. Memory is in GiB (2^30 bytes), bandwidth in GB/s (1e9
    bytes per second).
    """
    if list_:
        typer.echo(text.listing(json=output.json))
        return
    form = _WeightForm(dtype, weights)
    named = _NamedModel(source, revision, form, vars(size_options), mechanism.named())
    prefix = 0 if serving.shared_prefix is None else parse_tokens(serving.shared_prefix)
    # a context behind the prefix, until the real one is known
    base = Setting(prefix + 1, batch, dtype or "bf16", kv_dtype, prefix)
    on_machine = machine_options.named(runtime, serving.offload)
    machine_options.check(on_machine, alone=output.alone)
    training.check()
    serving.check(on_machine, alone=output.alone and machine_options.ranks is None)
    output.check(attention=size_options.attention, context=context)
    if output.mechanisms is not None:
        one = named.base_model()
        _check_form(one.model)
        setting = replace(base, dtype=dtype or one.model.dtype)
        setting = replace(setting, context=_context(context, [one.model]))
        _show_mechanisms(one, setting, on_machine, output)
        return
    models = [named.model(), *(_find_model(name, None, form) for name in output.vs or [])]
    conditions = [replace(base, dtype=dtype or model.dtype) for model in models]
    if output.sweep is not None or output.plot is not None:
        _show_range(models, conditions, on_machine, output)
    elif training.train:
        _show_training(models, training.run(batch, on_machine), on_machine, json=output.json)
    else:
        length = _context(context, models)
        conditions = [replace(setting, context=length) for setting in conditions]
        reports = [CostReport(*each) for each in zip(models, conditions, strict=True)]
        _show_reports(
            reports, on_machine, machine_options, serving.with_draft(reports, form), output
        )


def _show_reports(
    reports: list[CostReport],
    machine: Machine | None,
    options: MachineOptions,
    speculation: DraftCost | None,
    output: ComparisonOptions,
) -> None:
    """Print one model or several at one context, or the plan of one over several ranks."""
    _check_cards(reports, machine)
    if options.ranks is not None and machine is not None:
        plan = RanksReport(reports[0], machine, options.ranks, options.link)
        _show_ranks(plan, options.method, json=output.json)
    else:
        _show(reports, machine, speculation, json=output.json)


def _check_form(model: ModelSpec) -> None:
    """Raise if the weights of a model whose attention changes have a form of their own."""
    if model.stored is not None and model.stored.form not in STORED_FORMS:
        raise usage_error(
            None,
            "the weights of {name} are stored as {form}, and how those of another mechanism "
            "would be is not known; give --dtype, in which all weights are then counted",
            name=model.name,
            form=model.stored.form,
        )


def _check_cards(reports: list[CostReport], machine: Machine | None) -> None:
    """Raise if the cards of a machine cannot divide the heads of a model."""
    for report in reports:
        if machine is not None and (reason := report.why_not_on(machine.cards)):
            raise usage_error(
                "--machine", "{reason}; name another number of cards", reason=translate(reason)
            )


def _show_training(
    models: list[ModelSpec], run: TrainingRun, machine: Machine | None, *, json: bool
) -> None:
    """Print the memory and the least time of a training step of each model."""
    reports = [TrainingReport(model, run) for model in models]
    if json:
        result = [report.as_json(machine) for report in reports]
        typer.echo(json_format.dumps(result, indent=1, allow_nan=False))
        return
    typer.echo("\n\n".join(text.training_page(report, machine) for report in reports))


def _show_ranks(plan: RanksReport, method: str | None, *, json: bool) -> None:
    """Print the plan over several ranks, or one method of it."""
    if not json:
        typer.echo(text.ranks_page(plan, method))
        return
    result = plan.as_json()
    if method is not None:
        result["methods"] = {method: result["methods"][method]}
    typer.echo(json_format.dumps(result, indent=1, allow_nan=False))


@dataclass(frozen=True)
class _WeightForm:
    """How all weights count: in a dtype, in a form of files, or as they are stored."""

    dtype: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.weights is not None:
            raise usage_error(None, "--dtype and --weights both say how weights count; give one")

    def of(self, model: ModelSpec) -> ModelSpec:
        """Return a model with its weights in this form."""
        as_stored = self.weights is None and self.dtype is None
        return model if as_stored else with_weights(model, self.weights)


def _find_model(source: str, revision: str | None, form: _WeightForm) -> ModelSpec:
    """Return the model of a known name, of a path, or of a repository on the hub, from which only
    config.json is downloaded. Weights of few bits count as they are stored, unless a form is given
    for all weights.
    """
    return form.of(_stored_model(source, revision, form))


def _stored_model(source: str, revision: str | None, form: _WeightForm) -> ModelSpec:
    """Return a model with its weights as they are stored, if they need to be counted."""
    from regard.files.named_packages import packaged_source

    count_stored = _count_stored if form == _WeightForm() else _count_plain
    source = str(packaged_source(source))
    if revision is None and (file := _gguf_file(source)) is not None:
        from regard.models.checkpoint.stored_sizes import gguf_sizes

        return gguf_sizes(file)
    if "/" in source and source.lower() not in PUBLISHED_MODELS:
        # imported here, because this is the only source of sizes that needs torch
        from regard.models import hub

        repository = hub.repository_of(source)
        if repository is not None:
            folder = hub.download(repository, revision, weights=False)
            return replace(model_of(str(folder), count_stored), name=repository)
    if revision is not None:
        raise usage_error(
            "--revision",
            "applies only to a repository on the hub, and {source!r} is not one",
            source=source,
        )
    return model_of(source, count_stored)


def _gguf_file(source: str) -> Path | None:
    """Return the GGUF file that a source names: the file, or the only model of a folder."""
    path = Path(source)
    if path.suffix == ".json" or not path.exists() or (path / "config.json").exists():
        return None
    from regard.models.checkpoint.gguf import find_gguf  # imports torch

    return find_gguf(path)


def _count_stored(raw: Raw, where: str) -> StoredSize:
    """Count the weights of a quantized folder as they are stored."""
    from regard.models.checkpoint.stored_sizes import stored_size  # imports torch

    return stored_size(raw, where)


def _count_plain(_raw: Raw, _where: str) -> None:
    """Count no stored form, because all weights count in a given dtype."""


@dataclass(frozen=True)
class _NamedModel:
    """A model by its name, or by its sizes and the options of its attention."""

    source: str | None
    revision: str | None
    form: _WeightForm
    sizes: dict[str, Any]
    options: dict[str, Any]

    @property
    def given_sizes(self) -> dict[str, Any]:
        """The sizes that are given."""
        return {name: value for name, value in self.sizes.items() if value is not None}

    def model(self) -> ModelSpec:
        """Return the model that is named, or that the given sizes describe."""
        given_sizes = self.given_sizes
        source = self.source
        if source is not None:
            if extra_names := [*given_sizes, *self.options]:
                names = ", ".join(_flag_of(name) for name in extra_names)
                _find_model(source, self.revision, self.form)  # a mistyped name comes first
                raise usage_error(
                    None,
                    "{source} already has all sizes, but {names} are given too; leave them out, or "
                    "leave out the name and give all sizes",
                    source=source,
                    names=names,
                )
            return _find_model(source, self.revision, self.form)
        if self.revision is not None:
            raise usage_error(
                "--revision", "applies only to a repository on the hub, but no model is named"
            )
        if missing := [name for name in ("layers", "dim", "heads") if name not in given_sizes]:
            names = ", ".join(map(_flag_of, missing))
            raise usage_error(
                None,
                "give a model, or its sizes: {names} missing. regard cost --list shows the known "
                "models",
                names=names,
            )
        from regard.cost.mechanisms import Sizes

        return self.form.of(Sizes(**given_sizes, options=self.options).model())

    def base_model(self) -> BaseModel:
        """Return the model whose attention `--mechanisms` replaces."""
        from regard.configs.suggested_sizes import BaseModel, base_model

        if self.source is not None or self.revision is not None:
            return BaseModel.of(self.model())
        given_sizes = self.given_sizes
        others = [name for name in self.options if name != "groups"]
        if others:
            names = ", ".join(map(_flag_of, others))
            raise usage_error(
                None,
                "{names} belong to one mechanism; give them inside --mechanisms, as window:4096",
                names=names,
            )
        if "dim" not in given_sizes:
            raise usage_error(
                None,
                "give a model, or at least its width: --dim missing. regard cost --list shows the "
                "known models",
            )
        base = base_model(given_sizes, self.options.get("groups"))
        return replace(base, model=self.form.of(base.model))


def _show_mechanisms(
    base: BaseModel, setting: Setting, machine: Machine | None, output: ComparisonOptions
) -> None:
    """Print one row for each mechanism in place of the model's attention; write the chart and the
    page.
    """
    names, plot, html = output.mechanisms or "", output.plot, output.html
    from regard.configs.suggested_sizes import mechanism_costs
    from regard.cost import mechanism_table

    check_files({"--html": html}, pictures={"--plot": plot})
    rows = mechanism_costs(names.split(","), base, setting, machine, count_layer=_count_layer)
    if plot is not None or html is not None:
        from regard.view import charts
        from regard.view.cost_text import mechanisms_html

        contexts = contexts_within_positions(parse_context_range(DEFAULT_RANGE), base.model)
        lines = {row.label: sweep(row.report.model, setting, contexts, machine) for row in rows}
        title = f"batch {setting.batch}" + (f", {machine.name}" if machine else "")
        chart = charts.context_charts(lines, title)
        if plot is not None:
            charts.write(chart, plot)
        if html is not None:
            from regard.view.html_page import write

            write(html, mechanisms_html(rows, machine, chart, base.suggested))
    if output.json:
        result = mechanism_table.as_json(rows, machine)
        typer.echo(json_format.dumps(result, indent=1, allow_nan=False))
    else:
        typer.echo(text.mechanisms_page(rows, machine, base.suggested))


def _count_layer(choice: MechanismChoice, base: BaseModel) -> CountedLayer:
    """Count a mechanism from its layer; torch is imported only if one is asked for."""
    from regard.models.assembly.counted_layers import count_layer

    return count_layer(choice, base)


def _flag_of(name: str) -> str:
    """Return the flag of a size or of an option of the mechanism."""
    flags = {"groups": "--kv-heads", "head_dim": "--head-dim", "window": "--window"}
    return flags.get(name, f"--{name.replace('_', '-')}")


def _context(text: str | None, models: list[ModelSpec]) -> int:
    """Return the given context, or else 4096, or less if a model has fewer learned positions."""
    if text is not None:
        return parse_tokens(text)
    return min([DEFAULT_CONTEXT, *(m.max_context for m in models if m.max_context is not None)])


def _measure_this_machine() -> Machine:
    """Return this machine: its memory bandwidth and matrix-product rates, measured now."""
    import torch

    from regard.timing import Ceilings, describe_machine, free_memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names: dict[torch.dtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    note("measuring the bandwidth and the rates of this machine", "... ")
    ceilings, machine_facts = Ceilings.measure(names, device), describe_machine(device)
    threads = counted(machine_facts["threads"], "thread") if device.type == "cpu" else "GPU"
    source = Phrase(
        "measured now, the best of several: {processor}, {threads}, torch {torch}",
        processor=machine_facts.get("gpu", machine_facts["processor"]),
        threads=threads,
        torch=machine_facts["torch"],
    )
    rates = {names[d]: rate for d, rate in ceilings.gemm.items()}
    return Machine(
        "here", ceilings.read, rates, free_memory(device), source, "memory that is free now"
    )


def _show(
    reports: list[CostReport],
    machine: Machine | None,
    speculation: DraftCost | None,
    *,
    json: bool,
) -> None:
    if json:
        result = (
            _with_measured(model_figures(reports[0], machine), reports[0], machine)
            if len(reports) == 1
            else compare_models(reports, machine)
        )
        if speculation is not None and machine is not None:
            result["speculation"] = {
                "draft": speculation.draft.model.name,
                "draft_tokens": speculation.tokens,
                "accepted": speculation.accepted,
                "tokens_a_pass": speculation.tokens_a_pass,
                "seconds": speculation.seconds(machine),
            }
        typer.echo(json_format.dumps(result, indent=1, allow_nan=False))
    elif len(reports) == 1:
        typer.echo(text.page(reports[0], machine, speculation))
    else:
        typer.echo(text.comparison(reports, machine))


def _with_measured(
    figures: dict[str, Any], report: CostReport, machine: Machine | None
) -> dict[str, Any]:
    """Add what engines reach of each bound to the figures of a model."""
    works: tuple[Work, ...] = ("prefill", "decode")
    for work in works:
        if machine is not None and work in figures["roofline"]:
            measured = reached(report, machine, work)
            figures["roofline"][work]["reached"] = None if measured is None else measured.as_json()
    return figures


def _show_range(
    models: list[ModelSpec],
    settings: list[Setting],
    machine: Machine | None,
    output: ComparisonOptions,
) -> None:
    """Print a row for each context, and draw a chart of them."""
    plot, requested = output.plot, parse_context_range(output.sweep or DEFAULT_RANGE)
    contexts = contexts_within_positions(requested, *models)
    if len(contexts) < len(requested):
        note(
            "contexts above {longest:,} are left out, because learned positions end there",
            longest=contexts[-1],
        )
    check_files({}, pictures={"--plot": plot})
    rows: Rows = {}
    for i, (model, setting) in enumerate(zip(models, settings, strict=True)):
        name = model.name if model.name not in rows else f"{model.name} ({i + 1})"
        rows[name] = sweep(model, setting, contexts, machine)
    if plot is not None:
        from regard.view import charts

        title = f"batch {settings[0].batch}" + (f", {machine.name}" if machine else "")
        charts.write(charts.context_charts(rows, title), plot)
    if output.json:
        typer.echo(json_format.dumps({"sweep": rows}, indent=1, allow_nan=False))
    else:
        typer.echo(
            "\n\n".join(text.sweep_table(name, model_rows) for name, model_rows in rows.items())
        )
