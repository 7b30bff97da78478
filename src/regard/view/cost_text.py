"""The text of `regard cost`: parameters by part, costs of a context, and bounds on a machine; and
the page of a table of mechanisms.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from regard import units
from regard.configs.measured_speeds import Reached, Work, reached
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.cost import CostReport
from regard.cost.mechanism_table import MechanismCost
from regard.cost.memory_fit import DOES_NOT_FIT, FITS, LIBRARIES, TIGHT
from regard.cost.ranks import RanksReport
from regard.cost.roofline import (
    MACHINES,
    MAX_BATCH,
    MAX_CONTEXT,
    Machine,
    arithmetic_intensity,
    largest_batch,
    largest_context,
    memory_fit,
    roofline_bounds,
)
from regard.cost.softmax import SoftmaxSpec
from regard.cost.speculation import DraftCost
from regard.cost.sweep import COMPARED_FIGURES, best_times
from regard.cost.training import TrainingReport
from regard.language import Phrase, translate, translate_count
from regard.text_table import format_table, line_width, wrap

if TYPE_CHECKING:
    from regard.view.charts import Chart

SUGGESTED, EVIDENCE = "sizes that were not given", "what is published about quality"
"""The titles of two parts of a table of mechanisms."""
FIGURE_TITLES = {
    "parameters": "parameters",
    "active_parameters": "active parameters",
    "attention_parameters": "attention parameters",
    "weight_bytes": "weights",
    "kv_bytes_per_token": "cache, for each token",
    "kv_bytes": "cache, all",
    "prefill_flops": "prompt, work",
    "prefill_bytes": "prompt, moved",
    "decode_flops": "one token, work",
    "decode_bytes": "one token, moved",
}
"""The titles of the figures by which models are compared."""
OF_BATCHES = {
    "prompt": "prompts",
    "prompt, work": "prompts, work",
    "prompt, moved": "prompts, moved",
    "one token": "one token each",
    "one token, work": "one token each, work",
    "one token, moved": "one token each, moved",
    "a token": "a token each",
}
"""The titles of figures of one sequence -> those of figures of a whole batch."""
TITLES = (
    *FIGURE_TITLES.values(),
    *OF_BATCHES.values(),
    *("part", "share", "embedding", "positions", "attention", "recurrence", "feed-forward"),
    *("router", "experts", "norms", "head", "that no layer drops", "of which states"),
    *("prompt", "one token", "a token", "moved", "method", "first token", "sent", "sent a token"),
    *("held", "fits", "why not", "mechanism", "in attention", "cache a token", "cache", "context"),
    *("prompt at best", "token at best", "prefill", "decode"),
    *("memory", "compute", "messages", "host"),
    *(f"{bits}-bit {what}" for what in ("weights", "experts") for bits in (16, 8, 4)),
    *("on each card", "weights", "gradients", "optimizer", "attention weights", "adapters"),
    *("logits", "inputs of layers", "the layer that is computed again", "libraries"),
    SUGGESTED,
    EVIDENCE,
)
"""The titles of rows and columns, and the words for what bounds a time."""
BYTES = tuple(name for name in COMPARED_FIGURES if "bytes" in name)


def page(report: CostReport, machine: Machine | None, speculation: DraftCost | None = None) -> str:
    """Return the full text for one model."""
    blocks = [_head(report), _parts(report), _costs(report)]
    if machine is not None:
        blocks.append(_bounds(report, machine, speculation))
    if report.notes:
        notes = (f"- {_note(note)}" for note in report.notes)
        blocks.append("\n".join(_lines(notes, indent="", hang="  ")))
    return "\n\n".join(blocks)


def training_page(report: TrainingReport, machine: Machine | None) -> str:
    """Return the text for a training step of one model."""
    run = report.run
    head = translate(
        "training {model}: {trained} trained, {cards} with {batch} of {seq} tokens each, "
        "{optimizer}, {precision}, ZeRO {zero}, checkpointing {checkpointing}",
        model=report.model.name,
        trained=translate_count(report.trained, "parameter"),
        cards=translate_count(run.cards, "card"),
        batch=translate_count(run.batch, "sequence"),
        seq=f"{run.seq:,}",
        optimizer=run.optimizer,
        precision=run.precision,
        zero=run.zero,
        checkpointing=run.checkpointing,
    )
    sizes = {**report.state_bytes, **report.activation_bytes}
    rows = [(translate_title("on each card"), "")]
    rows += [(translate_title(name), units.size(n)) for name, n in sizes.items()]
    rows.append((translate_title("libraries"), units.size(LIBRARIES)))
    rows.append((translate("all"), units.size(report.peak_bytes)))
    lines = [
        translate("a step: {flops} on each card", flops=units.count(report.step_flops, "FLOP"))
    ]
    if run.cards > 1:
        lines.append(translate("a card sends {size} a step", size=units.size(report.sent_bytes)))
    if machine is not None:
        fit = report.fit(machine)
        rate = report.tokens_per_second(machine)
        lines += [
            translate(
                "on {machine}: {share} % of its {memory} are {usable}: {verdict}",
                machine=translate(machine.name),
                share=f"{100 * fit.runtime.utilization:.4g}",
                memory=units.size(fit.memory),
                usable=units.size(fit.usable),
                verdict=translate(fit.verdict or Phrase("its size is not known")),
            ),
            translate(
                "at best {n} tokens/s, {each} on each card; published trainings of dense models on "
                "A100 reach 50 to 63 % of that",
                n=units.per_second(rate),
                each=units.per_second(rate / run.cards),
            ),
        ]
    lines.append(
        translate(
            "not counted: fragmentation, buffers of messages, copies of the data, norms that store "
            "their input twice; in latent attention the latent of queries"
        )
    )
    return "\n\n".join(
        [
            wrap(head, line_width(), hang="  "),
            format_table(rows, width=line_width()),
            "\n".join(_lines(lines, indent="")),
        ]
    )


def _work_title(title: str, batch: int) -> str:
    """Return the title of the work of a batch: of several sequences, it is not that of one."""
    return translate_title(title if batch == 1 else OF_BATCHES.get(title, title))


def _note(note: str) -> str:
    """Return a remark on a model in the reader's language."""
    start, _, source = note.partition(": ")
    is_source = start == "sizes"
    return translate("sizes: {source}", source=source) if is_source else translate(note)


