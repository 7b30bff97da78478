"""Print a comparison as text for a terminal, or write it as an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from regard import units
from regard.compare.comparison import (
    COSTS,
    MIN_ROUNDS,
    TIME_KINDS,
    ComparisonData,
    ComparisonEntry,
    TimeFigure,
    TimeKind,
    TimeRow,
    cost_of,
    pareto,
)
from regard.language import translate, translate_count
from regard.text_table import format_table, line_width, wrap
from regard.view import html_page
from regard.view.charts import Axis, Line, Picture, Scatter, ScatterPoint


def render_table(comparison: ComparisonData) -> str:
    """Return the text of a comparison: machine, costs, quality, Pareto fronts and notes."""
    width = line_width()
    parts = [wrap(header(comparison), width)]
    parts += [_aligned(rows(comparison)) for rows in (memory_rows, time_rows)]
    if legend := overlap_legend(comparison):
        parts[-1] += f"\n{wrap(legend, width, hang='  ')}"
    if lines := [translate("not run: {what}", what=line) for line in failures(comparison)]:
        parts.append("\n".join(wrap(line, width, hang="  ") for line in lines))
    if comparison["training"]["tasks"]:
        quality = translate("quality: {how}", how=quality_sentence(comparison))
        parts.append(f"{wrap(quality, width)}\n{_aligned(quality_rows(comparison))}")
        if any(comparison["fronts"].values()):
            parts.append("\n".join(_pareto_lines(comparison)))
    if notes := [translate("note: {note}", note=translate(x)) for x in comparison["notes"]]:
        parts.append("\n".join(wrap(note, width, hang="  ") for note in notes))
    if comparison["interrupted"]:
        parts.append(wrap(translate("interrupted: missing values were not measured"), width))
    return "\n\n".join(parts)


def header(comparison: ComparisonData) -> str:
    """Return lines with the machine, the common sizes, and how times were measured."""
    machine, shape, timing = comparison["machine"], comparison["shape"], comparison["timing"]
    common = (
        translate("feed-forward width {n} in all", n=shape["hidden"])
        if comparison["same"] == "sizes"
        else translate(
            "feed-forward width chosen for as many parameters as {name}",
            name=comparison["mechanisms"][0]["name"],
        )
    )
    training = ""
    if timing.get("training", True):
        training = translate(
            "; training steps of {batch} x {length} tokens",
            batch=timing["batch"],
            length=timing["length"],
        )
    lines = (
        translate(
            "{processor}, {cores}, {threads}, torch {torch}, regard {regard}",
            processor=machine["processor"],
            cores=translate_count(machine["cores"], "core"),
            threads=translate_count(machine["threads"], "thread"),
            torch=machine["torch"],
            regard=machine["regard"],
        ),
        translate(
            "{layers}, dim {dim}, {heads}{like}, {common}, vocabulary {vocabulary}, "
            "window {window}, fp32",
            layers=translate_count(shape["layers"], "layer"),
            dim=shape["dim"],
            heads=translate_count(shape["heads"], "head"),
            like=translate(" (like {model})", model=shape["like"]) if shape.get("like") else "",
            common=common,
            vocabulary=shape["vocabulary"],
            window=shape["window"],
        ),
        translate(
            "medians and quartiles of {rounds}, mechanisms in turns, batch 1{training}",
            rounds=_round_count(comparison),
            training=training,
        ),
    )
    return "\n".join(lines)


def _round_count(comparison: ComparisonData) -> str:
    """Return the number of rounds with its noun."""
    rounds = round_range(comparison)
    return translate("1 round") if rounds == "1" else translate("{n} rounds", n=rounds)


def round_range(comparison: ComparisonData) -> str:
    """Return the number of rounds of the medians, or the fewest and the most.

    >>> row = {"prefill": {}, "decode": {"8": {"rounds": 3}, "64": {"rounds": 2}}, "training": None}
    >>> round_range({"mechanisms": [row]})
    '2 to 3'
    """
    counts = {row["rounds"] for row in _time_rows_of(comparison) if "rounds" in row}
    if not counts:
        return "0"
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else translate("{low} to {high}", low=low, high=high)


def memory_rows(comparison: ComparisonData) -> list[list[str]]:
    """Return the rows of the table of cache sizes and peak memory, with the column heads first."""
    contexts = _contexts(comparison)
    caches = [translate("cache @{context}", context=c) for c in contexts]
    peak = translate("peak @{context}", context=contexts[-1])
    rows = [["", translate("parameters"), *caches, peak, translate("peak of a step")]]
    for entry in comparison["mechanisms"]:
        memory = entry["memory"] or {}
        caches = [units.size(entry["decode"].get(c, {}).get("kv_bytes")) for c in contexts]
        peaks = [units.size(memory.get(work)) for work in ("prefill", "training")]
        rows.append([entry["name"], f"{entry['parameters']:,}", *caches, *peaks])
    return rows


def time_rows(comparison: ComparisonData) -> list[list[str]]:
    """Return the table of times: medians, below them the quartiles; ~ is `overlap_legend`."""
    contexts = _contexts(comparison)
    works: tuple[tuple[str, TimeKind], ...] = (
        (translate("prompt"), "prefill"),
        (translate("token"), "decode"),
    )
    titles = (f"{word} @{c}" for word, _ in works for c in contexts)
    rows = [["", *titles, translate("step"), translate("kernels")]]
    for entry in comparison["mechanisms"]:
        timings = [entry[kind].get(c, {}) for _, kind in works for c in contexts]
        timings.append(entry["training"] or {})
        marks = ["~" * bool(row.get("overlaps_first")) for row in timings]
        medians = [
            mark + units.seconds(row.get("seconds"))
            for mark, row in zip(marks, timings, strict=True)
        ]
        rows.append([entry["name"], *medians, kernel_names(entry)])
        if any("quartiles" in row for row in timings):
            spans = (units.span(*x["quartiles"]) if "quartiles" in x else "" for x in timings)
            rows.append(["", *spans, ""])
    return rows


def overlap_legend(comparison: ComparisonData) -> str:
    """Return the meaning of a ~ in front of a time, if any time has one."""
    if not any(row.get("overlaps_first") for row in _time_rows_of(comparison)):
        return ""
    first = comparison["mechanisms"][0]["name"]
    return translate(
        "~ the quartiles overlap those of {first}, or there were fewer than {n} rounds: the two "
        "may be equally fast",
        first=first,
        n=MIN_ROUNDS,
    )


def _time_rows_of(comparison: ComparisonData) -> Iterator[TimeRow]:
    """Yield the times of every mechanism in every measurement."""
    for entry in comparison["mechanisms"]:
        yield from (*entry["prefill"].values(), *entry["decode"].values(), entry["training"] or {})


def _contexts(comparison: ComparisonData) -> list[str]:
    return [str(c) for c in sorted(comparison["timing"]["contexts"])]


def failures(comparison: ComparisonData) -> Iterator[str]:
    """Yield a line for each measurement that could not be run, with the reason."""
    for entry in comparison["mechanisms"]:
        works = [(f"{kind} @{c}", row) for kind in TIME_KINDS for c, row in entry[kind].items()]
        works += [("training", entry["training"])] if entry["training"] else []
        for work_name, row in works:
            if "why" in row:
                yield f"{entry['name']}, {work_name}: {row['why']}"


def quality_rows(comparison: ComparisonData) -> list[list[str]]:
    """Return the rows of the table of quality, with the column heads first."""
    tasks = list(comparison["training"]["tasks"])
    span = [translate("low .. high")] if len(comparison["training"]["seeds"]) > 1 else []
    steps = translate("steps")
    rows = [["", *(x for task in tasks for x in (task, *span, "lr", steps))]]
    for entry in comparison["mechanisms"]:
        row = [entry["name"]]
        for task in tasks:
            quality = entry["quality"].get(task, {})
            if "mean" not in quality:
                row.append(translate("diverged") if quality.get("diverged") else units.ABSENT)
                row += [units.ABSENT] * (len(span) + 2)
                continue
            low, high = format_score(task, quality["low"]), format_score(task, quality["high"])
            row += [format_score(task, quality["mean"]), *(f"{low} .. {high}" for _ in span)]
            row += [f"{quality['rate']:g}", str(quality["steps"])]
        rows.append(row)
    return rows


def quality_sentence(comparison: ComparisonData) -> str:
    """Return a sentence about how quality is measured."""
    seeds = ", ".join(map(str, comparison["training"]["seeds"]))
    return translate(
        "text in bits per byte (lower is better), recall as the share of right answers; seeds "
        "{seeds}; learning rates chosen by validation loss ({rates}), tested on other data",
        seeds=seeds,
        rates=tried_rates(comparison),
    )


def tried_rates(comparison: ComparisonData) -> str:
    """Return the learning rates that were tried, and with which mechanisms.

    >>> one = {"name": "mha", "quality": {"text": {"validation": {"0.001": 2.0, "0.003": 1.0}}}}
    >>> tried_rates({"mechanisms": [one, {**one, "name": "mqa"}]})
    '0.001, 0.003 for mha mqa'
    """
    groups: dict[str, dict[str, None]] = {}
    for entry in comparison["mechanisms"]:
        for quality in entry["quality"].values():
            groups.setdefault(", ".join(quality["validation"]), {})[entry["name"]] = None
    return "; ".join(f"{rates} for {' '.join(names)}" for rates, names in groups.items()) or "none"


def _pareto_lines(comparison: ComparisonData) -> Iterator[str]:
    longest_context = max(comparison["timing"]["contexts"])
    tokens = translate_count(longest_context, "token")
    yield translate("Pareto front, costs at {tokens}", tokens=tokens)
    for name, names in comparison["fronts"].items():
        if names:
            words = name.replace("kv_bytes", translate("cache bytes")).replace(
                "decode_seconds", translate("time of a token")
            )
            line = f"{words.replace('against', translate('against'))}: {', '.join(names)}"
            yield wrap(line, line_width(), indent="  ", hang="    ")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with names and kernels aligned left, and numbers aligned right."""
    left = {0, *(i for i, head in enumerate(rows[0]) if head == translate("kernels"))}
    return format_table(rows, left=left, width=line_width())


