"""The sections of the terminal page, one function per step of the walk: data in, lines out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from regard.view import glyphs
from regard.view.glyphs import number
from regard.view.lines import (
    INDENT,
    WIDTH,
    Data,
    Lines,
    equation,
    large_pattern,
    legend,
    norm,
    small_patterns,
    strip,
    style,
    wrapped,
)

TOP = 8  # keys that are named; the others are counted


def tokens(data: Data) -> Lines:
    """Every token with its index, and before it its weight; the query in its colour."""
    line = Text(INDENT)
    for j in range(len(data["pieces"])):
        masked, here = bool(data["masked"][j]), j == data["query"]
        mark = "▶" if here else glyphs.shade(None if masked else data["weights"][j])
        name = (piece_of(data, j), style("q", bold=True) if here else "dim" if masked else "")
        token = Text.assemble((f"{j}", "dim"), (mark, style("q" if here else "s")), name, "  ")
        if line.cell_len + token.cell_len > WIDTH:
            yield line
            line = Text(INDENT)
        line.append_text(token)
    yield line
    yield legend("▶ query; weight:")


def hidden(data: Data) -> Lines:
    """The hidden state of the query, embedded, entering the layer, and normed."""
    yield from strip("embedding of the token", data["embedding"], "")
    yield from strip(f"h: entering layer {data['layer']}", data["entering"], "")
    yield from strip("x: after the layer's norm", data["normed"], "")


def projected(data: Data) -> Lines:
    """q of the query, and k and v of the key with the largest weight."""
    j = _order(data)[0]
    for step in data["q"]:
        yield from strip(f"q, {step['name']}", step["values"], "q")
    for step in data["k"]:
        yield from strip(f"k of {j} {piece_of(data, j)}, {step['name']}", step["values"][j], "k")
    yield from strip(f"v of {j} {piece_of(data, j)}", data["v"][j], "v")
    angles = data["angles"][data["query"]]
    if angles:
        position, shown = data["positions"][data["query"]], ", ".join(number(a) for a in angles[:5])
        yield equation(data["equations"]["rotate"])
        yield Text(
            f"{INDENT}{len(angles)} pairs, layout {data['layout']}; of the query, position {position}:"
        )
        yield Text(f"{INDENT}φ = {shown} ... {number(angles[-1])} rad")


def scores(data: Data) -> Lines:
    """How the largest score comes about; a row per key, the largest weights first; the others counted."""
    order = _order(data)
    yield equation(data["equations"]["dot"])
    yield _products(data, order[0])
    names = "".join(f"{step['name']:>9}" for step in data["scores"][:-1])
    yield Text(f"{INDENT} key {'token':<10}{names} exp(s-m)  weight", "dim")
    room = WIDTH - 37 - 9 * (len(data["scores"]) - 1)
    for j in order[:TOP]:
        values = "".join(number(step["values"][j], 9) for step in data["scores"][:-1])
        p = data["weights"][j]
        yield Text.assemble(
            f"{INDENT}{j:>4} ", glyphs.cell(data["pieces"][j], 10), (values, style("s")),
            number(data["exps"][j], 9), (f"  {glyphs.weight(p)} ", "bold"),
            (glyphs.bar(p, room).rstrip(), style("s")),
        )  # fmt: skip
    if order[TOP:]:
        rest = sum(data["weights"][j] for j in order[TOP:])
        yield Text(f"{INDENT}... {len(order) - TOP} others share {glyphs.weight(rest)}", "dim")
    yield from _masked(data)


def _masked(data: Data) -> Lines:
    """How many keys are masked, and why."""
    reasons = [reason for reason in data["masked"] if reason]
    for reason in dict.fromkeys(reasons):
        count, first = reasons.count(reason), data["masked"].index(reason)
        keys = f"key {first}" if count == 1 else f"{count} keys, the first is {first}"
        yield from wrapped(f"masked: {keys}: s = -∞, so the weight is 0; why: {reason}")


def _products(data: Data, j: int) -> Text:
    """The largest products of q_i . k_j, by dim."""
    q, k = data["q"][-1]["values"], data["k"][-1]["values"][j]
    products = [a * b for a, b in zip(q, k, strict=True)]
    largest = sorted(range(len(q)), key=lambda d: -abs(products[d]))[:3]
    rest = sum(products) - sum(products[d] for d in largest)
    terms = "".join(f"{number(products[d])} (d {d}) + " for d in largest)
    others = f"{number(rest)} ({len(q) - len(largest)} others)"
    return Text(f"{INDENT}key {j}: {terms}{others} = {number(sum(products))}")


def softmax(data: Data) -> Lines:
    """The parts of the softmax, and one weight computed both ways."""
    total = number(data["total"])
    sink = "" if data["sink"] is None else f",  sink {number(data['sink'])}"
    yield Text(
        f"{INDENT}m = {number(data['row_max'])},  Σ exp(s-m) = {total}{sink},  "
        f"lse = {number(data['lse'])},  Σ p = {sum(data['weights']):.6f}"
    )
    j = _order(data)[0]
    s, p = data["scores"][-1]["values"][j], glyphs.weight(data["weights"][j])
    if s is not None and data["sink"] is None:
        yield Text(
            f"{INDENT}key {j}: exp({number(s)} - {number(data['row_max'])}) / {total} = "
            f"exp({number(s)} - {number(data['lse'])}) = {p}"
        )


def mix(data: Data) -> Lines:
    """The keys that give most: by the size of p v, not by p alone."""
    rows = data["contributions"]
    sizes = [norm(row) for row in rows]
    order = [j for j in sorted(range(len(sizes)), key=lambda j: -sizes[j]) if sizes[j] > 0]
    top = max((abs(x) for row in rows for x in row), default=0.0)
    for j in order[:3]:
        p = glyphs.weight(data["weights"][j])
        yield from strip(f"{p} v of {j} {piece_of(data, j)}", rows[j], "v", top)
    if order[3:]:
        rest = norm([sum(rows[j][d] for j in order[3:]) for d in range(len(rows[0]))])
        yield Text(
            f"{INDENT}... {len(order) - 3} others add a vector of norm {number(rest)}", "dim"
        )
    yield from strip("z: the sum of all", data["z"], "z", max(top, max(map(abs, data["z"]))))


def output(data: Data) -> Lines:
    """What each head writes into out, and the sums."""
    n, largest = data["sizes"], max(map(abs, data["shares"])) or 1.0
    yield Text(
        f"{INDENT}joined: {n['H']} heads x {n['E']} = {n['H'] * n['E']} numbers; what each writes into out:"
    )
    for h, share in enumerate(data["shares"]):
        here = h == data["head"]
        bar = glyphs.bar(abs(share) / largest, 44).rstrip()
        line = f"{INDENT}{'▶' if here else ' '} head {h:>2}  {share:>+8.1%}  {bar}"
        yield Text(line, style("z", bold=here) if here else "")
    yield from strip("this head writes W_O z", data["head_out"], "z")
    yield from strip("out: attention writes", data["out"], "z")
    yield from strip("h + out: the hidden state", data["residual"], "")


def pattern(data: Data) -> Lines:
    """The pattern of the head, and of every other head of the layer, small."""
    yield from large_pattern(data)
    yield legend("weight:")
    yield from small_patterns(data)


def predictions(data: Data) -> Lines:
    """The likeliest next tokens."""
    for guess in data["predictions"]:
        p = guess["probability"]
        yield Text.assemble(
            f"{INDENT}{glyphs.cell(guess['piece'], 16)} {p:>7.2%}  ",
            (glyphs.bar(p, 48).rstrip(), style("z")),
        )


def _order(data: Data) -> Sequence[int]:
    """Visible keys, the largest weight first; the query itself where it sees nothing."""
    seen = [j for j, reason in enumerate(data["masked"]) if not reason]
    return sorted(seen, key=lambda j: -data["weights"][j]) or [data["query"]]


def piece_of(data: Data, j: int) -> str:
    """Token j, cut to fit a line."""
    return glyphs.cell(data["pieces"][j], 16).rstrip()
