"""A comparison as the page that `view` draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regard.compare.compared import COSTS, cost_of
from regard.compare.front import front
from regard.compare.table import (
    header,
    memory_rows,
    overlapping,
    quality_rows,
    quality_sentence,
    rounds,
    time_rows,
)
from regard.view.compared import Chart, ComparedPage, Grid
from regard.view.curves import Line, Picture
from regard.view.scatter import Axis, Mark

TITLES = {"kv_bytes": ("cache", "bytes"), "decode_seconds": ("time of a decoded token", "seconds")}
"""Cost -> its axis."""


def page(told: Mapping[str, Any]) -> str:
    """The page of a comparison as `regard.compare.compared.as_json` tells it: HTML that needs nothing else."""
    m = told["machine"]
    facts = {
        "processor": m["processor"], "threads": str(m["threads"]), "torch": m["torch"], "regard": m["regard"],
        "same": told["same"], "seeds": ", ".join(map(str, told["training"]["seeds"])),
        "rounds": rounds(told),
    }  # fmt: skip
    about = header(told).partition("\n")[2].replace("\n", "; ")
    times = about + (f"; {legend}" if (legend := overlapping(told)) else "")
    grids = [_grid("Memory", about, memory_rows(told)), _grid("Time", times, time_rows(told))]
    if told["training"]["lessons"]:
        grids.append(_grid("Quality", quality_sentence(told), quality_rows(told)))
    return ComparedPage(
        "Attention mechanisms, side by side",
        f"{len(told['mechanisms'])} mechanisms as decoders of the same shape, on one machine, in turns.",
        facts, told["command"], list(charts(told)), grids, notes(told), costs(told), curves(told),
    ).html()  # fmt: skip


def charts(told: Mapping[str, Any]) -> Iterator[Chart]:
    """Each lesson against each cost at the longest context, and the cache also at the length of training."""
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
            yield Chart(
                marks, Axis(f"{title} at {at:,} tokens", unit), y, f"{name} against {title}",
                f"{' or '.join(str(n) for n in steps)} steps, seeds {', '.join(map(str, told['training']['seeds']))}; "
                f"quality on rows as long as in training, cost at {at:,} tokens.",
            )  # fmt: skip


def costs(told: Mapping[str, Any]) -> list[Chart]:
    """A decoded token's time against the cache and against a prompt's time, at the longest context; without any training."""
    at = max(told["timing"]["contexts"])
    token = Axis(f"time of a decoded token at {at:,} tokens", "seconds")
    found = []
    for title, axis, kind, name in (
        ("a token against the cache", Axis(f"cache at {at:,} tokens", "bytes"), "decode", "kv_bytes"),
        ("a token against a prompt", Axis(f"time of a prompt of {at:,} tokens", "seconds"), "prefill", "seconds"),
    ):  # fmt: skip
        points = []
        for e in told["mechanisms"]:
            x, row = e[kind].get(str(at), {}).get(name), e["decode"].get(str(at), {})
            if x and row.get("seconds"):
                y = row["seconds"]
                points.append((e["name"], x, y, tuple(row.get("quartiles", (y, y)))))
        best = front([(x, y) for _, x, y, _ in points])
        marks = [Mark(n, x, y, s, i in best) for i, (n, x, y, s) in enumerate(points)]
        caption = f"Medians of {rounds(told)} rounds; bars through marks are the quartiles of the token's time."
        found.append(Chart(marks, axis, token, title, caption))
    return found


def curves(told: Mapping[str, Any]) -> list[Picture]:
    """Times and caches over the contexts, a line for each mechanism; none where there is one context only."""
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
            "small models, few steps, short texts: differences of the size of the seeds' span say nothing, and an order at "
            "this scale is no order at another"
        )
    if told["interrupted"]:
        found.append("interrupted: what is missing was not measured")
    return found


def _grid(title: str, caption: str, rows: list[list[str]]) -> Grid:
    return Grid(title, caption, rows[0], rows[1:])