def kernel_names(entry: ComparisonEntry) -> str:
    """Return the softmax kernels that ran in prompts and in decoding, or "state" for a mechanism
    without softmax.

    >>> prefill, decode = {"8": {"kernels": ["cpu", "gemm"]}}, {"8": {"kernels": []}}
    >>> kernel_names({"prefill": prefill, "decode": decode})
    'cpu gemm / state'
    """
    names_by_kind = []
    for kind in TIME_KINDS:
        rows = entry[kind].values()
        names = dict.fromkeys(name for row in rows for name in row.get("kernels", ()))
        names_by_kind.append(" ".join(names) or ("state" if rows else units.ABSENT))
    return " / ".join(names_by_kind)


def format_score(task: str, x: float) -> str:
    """Return a score as text: bits per byte for text, per cent for recall.

    >>> format_score("text", 2.3456), format_score("mqar", 0.5)
    ('2.346', '50.0 %')
    """
    return f"{x:.3f}" if task == "text" else f"{100 * x:.1f} %"


def _title_and_unit(cost: str) -> tuple[str, str]:
    """Return the title of the axis of a cost, and its unit."""
    if cost == "kv_bytes":
        return translate("cache"), "bytes"
    return translate("time of a decoded token"), "seconds"


def render_page(comparison: ComparisonData) -> str:
    """Return the HTML page of a comparison, which needs no other file."""
    machine = comparison["machine"]
    facts = {
        translate("processor"): machine["processor"],
        translate("threads"): str(machine["threads"]),
        "torch": machine["torch"],
        "regard": machine["regard"],
        translate("same"): comparison["same"],
        translate("seeds"): ", ".join(map(str, comparison["training"]["seeds"])),
        translate("rounds"): round_range(comparison),
    }
    conditions = header(comparison).partition("\n")[2].replace("\n", "; ")
    times = conditions + (f"; {legend}" if (legend := overlap_legend(comparison)) else "")
    pareto = translate(
        "Filled marks are on the Pareto front, which the dashed line joins: no other mechanism is "
        "better in both coordinates."
    )
    sections = [
        _chart_section(
            translate("Quality against cost"),
            f"{pareto} {translate('Bars show the range over seeds.')}",
            quality_charts(comparison),
        ),
        _chart_section(translate("Costs against one another"), pareto, cost_charts(comparison)),
        html_page.Section(
            translate("Costs over the context"),
            caption=translate("Both axes are logarithmic; marks are medians."),
            figures=[html_page.CaptionedChart(one) for one in context_plots(comparison)],
        ),
        _table_section(translate("Memory"), conditions, memory_rows(comparison)),
        _table_section(translate("Time"), times, time_rows(comparison)),
    ]
    if comparison["training"]["tasks"]:
        sections.append(
            _table_section(
                translate("Quality"), quality_sentence(comparison), quality_rows(comparison)
            )
        )
    return html_page.page(
        translate("Comparison of attention mechanisms"),
        translate(
            "{mechanisms} as decoders of the same shape, measured in turns on one machine.",
            mechanisms=translate_count(len(comparison["mechanisms"]), "mechanism"),
        ),
        facts,
        comparison["command"],
        [one for one in sections if one.rows or one.figures],
        notes(comparison),
    )


