"""A comparison as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from regard import units
from regard.compare.comparison import COSTS, MIN_ROUNDS, cost_of, pareto
from regard.table import table as table_of
from regard.view import html
from regard.view.charts import Axis, Line, Mark, Picture, Scatter


def render_table(told: Mapping[str, Any]) -> str:
    """The comparison as `regard.compare.comparison.as_json` tells it: what it ran on, costs,
    quality, fronts, and notes.
    """
    parts = [header(told), *(_aligned(rows(told)) for rows in (memory_rows, time_rows))]
    if legend := overlap_legend(told):
        parts[-1] += f"\n{legend}"
    if lines := [f"not run: {line}" for line in failures(told)]:
        parts.append("\n".join(lines))
    if told["training"]["lessons"]:
        parts.append(f"quality: {quality_sentence(told)}\n{_aligned(quality_rows(told))}")
        parts += ["\n".join(_fronts(told))] if any(told["fronts"].values()) else []
    parts += ["\n".join(f"note: {note}" for note in told["notes"])] if told["notes"] else []
    if told["interrupted"]:
        parts.append("interrupted: what is missing was not measured")
    return "\n\n".join(parts)


def header(told: Mapping[str, Any]) -> str:
    """The machine, the sizes that all share, and how it was measured."""
    m, s, t = told["machine"], told["shape"], told["timing"]
    shared = (
        f"feed-forward {s['hidden']} everywhere"
        if told["same"] == "sizes"
        else f"as many parameters as {told['mechanisms'][0]['name']} by the feed-forward width"
    )
    return (
        f"{m['processor']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, "
        f"regard {m['regard']}\n"
        f"{s['layers']} layers, dim {s['dim']}, {s['heads']} heads, {shared}, vocabulary "
        f"{s['vocabulary']}, "
        f"window {s['window']}, fp32\n"
        f"medians and quartiles of {rounds(told)} rounds in turns, batch 1; training steps of "
        f"{t['batch']} x {t['length']} tokens"
    )


def rounds(told: Mapping[str, Any]) -> str:
    """How many rounds the medians are of: a number, or the fewest and the most.

    >>> row = {"prefill": {}, "decode": {"8": {"rounds": 3}, "64": {"rounds": 2}}, "training": None}
    >>> rounds({"mechanisms": [row]})
    '2 to 3'
    """
    counts = {
        row["rounds"]
        for e in told["mechanisms"]
        for row in (*e["prefill"].values(), *e["decode"].values(), e["training"] or {})
        if "rounds" in row
    }
    if not counts:
        return "0"
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def memory_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """What each keeps and takes, the heads first."""
    contexts = _contexts(told)
    heads = ["", "parameters", *(f"cache @{c}" for c in contexts), f"peak @{contexts[-1]}"]
    rows = [[*heads, "peak of a step"]]
    for e in told["mechanisms"]:
        memory = e["memory"] or {}
        kept = [units.size(e["decode"].get(c, {}).get("kv_bytes")) for c in contexts]
        peaks = [units.size(memory.get(work)) for work in ("prefill", "training")]
        rows.append([e["name"], f"{e['parameters']:,}", *kept, *peaks])
    return rows


def time_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """How long each takes, the heads first: medians, and below them the range between the
    quartiles.

    A median has a ~ in front where its range overlaps that of the first mechanism: see
    `overlap_legend`.
    """
    contexts = _contexts(told)
    works = (("prompt", "prefill"), ("token", "decode"))
    rows = [["", *(f"{word} @{c}" for word, _ in works for c in contexts), "step", "kernels"]]
    for e in told["mechanisms"]:
        found = [e[kind].get(c, {}) for _, kind in works for c in contexts]
        found.append(e["training"] or {})
        marks = ["~" * bool(row.get("overlaps_first")) for row in found]
        taken = [
            mark + units.seconds(row.get("seconds")) for mark, row in zip(marks, found, strict=True)
        ]
        rows.append([e["name"], *taken, kernels(e)])
        if any("quartiles" in row for row in found):
            rows.append(
                [
                    "",
                    *(units.span(*row["quartiles"]) if "quartiles" in row else "" for row in found),
                    "",
                ]
            )
    return rows


def overlap_legend(told: Mapping[str, Any]) -> str:
    """What a ~ in front of a time means, if there is one."""
    marked = any(
        row.get("overlaps_first")
        for e in told["mechanisms"]
        for row in (*e["prefill"].values(), *e["decode"].values(), e["training"] or {})
    )
    first = told["mechanisms"][0]["name"]
    return (
        f"~ its quartiles overlap those of {first}, or there were fewer than {MIN_ROUNDS} rounds: the "
        "two are not told apart"
        if marked
        else ""
    )


def _contexts(told: Mapping[str, Any]) -> list[str]:
    return [str(c) for c in sorted(told["timing"]["contexts"])]


def failures(told: Mapping[str, Any]) -> Iterator[str]:
    """What could not be run, and why."""
    for e in told["mechanisms"]:
        works = [
            (f"{kind} @{c}", row) for kind in ("prefill", "decode") for c, row in e[kind].items()
        ]
        works += [("training", e["training"])] if e["training"] else []
        for where, row in works:
            if "why" in row:
                yield f"{e['name']}, {where}: {row['why']}"


def quality_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """Quality, the heads first."""
    lessons = list(told["training"]["lessons"])
    span = ["low .. high"] if len(told["training"]["seeds"]) > 1 else []
    rows = [["", *(x for one in lessons for x in (one, *span, "lr", "steps"))]]
    for e in told["mechanisms"]:
        row = [e["name"]]
        for one in lessons:
            q = e["quality"].get(one, {})
            if "mean" not in q:
                row += [
                    "diverged" if q.get("diverged") else units.ABSENT,
                    *(units.ABSENT for _ in (*span, "lr", "steps")),
                ]
                continue
            low, high = format_score(one, q["low"]), format_score(one, q["high"])
            row += [
                format_score(one, q["mean"]),
                *(f"{low} .. {high}" for _ in span),
                f"{q['rate']:g}",
                str(q["steps"]),
            ]
        rows.append(row)
    return rows


def quality_sentence(told: Mapping[str, Any]) -> str:
    """What the numbers of quality are."""
    seeds = ", ".join(map(str, told["training"]["seeds"]))
    return (
        f"text in bits per byte (less is better), recall in right answers; seeds {seeds}; "
        f"learning rates chosen by validation loss ({tried_rates(told)}), judged on other data"
    )


def tried_rates(told: Mapping[str, Any]) -> str:
    """The learning rates that were tried, and with which mechanisms.

    >>> one = {"name": "mha", "quality": {"text": {"validation": {"0.001": 2.0, "0.003": 1.0}}}}
    >>> tried_rates({"mechanisms": [one, {**one, "name": "mqa"}]})
    '0.001, 0.003 for mha mqa'
    """
    groups: dict[str, dict[str, None]] = {}
    for e in told["mechanisms"]:
        for q in e["quality"].values():
            groups.setdefault(", ".join(q["validation"]), {})[e["name"]] = None
    return "; ".join(f"{rates} for {' '.join(names)}" for rates, names in groups.items()) or "none"


def _fronts(told: Mapping[str, Any]) -> Iterator[str]:
    at = max(told["timing"]["contexts"])
    yield f"beaten by no other (Pareto), costs at {at:,} tokens"
    for name, found in told["fronts"].items():
        if found:
            words = name.replace("kv_bytes", "cache bytes").replace(
                "decode_seconds", "time of a token"
            )
            yield f"  {words}: {', '.join(found)}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Names and kernels stand on the left, numbers on the right."""
    left = {0, *(i for i, head in enumerate(rows[0]) if head == "kernels")}
    return table_of(rows, left=left)