def _head(report: CostReport) -> str:
    model = report.model
    kinds = [f"{n} x {translate(kind)}" for kind, n in model.attention_kinds.items()]
    title = translate(
        "{model}: {parameters}, {active} active for one token",
        model=model.name,
        parameters=translate_count(model.parameters, "parameter"),
        active=f"{model.active_parameters:,}",
    )
    return "\n".join([wrap(title, line_width(), hang="  "), *_lines(kinds, hang="      ")])


def _parts(report: CostReport) -> str:
    model = report.model
    titles = ("part", "parameters", "share", "active parameters")
    rows: list[tuple[str, ...]] = [tuple(map(translate_title, titles))]
    rows += [
        (
            translate_title(p.name),
            f"{p.parameters:,}",
            f"{p.parameters / model.parameters:.1%}",
            f"{p.active_parameters:,}",
        )
        for p in model.parts
    ]
    rows.append(
        (translate("all"), f"{model.parameters:,}", "100.0%", f"{model.active_parameters:,}")
    )
    sentences, layers = [], model.layers
    first = layers[0].mixer
    if isinstance(first, SoftmaxSpec) and not model.encoder:
        one = first.weights.matrices
        sentences.append(
            translate(
                "attention of one layer: {one} = M (H D + G D + G E + H E); of {layers}: {all}, "
                "{share} of all",
                one=f"{one:,}",
                layers=translate_count(len(layers), "layer"),
                all=f"{model.attention_parameters:,}",
                share=f"{model.attention_parameters / model.parameters:.1%}",
            )
        )
    if model.tied:
        sentences.append(
            translate(
                "the head is the embedding: it has no parameters of its own, and all of it is "
                "active"
            )
        )
    table = format_table(rows, width=line_width())
    return "\n".join([table, *_lines(sentences, indent="", hang="  ")])


