"""The sections of the terminal page, one function per step of the walk: data in, lines out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from regard.view import glyphs
from regard.view.glyphs import number
from regard.view.keys import TOP, ordered, piece_of
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
)

MOST_LISTED = 128  # tokens
MOST_HEADS = 16  # bars of shares


def tokens(data: Data) -> Lines:
    """Every key with its index, and before it its weight; the query and the key in their colours; of many those near them."""
    line, before = Text(INDENT), -1
    own = data["query"] if data["row_pieces"] == data["pieces"] else -1
    for j in _shown(data, own):
        masked, here, key = bool(data["masked"][j]), j == own, j == data["key"]
        mark = "▶" if here else "◆" if key else glyphs.shade(None if masked else data["weights"][j])
        role = (
            style("q", bold=True)
            if here
            else style("k", bold=True)
            if key
            else "dim"
            if masked
            else ""
        )
        token = Text.assemble(
            (f"… {j - before - 1} more …  " if j > before + 1 else "", "dim"), (f"{j}", "dim"),
            (mark, style("q" if here else "k" if key else "s")), (piece_of(data, j), role), "  ",
        )  # fmt: skip
        if line.cell_len + token.cell_len > WIDTH:
            yield line
            line = Text(INDENT)
        line.append_text(token)
        before = j
    rest = len(data["pieces"]) - before - 1
    yield line.append(f"… {rest} more …" if rest else "", "dim")
    if own < 0:
        yield Text.assemble(
            INDENT,
            "query ",
            (f"{data['query']} ", "dim"),
            (glyphs.cell(data["query_piece"], 16).rstrip(), style("q", bold=True)),
        )
    yield Text(f"{INDENT}▶ query, ◆ key", "dim")
    yield legend("weight:")


def _shown(data: Data, query: int) -> Sequence[int]:
    """The keys that are listed: all of a short text, else the first, those near query and key, and the heaviest."""
    n = len(data["pieces"])
    if n <= MOST_LISTED:
        return range(n)
    near = [range(at - 5, at + 6) for at in (data["key"], query if query >= 0 else data["key"])]
    chosen = {j for group in near for j in group if 0 <= j < n} | set(range(4))
    return sorted(chosen | set(ordered(data)[:TOP]))


def hidden(data: Data) -> Lines:
    """The hidden state of the query, embedded, entering the layer, and normed."""
    for name, title in (
        ("embedding", "embedding of the token"), ("entering", f"h: entering layer {data['layer']}"),
        ("normed", "x: what attention is given"),
    ):  # fmt: skip
        if data[name]:
            yield from strip(title, data[name], "")


def projected(data: Data) -> Lines:
    """q of the query, and k and v of the key."""
    j = data["key"]
    named = f"{j} {piece_of(data, j)}"
    for step in data["q"]:
        yield from strip(f"q, {step['name']}", step["values"], "q")
    for step in data["k"]:
        yield from strip(f"k of {named}, {step['name']}", step["values"][j], "k")
    for step in data["values"]:
        yield from strip(f"v of {named}, {step['name']}", step["values"][j], "v")
    for step in (*data["q"], *data["k"]):
        if step["name"] not in ("projected", "rotated", "given"):
            yield equation(f"{step['name']}: {step['equation']}")
    angles = data["angle"]
    if angles:
        position, shown = data["query_position"], ", ".join(number(a) for a in angles[:5])
        yield equation(data["equations"]["rotate"])
        yield Text(
            f"{INDENT}{len(angles)} pairs, layout {data['layout']}; of the query, position {position}:"
        )
        yield Text(f"{INDENT}φ = {shown} ... {number(angles[-1])} rad")


def mix(data: Data) -> Lines:
    """The keys that give most: by the size of p v, not by p alone."""
    rows = data["contributions"]
    sizes = [norm(row) for row in rows]
    order = [j for j in sorted(range(len(sizes)), key=lambda j: -sizes[j]) if sizes[j] > 0]
    top = max((abs(x) for row in rows for x in row), default=0.0)
    for j in order[:3]:
        p = (
            number(data["weights"][j])
            if data["kind"] == "linear"
            else glyphs.weight(data["weights"][j])
        )
        yield from strip(f"{p} v of {j} {piece_of(data, j)}", rows[j], "v", top)
    if order[3:]:
        rest = norm([sum(rows[j][d] for j in order[3:]) for d in range(len(rows[0]))])
        yield Text(
            f"{INDENT}... {len(order) - 3} others add a vector of norm {number(rest)}", "dim"
        )
    mixed, z = data["mixed"], data["z"]
    yield from strip("z: the sum of all", mixed, "z", max(top, max(map(abs, mixed), default=0.0)))
    if len(mixed) != len(z) or norm([a - b for a, b in zip(mixed, z, strict=True)]) > 1e-4 * (
        norm(z) or 1.0
    ):
        yield from strip("z, finished (gate, norm, map or mix)", z, "z")


def output(data: Data) -> Lines:
    """What each head writes into out, and the sums."""
    largest, count, E = max(map(abs, data["shares"])) or 1.0, len(data["shares"]), len(data["z"])
    yield Text(
        f"{INDENT}joined: {count} heads x {E} = {count * E} numbers; what each writes into out:"
    )
    slot = data["head"] % count
    for h, share in enumerate(data["shares"]):
        if count > MOST_HEADS and h not in _large(data["shares"], slot):
            continue
        here = h == slot
        bar = glyphs.bar(abs(share) / largest, 44).rstrip()
        line = f"{INDENT}{'▶' if here else ' '} head {h:>2}  {share:>+8.1%}  {bar}"
        yield Text(line, style("z", bold=here) if here else "")
    yield from strip("this head writes W_O z", data["head_out"], "z")
    yield from strip("out: attention writes", data["out"], "z")
    if data["residual"]:
        size = norm(data["out"]) / (norm(data["entering"]) or 1.0)
        yield from strip("h: the hidden state behind it", data["residual"], "")
        yield Text(f"{INDENT}|out| is {number(size)} of |h| in front of it", "dim")


def _large(shares: Sequence[float], slot: int) -> set[int]:
    """The heads that are shown of many: the largest shares, and the one that is explained."""
    order = sorted(range(len(shares)), key=lambda h: -abs(shares[h]))
    return {slot, *order[: MOST_HEADS - 1]}


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