def kernels(entry: Mapping[str, Any]) -> str:
    """The kernels of softmax that ran, in prompts and in decoding; "state" where there was none.

    >>> kernels({"prefill": {"8": {"kernels": ["cpu", "gemm"]}}, "decode": {"8": {"kernels": []}}})
    'cpu gemm / state'
    """
    told = []
    for kind in ("prefill", "decode"):
        rows = entry[kind].values()
        names = dict.fromkeys(name for row in rows for name in row.get("kernels", ()))
        told.append(" ".join(names) or ("state" if rows else units.ABSENT))
    return " / ".join(told)


def format_score(lesson: str, x: float) -> str:
    """Bits of text, per cent of recall.

    >>> format_score("text", 2.3456), format_score("mqar", 0.5)
    ('2.346', '50.0 %')
    """
    return f"{x:.3f}" if lesson == "text" else f"{100 * x:.1f} %"


TITLES = {"kv_bytes": ("cache", "bytes"), "decode_seconds": ("time of a decoded token", "seconds")}
"""Cost -> its axis."""


def render_page(told: Mapping[str, Any]) -> str:
    """The page of a comparison as `regard.compare.comparison.as_json` tells it: HTML that needs
    nothing else.
    """
    m = told["machine"]
    facts = {
        "processor": m["processor"],
        "threads": str(m["threads"]),
        "torch": m["torch"],
        "regard": m["regard"],
        "same": told["same"],
        "seeds": ", ".join(map(str, told["training"]["seeds"])),
        "rounds": rounds(told),
    }
    about = header(told).partition("\n")[2].replace("\n", "; ")
    times = about + (f"; {legend}" if (legend := overlap_legend(told)) else "")
    pareto = (
        "Full marks are beaten by no other mechanism in both (Pareto); the dashed line joins them."
    )
    sections = [
        _drawn(
            "Quality against cost",
            f"{pareto} Bars through marks span the seeds.",
            quality_charts(told),
        ),
        _drawn("Costs against one another", pareto, cost_charts(told)),
        html.Section(
            "Costs over the context",
            caption="Both axes are logarithmic; marks are medians.",
            figures=[html.Figure(one) for one in context_plots(told)],
        ),
        _tabled("Memory", about, memory_rows(told)),
        _tabled("Time", times, time_rows(told)),
    ]
    if told["training"]["lessons"]:
        sections.append(_tabled("Quality", quality_sentence(told), quality_rows(told)))
    return html.page(
        "Attention mechanisms, side by side",
        f"{len(told['mechanisms'])} mechanisms as decoders of the same shape, on one machine, in "
        "turns.",
        facts,
        told["command"],
        [one for one in sections if one.rows or one.figures],
        notes(told),
    )