def _costs(report: CostReport) -> str:
    setting, model = report.setting, report.model
    rows = [(translate("weights"), units.size(report.weight_bytes), "")]
    if model.decodes:
        cache = [("cache, for each token", report.kv_bytes_per_token)]
        if report.kv_growth != report.kv_bytes_per_token:
            cache.append(("  that no layer drops", report.kv_growth))
        cache.append(("cache, all", report.kv_bytes))
        if report.state_bytes:
            cache.append(("  of which states", report.state_bytes))
        rows += [(translate_title(name), units.size(n), "") for name, n in cache]
    work = [("prompt", report.prefill_flops, report.prefill_bytes())]
    if model.decodes:
        work.append(("one token", report.decode_flops, report.decode_bytes()))
    rows += [
        (_work_title(name, setting.batch), units.count(n, "FLOP"), _bytes_and_intensity(n, moved))
        for name, n, moved in work
    ]
    for form, count in report.decode_forms.items():
        name = translate("  latents, {form}", form=form)
        rows.append((name, units.count(count, "FLOP"), ""))
    return f"{_setting_line(report)}\n{format_table(rows, width=line_width())}"


def _setting_line(report: CostReport) -> str:
    setting = report.setting
    line = translate(
        "context {context}, batch {batch}, weights {weights}, cache {cache}",
        context=f"{setting.context:,}",
        batch=setting.batch,
        weights=report.weight_format,
        cache=setting.format.name,
    )
    if setting.shared_prefix:
        line += translate(", shared prefix {n}", n=f"{setting.shared_prefix:,}")
    return line


def _bytes_and_intensity(count: int, moved: int) -> str:
    intensity = float(f"{arithmetic_intensity(count, moved):.3g}")
    return translate(
        "{size} moved, {intensity} FLOP/byte", size=units.size(moved), intensity=f"{intensity:,g}"
    )


def _bounds(report: CostReport, machine: Machine, speculation: DraftCost | None) -> str:
    rate = units.count(machine.rate(report.compute_format), "FLOP/s")
    lines = [
        translate(
            "on {machine} at best: {bandwidth}, {rate}",
            machine=translate(machine.label),
            bandwidth=units.rate(machine.bandwidth),
            rate=rate,
        ),
        f"({machine.source})",
        *_division(report, machine),
        translate("weights and cache are {fit}", fit=_fit(report, machine)),
        *(
            [translate("(memory: {source})", source=machine.memory_source)]
            * bool(machine.memory_source)
        ),
        *_limits(report, machine),
    ]
    if memory_fit(report, machine).verdict == DOES_NOT_FIT:
        lines.append(translate("times are those of such a machine with more memory:"))
    for what, bound in roofline_bounds(report, machine).items():
        line = translate(
            "{what}: {seconds}, bound by {by}",
            what=translate_title(what),
            seconds=units.seconds(bound.seconds),
            by=translate_title(bound.by),
        )
        tokens = report.setting.batch if what == "decode" else report.prompt_tokens
        line += translate(", {n} tokens/s", n=units.per_second(tokens / bound.seconds))
        work: Work = "decode" if what == "decode" else "prefill"
        lines += [line, *_reached(reached(report, machine, work), tokens / bound.seconds)]
    if speculation is not None:
        lines.append(_speculation(speculation, machine))
    return "\n".join([wrap(lines[0], line_width(), hang="  "), *_lines(lines[1:])])


