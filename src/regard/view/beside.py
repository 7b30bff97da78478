"""Sections of the terminal page that stand beside the walk: mixed heads, states, costs, and other mechanisms."""

from __future__ import annotations

from rich.text import Text

from regard.view import glyphs
from regard.view.glyphs import number
from regard.view.lines import INDENT, WIDTH, Data, Lines, strip, style, wrapped


def mixture(data: Data) -> Lines:
    """The patterns that make the head, and their factors."""
    found = data["mixture"]
    yield from wrapped(found["text"])
    yield Text(f"{INDENT}{'pattern':<16}{'factor':>10}{'its row sums to':>18}", "dim")
    for term in found["terms"]:
        mark = "▶" if term["here"] else " "
        yield Text(
            f"{mark} {term['name']:<16}{number(term['factor'], 10)}{number(term['row_sum'], 18)}"
        )
    if found["row"] is not None:
        yield Text(f"{INDENT}together: the row sums to {number(sum(found['row']))}")
        for j in sorted(range(len(found["row"])), key=lambda j: -abs(found["row"][j]))[:4]:
            yield Text(f"{INDENT}{j:>6} {number(found['row'][j], 10)}", "dim")


def state(data: Data) -> Lines:
    """The state that the query reads, and the row that it amounts to."""
    s, row = (
        data["state"],
        [p for p, why in zip(data["weights"], data["masked"], strict=True) if not why],
    )
    shape = " x ".join(map(str, s["shape"]))
    yield from wrapped(
        f"no softmax: the row above is unnormalised, it sums to {number(sum(row))}; "
        f"{sum(p < 0 for p in row)} of {len(row)} weights are negative"
    )
    yield Text(
        f"{INDENT}state S of the head: {shape}, {s['numbers']} numbers kept, {s['bytes']} bytes, whatever the length"
    )
    yield Text(
        f"{INDENT}|S| {number(s['norm_before'])} → {number(s['norm'])} with this token;  effective rank "
        f"{number(s['rank'])} of {min(s['shape'])}"
    )
    for n, values in enumerate(s["matrix"][:3]):
        yield from strip(f"S, row {n}", values, "s")


def tensors(data: Data) -> Lines:
    """Each stage of the whole layer, all heads: its shape, mean and deviation, and the time of that stage alone."""
    yield Text(f"{INDENT}{'stage':<8}  {'shape':<18}{'mean':>10}{'std':>10}{'ms':>10}", "dim")
    for one in data["tensors"]:
        shape = " x ".join(map(str, one["shape"]))
        ms = "" if one["seconds"] is None else number(1e3 * one["seconds"], 10)
        yield Text(f"{INDENT}{one['name']:<8}  {shape:<18}{number(one['mean'], 10)}{number(one['std'], 10)}{ms}")  # fmt: skip
    if any(one["seconds"] is not None for one in data["tensors"]):
        yield from wrapped("masked scores are left out of their mean; a time is the fastest of five runs of that stage alone, scores by the definition")  # fmt: skip


def cost(data: Data) -> Lines:
    """FLOPs and bytes of the row, and what caches keep of the layer."""
    c = data["cost"]
    yield from wrapped(
        f"this row: {c['keys']} keys, {c['flops']:,} FLOPs of scores and mix, {c['bytes']:,} bytes read and written"
    )
    if c["layer_flops"]:
        yield from wrapped(
            f"the layer, one decoded token: {c['layer_flops']:,} FLOPs = {c['formula']}"
        )
    largest = max(kept["bytes"] for kept in c["kept"]) or 1
    yield Text(f"{INDENT}cache of {data['sizes']['S']} tokens, {data['dtype']}", "dim")
    for kept in c["kept"]:
        name = f"{'▶' if kept['here'] else ' '} {kept['name']:<14}"
        figures = f"{kept['numbers']:>7,} x {kept['tokens']:<7,}{kept['bytes']:>13,} B "
        room = WIDTH - len(name) - len(figures) - 1
        yield Text.assemble(
            name, figures, (glyphs.bar(kept["bytes"] / largest, room).rstrip(), style("k", bold=kept["here"]))
        )  # fmt: skip


def elsewhere(data: Data) -> Lines:
    """What each other mechanism makes of the same row."""
    j = data["key"]
    key = f"p of {j}"
    yield Text(
        f"{INDENT}{'':<14}{key:>10}  {'strongest key':<22}{'effective':>10}{'moved':>8}{'|Δz|/|z|':>10}",
        "dim",
    )
    weights = data["weights"]
    best = max(range(len(weights)), key=lambda n: weights[n])
    yield _row("as it is", weights[j], best, weights[best], data, "", "", "")
    for other in data["elsewhere"]:
        yield _row(
            other["name"], other["p"], other["top"], other["p_top"], data, number(other["effective"]),
            f"{other['moved']:.1%}", number(other["apart"]),
        )  # fmt: skip
    yield Text(f"{INDENT}effective keys: exp(entropy); moved: half of Σ |p´ - p|", "dim")


def _row(
    name: str, p: float, top: int, p_top: float, data: Data, effective: str, moved: str, apart: str
) -> Text:
    shown = f"{top} {glyphs.cell(data['pieces'][top], 8).rstrip()} {glyphs.weight(p_top)}"
    return Text.assemble(
        f"{INDENT}{name:<14}{glyphs.weight(p):>10}  ", glyphs.cell(shown, 22), f"{effective:>10}{moved:>8}{apart:>10}"
    )  # fmt: skip