def quality_charts(comparison: ComparisonData) -> Iterator[Scatter]:
    """Yield a scatter chart of each task against each cost at the longest context."""
    longest_context = max(comparison["timing"]["contexts"])
    tokens = translate_count(longest_context, "token")
    for name in comparison["training"]["tasks"]:
        y = Axis(translate("right answers"), "share")
        if name == "text":
            y = Axis(translate("bits per byte, lower is better"), "bits")
        for cost in COSTS:
            title, unit = _title_and_unit(cost)
            on_front = comparison["fronts"][f"{name} against {cost}"]
            marks = []
            for entry in comparison["mechanisms"]:
                x, quality = cost_of(entry, cost, longest_context), entry["quality"].get(name, {})
                if x is not None and "mean" in quality:
                    span = (quality["low"], quality["high"])
                    marks.append(
                        ScatterPoint(
                            entry["name"], x, quality["mean"], span, entry["name"] in on_front
                        )
                    )
            steps = {
                other["quality"][name]["steps"]
                for other in comparison["mechanisms"]
                if "steps" in other["quality"].get(name, {})
            }
            caption = translate(
                "{steps}, seeds {seeds}; quality on rows as long as in training, cost at {tokens}.",
                steps=translate(" or ").join(translate_count(n, "step") for n in sorted(steps)),
                seeds=", ".join(map(str, comparison["training"]["seeds"])),
                tokens=tokens,
            )
            yield Scatter(
                marks,
                Axis(translate("{cost} at {tokens}", cost=title, tokens=tokens), unit),
                y,
                translate("{lesson} against {cost}", lesson=name, cost=title),
                caption,
            )