def quality_charts(told: Mapping[str, Any]) -> Iterator[Scatter]:
    """Each lesson against each cost at the longest context, and the cache also at the length of
    training.
    """
    at = max(told["timing"]["contexts"])
    for name in told["training"]["lessons"]:
        text = name == "text"
        y = Axis(
            "bits per byte, less is better" if text else "right answers",
            "bits" if text else "share",
        )
        for cost in COSTS:
            title, unit = TITLES[cost]
            best = told["fronts"][f"{name} against {cost}"]
            marks = []
            for entry in told["mechanisms"]:
                x, quality = cost_of(entry, cost, at), entry["quality"].get(name, {})
                if x is not None and "mean" in quality:
                    span = (quality["low"], quality["high"])
                    marks.append(
                        Mark(entry["name"], x, quality["mean"], span, entry["name"] in best)
                    )
            steps = {
                e["quality"][name].get("steps") for e in told["mechanisms"] if name in e["quality"]
            }
            yield Scatter(
                marks,
                Axis(f"{title} at {at:,} tokens", unit),
                y,
                f"{name} against {title}",
                f"{' or '.join(str(n) for n in steps)} steps, seeds "
                f"{', '.join(map(str, told['training']['seeds']))}; "
                f"quality on rows as long as in training, cost at {at:,} tokens.",
            )


def cost_charts(told: Mapping[str, Any]) -> list[Scatter]:
    """A decoded token's time against the cache and against a prompt's time, at the longest context;
    without any training.
    """
    at = max(told["timing"]["contexts"])
    token = Axis(f"time of a decoded token at {at:,} tokens", "seconds")
    found = []
    for title, axis, kind, name in (
        (
            "a token against the cache",
            Axis(f"cache at {at:,} tokens", "bytes"),
            "decode",
            "kv_bytes",
        ),
        (
            "a token against a prompt",
            Axis(f"time of a prompt of {at:,} tokens", "seconds"),
            "prefill",
            "seconds",
        ),
    ):
        points = []
        for e in told["mechanisms"]:
            x, row = e[kind].get(str(at), {}).get(name), e["decode"].get(str(at), {})
            if x and row.get("seconds"):
                y = row["seconds"]
                points.append((e["name"], x, y, tuple(row.get("quartiles", (y, y)))))
        best = pareto([(x, y) for _, x, y, _ in points])
        marks = [Mark(n, x, y, s, i in best) for i, (n, x, y, s) in enumerate(points)]
        caption = (
            f"Medians of {rounds(told)} rounds; bars through marks are the quartiles of the "
            "token's time."
        )
        found.append(Scatter(marks, axis, token, title, caption))
    return found


def context_plots(told: Mapping[str, Any]) -> list[Picture]:
    """Times and caches over the contexts, a line for each mechanism; none where there is one
    context only.
    """
    contexts = sorted(told["timing"]["contexts"])
    if len(contexts) < 2:
        return []
    wanted = (
        ("Time of a prompt", "seconds", "prefill", "seconds"),
        ("Time of a decoded token", "seconds", "decode", "seconds"),
        ("Cache", "bytes", "decode", "kv_bytes"),
    )
    found = []
    for title, unit, kind, name in wanted:
        lines = []
        for e in told["mechanisms"]:
            rows = [(c, e[kind].get(str(c), {}).get(name)) for c in contexts]
            lines.append(Line(e["name"], tuple((float(c), float(y)) for c, y in rows if y)))
        found.append(Picture(title, "tokens of context", unit, tuple(lines), "xy"))
    return [picture for picture in found if picture.drawable]


def notes(told: Mapping[str, Any]) -> list[str]:
    """The comparison's own, what memory is, and what this scale cannot show."""
    found = list(told["notes"])
    if any(entry["memory"] for entry in told["mechanisms"]):
        found.append(f"peak memory: {told['memory']}")
    if told["training"]["lessons"]:
        found.append(
            "small models, few steps, short texts: differences of the size of the seeds' span say "
            "nothing, and an order at "
            "this scale is no order at another"
        )
    if told["interrupted"]:
        found.append("interrupted: what is missing was not measured")
    return found


def _drawn(title: str, caption: str, scatters: Iterable[Scatter]) -> html.Section:
    """A section of scatters; those without a mark are left out."""
    figures = [html.Figure(one, one.caption) for one in scatters if one.marks]
    return html.Section(title, caption=caption, figures=figures)


def _tabled(title: str, caption: str, rows: list[list[str]]) -> html.Section:
    return html.Section(title, caption=caption, heads=rows[0], rows=rows[1:], numbers=True)