def _division(report: CostReport, machine: Machine) -> list[str]:
    """Describe how several cards divide a model, and what stays with the host."""
    lines, cards = [], machine.cards
    if machine.host is not None:
        lines.append(
            translate(
                "experts ({size}) stay in the memory of the host, which is read at {rate}, after "
                "what the card does and not beside it",
                size=units.size(report.expert_bytes()),
                rate=units.rate(machine.host),
            )
        )
    if cards == 1:
        return lines
    shares = sorted({mixer.cache_shares(cards) for mixer in report.model.mixers})
    cache_bytes = report.held_bytes(cards) - -(-report.weight_bytes // cards)
    lines.append(
        translate(
            "tensor parallel: each of {cards} cards holds 1/{cards} of the weights, and {held} of "
            "{all} of cache, which is cut into parts: {shares}",
            cards=cards,
            held=units.size(cache_bytes),
            all=units.size(report.kv_bytes),
            shares=", ".join(map(str, shares)),
        )
    )
    batch = largest_batch(report, machine, by_sequence=True)
    if batch and min(shares, default=cards) < cards:
        lines.append(
            translate(
                "a latent, or a head that fewer cards could hold, is on several cards; if cards "
                "divide the sequences in attention instead (data parallel attention), the batch "
                "that fits is {batch}",
                batch=_limit(batch, MAX_BATCH),
            )
        )
    link = machine.link_rate
    lines.append(
        translate("a card sends {rate}, two sums in each layer", rate=units.rate(link))
        if link is not None
        else translate("messages between cards are not counted: give their rate with --link")
    )
    return lines


def _reached(measured: Reached | None, most: float) -> list[str]:
    """Describe what engines reach of a bound of so many tokens a second."""
    if measured is None:
        return []
    low, high = measured.low, measured.high
    kind, n = translate_title(measured.kind), len(measured.measurements)
    share = _span(f"{100 * low:.0f}", f"{100 * high:.0f}") + " %"
    speeds = _span(units.digits(low * most), units.digits(high * most))
    engines = ", ".join(sorted({x.source.partition(",")[0] for x in measured.measurements}))
    line = translate(
        "published measurements of {kind} on this card reach {range} of that, {speeds} tokens/s "
        "({n} of {engines})"
        if measured.same_machine
        else "published measurements of {kind} on other cards reach {range} of that, {speeds} "
        "tokens/s ({n} of {engines}); of this one none is stored",
        kind=kind,
        range=share,
        speeds=speeds,
        n=n,
        engines=engines,
    )
    return [line]


def _span(low: str, high: str) -> str:
    """Format a range, or one number."""
    return low if low == high else translate("{low} to {high}", low=low, high=high)


def _speculation(speculation: DraftCost, machine: Machine) -> str:
    """Describe the bound of speculative decoding."""
    seconds = speculation.seconds(machine)
    return translate(
        "decode with {draft}, which proposes {k} tokens, each accepted with probability {a}: "
        "{expected} tokens a pass, {seconds} a token, {n} tokens/s",
        draft=speculation.draft.model.name,
        k=speculation.tokens,
        a=f"{speculation.accepted:g}",
        expected=f"{speculation.tokens_a_pass:.3g}",
        seconds=units.seconds(seconds),
        n=units.per_second(speculation.target.setting.batch / seconds),
    )


def _fit(report: CostReport, machine: Machine) -> str:
    """Describe how much memory a model needs, and whether it fits."""
    room = memory_fit(report, machine)
    needed = translate(
        "{needed}, and {runtime} to run them",
        needed=units.size(room.needed),
        runtime=units.size(room.runtime_bytes),
    )
    if room.verdict is None:
        return translate("{needed}; its memory is not known", needed=needed)
    verdicts = {
        FITS: Phrase("they fit, with {left} to spare", left=units.size(room.usable - room.total)),
        TIGHT: Phrase("tight: it needs {total}", total=units.size(room.total)),
        DOES_NOT_FIT: Phrase("they do not fit"),
    }
    return translate(
        "{needed}; {share} % of its {memory} are {usable}: {end}",
        needed=needed,
        share=f"{100 * room.runtime.utilization:.4g}",
        memory=units.size(room.memory),
        usable=units.size(room.usable),
        end=verdicts[room.verdict],
    )


def _limits(report: CostReport, machine: Machine) -> list[str]:
    """Describe the longest context and the largest batch that fit, where the memory is known, and
    the speed of that batch.
    """
    batch, context = largest_batch(report, machine), largest_context(report, machine)
    if not batch or not context:
        return []
    lines = [
        translate(
            "context that fits: {context}; batch that fits: {batch}",
            context=_limit(context, report.model.max_context or MAX_CONTEXT),
            batch=_limit(batch, MAX_BATCH),
        )
    ]
    if report.model.decodes and batch < MAX_BATCH:
        full = CostReport(report.model, replace(report.setting, batch=batch))
        rate = batch / roofline_bounds(full, machine)["decode"].seconds
        lines.append(
            translate(
                "with that batch at best {each} tokens/s for each sequence, {all} in all",
                each=units.digits(rate / batch),
                all=units.per_second(rate),
            )
        )
    return lines


def ranks_page(plan: RanksReport, method: str | None = None) -> str:
    """Return the text for a model over several ranks."""
    setting, ranks = plan.report.setting, translate_count(plan.ranks, "rank")
    titles = ("method", "first token", "a token", "sent", "sent a token", "held", "fits", "why not")
    rows: list[tuple[str, ...]] = [("", *map(translate_title, titles))]
    for x in plan.estimates:
        if method not in (None, x.method):
            continue
        name = (
            x.method
            if x.tensor_ranks == 1
            else translate("{method}, {n} share a matrix", method=x.method, n=x.tensor_ranks)
        )
        times = units.seconds(x.prefill_seconds), units.seconds(x.decode_seconds)
        sizes = units.size(x.sent), units.size(x.token_sent), units.size(x.memory)
        cells = (units.ABSENT,) * 6 if x.why_not else (*times, *sizes, _yes_no_unknown(plan.fit(x)))
        rows.append((">" if x.method == plan.best else "", name, *cells, translate(x.why_not)))
    head = translate(
        "{model} on {ranks} of {machine}: context {context}, batch {batch}, {dtype}",
        model=plan.report.model.name,
        ranks=ranks,
        machine=translate(plan.machine.name),
        context=units.tokens(setting.context),
        batch=setting.batch,
        dtype=setting.dtype,
    )
    notes = [
        translate("A rank sends {rate}.", rate=units.rate(plan.bytes_per_second))
        if plan.ranks > 1
        else "",
        translate("Times are lower bounds: full rates, no latency, equal work on every rank."),
        translate("exchange sends while attention computes; the other methods do not overlap."),
        translate(
            "sent: the most that one rank sends for the prompt. held: weights, cache and received "
            "blocks of one rank, without activations. >: the fastest method that fits."
        ),
    ]
    text = "\n".join(wrap(note, min(line_width(), 80)) for note in notes if note)
    table = format_table(rows, left=(0, 1, 7, 8), gap=2, width=line_width(), names=2)
    return "\n\n".join([wrap(head, line_width(), hang="  "), table, text])


def comparison(reports: Sequence[CostReport], machine: Machine | None) -> str:
    """Return the figures of several models with their units; with two models, also their ratio."""
    names = [report.model.name for report in reports]
    figures = [report.as_json() for report in reports]
    pair = len(reports) == 2
    rows: list[list[str]] = [["", *names, *([" / ".join(names)] if pair else [])]]
    for name in COMPARED_FIGURES:
        unit = _figure_format(name)
        values = [one[name] for one in figures]
        ratio = [_ratio(*values)] if pair else []
        title = _work_title(FIGURE_TITLES[name], reports[0].setting.batch)
        rows.append([title, *map(unit, values), *ratio])
    setting, notes = reports[0].setting, []
    if machine is not None:
        fits = [memory_fit(report, machine).verdict for report in reports]
        title = translate("fits {machine}", machine=machine.label)
        rows.append([title, *map(_yes_no_unknown, fits)])
        for what, seconds in best_times(reports, machine).items():
            cells = [translate("does not fit") if t is None else units.seconds(t) for t in seconds]
            known = [t for t in seconds if t is not None]
            ratio = [_ratio(*known) if len(known) == 2 else "-"] if pair else []
            title = translate(
                "{what} on {machine}", what=translate_title(what), machine=machine.label
            )
            rows.append([title, *cells, *ratio])
        notes = [f"{machine.name}: {_machine_source(machine)}"]
        notes += [
            translate(
                "{model}: weights and cache are {fit}",
                model=report.model.name,
                fit=_fit(report, machine),
            )
            for report in reports
        ]
    title = translate(
        "context {context}, batch {batch}", context=f"{setting.context:,}", batch=setting.batch
    )
    if pair:
        title += translate(
            "; the last column is {first} divided by {second}: above 1x, {first} needs more",
            first=names[0],
            second=names[1],
        )
    table = format_table(rows, width=line_width())
    return "\n".join([wrap(title, line_width()), table, *_lines(notes, indent="")])


def _machine_source(machine: Machine) -> str:
    """Return the sources of a machine's figures."""
    if not machine.memory_source:
        return machine.source
    return translate(
        "{source}; memory: {memory}", source=machine.source, memory=machine.memory_source
    )


def _yes_no_unknown(verdict: str | None) -> str:
    """Return in a word whether a model fits."""
    words = {FITS: Phrase("yes"), TIGHT: Phrase("tight"), DOES_NOT_FIT: Phrase("no")}
    return translate("not known" if verdict is None else words[verdict])


def translate_title(title: str) -> str:
    """Return a title of a row or a column in the reader's language.

    >>> translate_title("cache")
    'cache'
    """
    name = title.lstrip()
    return title[: len(title) - len(name)] + translate(name)


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
    """Return the text of a table of mechanisms: sizes, work, suggested sizes, and evidence."""
    blocks = [wrap(mechanisms_title(rows, machine), line_width(), hang="  ")]
    for title, table in mechanism_tables(rows, machine).items():
        blocks.append(f"{title}\n{format_table(table, width=line_width())}")
    sizes = suggested_sizes(rows, model_sizes)
    if sizes:
        lines = _lines(_titled(label, text) for label, text in sizes)
        blocks.append("\n".join([translate_title(SUGGESTED), *lines]))
    evidence = (_titled(row.label, quoted_evidence(row)) for row in rows)
    blocks.append("\n".join([translate_title(EVIDENCE), *_lines(evidence)]))
    return "\n\n".join(blocks)


def _titled(title: str, text: str) -> str:
    """Return a text behind its title and a colon."""
    return translate("{title}: {text}", title=title, text=text)


def mechanisms_title(rows: Sequence[MechanismCost], machine: Machine | None) -> str:
    """Return the line above a table of mechanisms: the model and the setting."""
    model = rows[0].report.model
    on = "" if machine is None else translate(", {machine}", machine=machine.name)
    layers = translate_count(len(model.layers), "layer")
    sizes = translate(
        "{model}: {layers} of width {width}; ",
        model=translate(model.name),
        layers=layers,
        width=f"{model.dim:,}",
    )
    return f"{sizes}{_setting_line(rows[0].report)}{on}"


def mechanism_tables(
    rows: Sequence[MechanismCost], machine: Machine | None
) -> dict[str, list[tuple[str, ...]]]:
    """Return the two tables of mechanisms by title; the first row of each has the headings."""
    titles = ("mechanism", "parameters", "in attention", "cache a token", "cache")
    memory: list[tuple[str, ...]] = [tuple(map(translate_title, titles))]
    titles = ("mechanism", "prompt", "moved", "a token", "moved")
    batch = rows[0].report.setting.batch
    work: list[tuple[str, ...]] = [tuple(_work_title(title, batch) for title in titles)]
    if machine is not None:
        memory[0] += (translate("batch that fits"), translate("context that fits"))
        work[0] += (translate("prompt at best"), translate("token at best"))
    for row in rows:
        report, model = row.report, row.report.model
        counts = map(units.count, (model.parameters, model.attention_parameters))
        caches = map(units.size, (report.kv_bytes_per_token, report.kv_bytes))
        memory.append((row.label, *counts, *caches))
        costs = (
            *(units.count(report.prefill_flops, "FLOP"), units.size(report.prefill_bytes())),
            *(units.count(report.decode_flops, "FLOP"), units.size(report.decode_bytes())),
        )
        work.append((row.label, *costs))
        if machine is not None:
            most = model.max_context or MAX_CONTEXT
            memory[-1] += (_limit(row.max_batch, MAX_BATCH), _limit(row.max_context, most))
            work[-1] += (units.seconds(row.prefill_seconds), units.seconds(row.decode_seconds))
    return {translate("memory"): memory, translate("work"): work}


def _limit(n: int | None, most: int) -> str:
    """Format the largest number that fits; a number that was not bounded has a sign."""
    if n is None:
        return units.ABSENT
    return translate("does not fit") if n == 0 else f">= {n:,}" if n == most else f"{n:,}"


def suggested_sizes(rows: Sequence[MechanismCost], model_sizes: str = "") -> list[tuple[str, str]]:
    """Return the mechanisms with the sizes that were not given, as commands read them, and the
    sources of these sizes.
    """
    lines = []
    if model_sizes:
        source, _, sizes = model_sizes.removeprefix("as ").partition(": ")
        shown = translate("as {source}: {sizes}", source=source, sizes=sizes)
        lines.append((translate("the model"), shown))
    for row in rows:
        by_source: dict[str, list[str]] = {}
        for option, source in row.suggested.items():
            by_source.setdefault(source, []).append(option)
        texts = [
            translate("{sizes} as {source}", source=source, sizes=", ".join(sizes))
            for source, sizes in by_source.items()
        ]
        values = (f"{option}={row.options[option]}" for option in row.suggested)
        lines += [(":".join([row.label, *values]), translate("; ").join(texts))] if texts else []
    return lines


def quoted_evidence(row: MechanismCost) -> str:
    """Return what is published about the quality of a mechanism, with its source."""
    source = f" [{row.evidence.source}]" if row.evidence.source else ""
    return f"{translate(row.evidence.finding)}{source}"


def _lines(lines: Iterable[str], indent: str = "  ", hang: str = "    ") -> list[str]:
    """Return lines wrapped at the width of the terminal, indented."""
    return [wrap(line, line_width(), indent=indent, hang=hang) for line in lines]


def sweep_table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with one row per context."""
    timed = "decode_seconds" in rows[0]
    titles: tuple[str, ...] = ("context", "cache", "prompt", "one token", "moved")
    titles += ("prompt at best", "token at best", "fits") if timed else ()
    batch = rows[0]["batch"]
    lines: list[tuple[str, ...]] = [tuple(_work_title(title, batch) for title in titles)]
    for row in rows:
        lines.append(
            (
                f"{row['context']:,}",
                units.size(row["kv_bytes"]),
                units.count(row["prefill_flops"], "FLOP"),
                units.count(row["decode_flops"], "FLOP"),
                units.size(row["decode_bytes"]),
            )
        )
        if timed:
            seconds = (units.seconds(row[f"{work}_seconds"]) for work in ("prefill", "decode"))
            lines[-1] += (*seconds, _yes_no_unknown(row["fit"]))
    return f"{name}\n{format_table(lines, left=(), width=line_width(), names=1)}"


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
    sources = (f"{name}: {_machine_source(m)}" for name, m in MACHINES.items())
    blocks = (
        (
            translate("models, with their numbers of parameters"),
            format_table([(name, f"{n:,}") for name, n in sizes.items()]),
        ),
        (
            translate("machines, with their peak bandwidth, memory and FLOP/s"),
            format_table(rates, width=line_width()),
        ),
        (translate("sources of these numbers"), *_lines(sources, indent="")),
    )
    return "\n\n".join(map("\n".join, blocks))


def mechanisms_html(
    rows: Sequence[MechanismCost], machine: Machine | None, chart: Chart, model_sizes: str = ""
) -> str:
    """Return the page of a table of mechanisms: tables, chart, suggested sizes, evidence."""
    from regard.view.html_page import Section, page

    sections = [
        Section(title, heads=table[0], rows=table[1:], numbers=True)
        for title, table in mechanism_tables(rows, machine).items()
    ]
    sections.append(Section(translate("over the context"), pictures=[chart]))
    evidence = [(row.label, quoted_evidence(row)) for row in rows]
    mechanism = translate_title("mechanism")
    for title, head, table in (
        (SUGGESTED, translate("sizes"), suggested_sizes(rows, model_sizes)),
        (EVIDENCE, translate("finding"), evidence),
    ):
        if table:
            sections.append(Section(translate_title(title), heads=(mechanism, head), rows=table))
    source = {} if machine is None else {translate("machine"): f"{machine.name}: {machine.source}"}
    return page(
        translate("The cost of attention mechanisms"),
        mechanisms_title(rows, machine),
        source,
        "",
        sections,
        [translate("Times are lower bounds: full bandwidth or full rate, whichever takes longer.")]
        if machine
        else [],
    )
