"""A comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regard.compare.compared import FEWEST

ABSENT = "-"


def table(told: Mapping[str, Any]) -> str:
    """The comparison as `regard.compare.compared.as_json` tells it: what it ran on, costs, quality, fronts, and notes."""
    parts = [header(told), *("\n".join(_aligned(rows(told))) for rows in (memory_rows, time_rows))]
    if legend := overlapping(told):
        parts[-1] += f"\n{legend}"
    if lines := [f"not run: {line}" for line in refusals(told)]:
        parts.append("\n".join(lines))
    if told["training"]["lessons"]:
        parts.append(
            "\n".join([f"quality: {quality_sentence(told)}", *_aligned(quality_rows(told))])
        )
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
        f"{m['processor']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, regard {m['regard']}\n"
        f"{s['layers']} layers, dim {s['dim']}, {s['heads']} heads, {shared}, vocabulary {s['vocabulary']}, "
        f"window {s['window']}, fp32\n"
        f"medians and quartiles of {rounds(told)} rounds in turns, batch 1; training steps of {t['batch']} x {t['length']} tokens"
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
        kept = [size(e["decode"].get(c, {}).get("kv_bytes")) for c in contexts]
        peaks = [size(memory.get(work)) for work in ("prefill", "training")]
        rows.append([e["name"], f"{e['parameters']:,}", *kept, *peaks])
    return rows


def time_rows(told: Mapping[str, Any]) -> list[list[str]]:
    """How long each takes, the heads first: medians, and below them the range between the quartiles.

    A median has a ~ in front where its range overlaps that of the first mechanism: see `overlapping`.
    """
    contexts = _contexts(told)
    works = (("prompt", "prefill"), ("token", "decode"))
    rows = [["", *(f"{word} @{c}" for word, _ in works for c in contexts), "step", "kernels"]]
    for e in told["mechanisms"]:
        found = [e[kind].get(c, {}) for _, kind in works for c in contexts]
        found.append(e["training"] or {})
        marks = ["~" * bool(row.get("overlaps_first")) for row in found]
        taken = [mark + time(row.get("seconds")) for mark, row in zip(marks, found, strict=True)]
        rows.append([e["name"], *taken, kernels(e)])
        if any("quartiles" in row for row in found):
            rows.append(
                ["", *(span(*row["quartiles"]) if "quartiles" in row else "" for row in found), ""]
            )
    return rows


def overlapping(told: Mapping[str, Any]) -> str:
    """What a ~ in front of a time means, if there is one."""
    marked = any(
        row.get("overlaps_first")
        for e in told["mechanisms"]
        for row in (*e["prefill"].values(), *e["decode"].values(), e["training"] or {})
    )
    first = told["mechanisms"][0]["name"]
    return (
        f"~ its quartiles overlap those of {first}, or there were fewer than {FEWEST} rounds: the two are not told apart"
        if marked
        else ""
    )


def _contexts(told: Mapping[str, Any]) -> list[str]:
    return [str(c) for c in sorted(told["timing"]["contexts"])]


def refusals(told: Mapping[str, Any]) -> Iterator[str]:
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
                    "diverged" if q.get("diverged") else ABSENT,
                    *(ABSENT for _ in (*span, "lr", "steps")),
                ]
                continue
            low, high = measure(one, q["low"]), measure(one, q["high"])
            row += [
                measure(one, q["mean"]),
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
        f"learning rates chosen by validation loss ({tried(told)}), judged on other data"
    )


def tried(told: Mapping[str, Any]) -> str:
    """The learning rates that were tried, and with which mechanisms.

    >>> one = {"name": "mha", "quality": {"text": {"validation": {"0.001": 2.0, "0.003": 1.0}}}}
    >>> tried({"mechanisms": [one, {**one, "name": "mqa"}]})
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


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names and kernels to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, *(i for i, head in enumerate(rows[0]) if head == "kernels")}
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(cells)
        ).rstrip()


def kernels(entry: Mapping[str, Any]) -> str:
    """The kernels of softmax that ran, in prompts and in decoding; "state" where there was none.

    >>> kernels({"prefill": {"8": {"kernels": ["cpu", "gemm"]}}, "decode": {"8": {"kernels": []}}})
    'cpu gemm / state'
    """
    told = []
    for kind in ("prefill", "decode"):
        rows = entry[kind].values()
        names = dict.fromkeys(name for row in rows for name in row.get("kernels", ()))
        told.append(" ".join(names) or ("state" if rows else ABSENT))
    return " / ".join(told)


def time(seconds: float | None) -> str:
    """Three figures.

    >>> time(0.0123), time(2.5), time(None)
    ('12.3 ms', '2.50 s', '-')
    """
    if seconds is None:
        return ABSENT
    return f"{seconds:.2f} s" if seconds >= 1 else f"{_three(1e3 * seconds)} ms"


def span(low: float, high: float) -> str:
    """Two times in the unit of the larger.

    >>> span(0.0120, 0.0125), span(0.9, 2.5)
    ('12.0..12.5 ms', '0.90..2.50 s')
    """
    if high >= 1:
        return f"{low:.2f}..{high:.2f} s"
    return f"{_three(1e3 * low)}..{_three(1e3 * high)} ms"


def size(n: float | None) -> str:
    """Bytes in a unit of 1024.

    >>> size(33792), size(512), size(None)
    ('33.0 KiB', '512 B', '-')
    """
    if n is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{_three(n)} {unit}"
        n /= 1024
    return f"{_three(n)} GiB"


def measure(lesson: str, x: float) -> str:
    """Bits of text, per cent of recall.

    >>> measure("text", 2.3456), measure("mqar", 0.5)
    ('2.346', '50.0 %')
    """
    return f"{x:.3f}" if lesson == "text" else f"{100 * x:.1f} %"


def _three(x: float) -> str:
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"