def cost_charts(comparison: ComparisonData) -> list[Scatter]:
    """Return scatter charts of a token's time against cache and prompt, at the longest context."""
    longest_context = max(comparison["timing"]["contexts"])
    tokens = translate_count(longest_context, "token")
    (cache_title, _), (token_title, _) = map(_title_and_unit, COSTS)
    token = Axis(translate("{cost} at {tokens}", cost=token_title, tokens=tokens), "seconds")
    cache = Axis(translate("{cost} at {tokens}", cost=cache_title, tokens=tokens), "bytes")
    prompt = Axis(translate("time of a prompt of {tokens}", tokens=tokens), "seconds")
    charts = []
    wanted: tuple[tuple[str, Axis, TimeKind, TimeFigure], ...] = (
        (translate("a token against the cache"), cache, "decode", "kv_bytes"),
        (translate("a token against a prompt"), prompt, "prefill", "seconds"),
    )
    for title, axis, kind, name in wanted:
        points = []
        for entry in comparison["mechanisms"]:
            x = entry[kind].get(str(longest_context), {}).get(name)
            row = entry["decode"].get(str(longest_context), {})
            if x and row.get("seconds"):
                y = row["seconds"]
                low, high = row.get("quartiles", (y, y))
                points.append((entry["name"], x, y, (low, high)))
        on_front = pareto([(x, y) for _, x, y, _ in points])
        marks = [ScatterPoint(n, x, y, s, i in on_front) for i, (n, x, y, s) in enumerate(points)]
        caption = translate(
            "Medians of {rounds}; bars show the quartiles of the token's time.",
            rounds=_round_count(comparison),
        )
        charts.append(Scatter(marks, axis, token, title, caption))
    return charts


def context_plots(comparison: ComparisonData) -> list[Picture]:
    """Return plots of times and caches over the contexts, if there are several."""
    contexts = sorted(comparison["timing"]["contexts"])
    if len(contexts) < 2:
        return []
    wanted: tuple[tuple[str, str, TimeKind, TimeFigure], ...] = (
        (translate("Time of a prompt"), translate("seconds"), "prefill", "seconds"),
        (translate("Time of a decoded token"), translate("seconds"), "decode", "seconds"),
        (translate("Cache"), translate("bytes"), "decode", "kv_bytes"),
    )
    plots = []
    for title, unit, kind, name in wanted:
        lines = []
        for entry in comparison["mechanisms"]:
            rows = [(c, entry[kind].get(str(c), {}).get(name)) for c in contexts]
            lines.append(Line(entry["name"], tuple((float(c), float(y)) for c, y in rows if y)))
        plots.append(Picture(title, translate("tokens of context"), unit, tuple(lines), "xy"))
    return [picture for picture in plots if picture.drawable]


def notes(comparison: ComparisonData) -> list[str]:
    """Return the notes, the definition of peak memory, and the limits of small models."""
    lines = list(comparison["notes"])
    if any(entry["memory"] for entry in comparison["mechanisms"]):
        lines.append(translate("peak memory: {how}", how=comparison["memory"]))
    if comparison["training"]["tasks"]:
        lines.append(
            translate(
                "the models are small, and training and texts are short: differences within the "
                "range over seeds mean nothing, and the ranking may differ at a larger scale"
            )
        )
    if comparison["interrupted"]:
        lines.append(translate("interrupted: missing values were not measured"))
    return lines


def _chart_section(title: str, caption: str, scatters: Iterable[Scatter]) -> html_page.Section:
    """Return a section of a page with those scatter charts that have marks."""
    figures = [html_page.CaptionedChart(one, one.caption) for one in scatters if one.marks]
    return html_page.Section(title, caption=caption, figures=figures)


def _table_section(title: str, caption: str, rows: list[list[str]]) -> html_page.Section:
    """Return a section of a page with a table whose first row has the column heads."""
    return html_page.Section(title, caption=caption, heads=rows[0], rows=rows[1:], numbers=True)
