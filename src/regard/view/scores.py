"""Sections of the terminal page on scores: products, the chain, the row, its softmax, and the same block by block."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from regard.view import glyphs
from regard.view.glyphs import number
from regard.view.keys import TOP, ordered
from regard.view.lines import INDENT, WIDTH, Data, Lines, equation, norm, strip, style, wrapped

BLOCKS = 10  # rows of the online softmax


def scores(data: Data) -> Lines:
    """How the score of the key comes about; a row per key, the largest weights first; the others counted."""
    order = ordered(data)
    yield equation(data["equations"]["additive" if data["kind"] == "additive" else "dot"])
    yield from _products(data)
    yield _chain(data)
    linear = data["kind"] == "linear"
    steps = data["scores"] if linear else data["scores"][:-1]
    last = "" if linear else " exp(s-m)"
    names = "".join(f"{step['name'][:9]:>10}" for step in steps)
    yield Text(f"{INDENT} key {'token':<10}{names}{last}  {'a_ij' if linear else 'weight'}", "dim")
    room = WIDTH - 37 - 10 * len(steps) + (9 if linear else 0)
    for j in order[:TOP]:
        values = "".join(number(step["values"][j], 10) for step in steps)
        p = data["weights"][j]
        here = j == data["key"]
        shown = number(p, 8) if linear else glyphs.weight(p)
        yield Text.assemble(
            ("◆" if here else " ", style("k")), f"{j:>5} ", glyphs.cell(data["pieces"][j], 10), (values, style("s")),
            "" if linear else number(data["exps"][j], 9), (f"  {shown} ", "bold"),
            (glyphs.bar(abs(p) / max(_largest(data), 1.0), max(room, 0)).rstrip(), style("s")),
        )  # fmt: skip
    if order[TOP:]:
        rest = sum(data["weights"][j] for j in order[TOP:])
        shown = number(rest) if linear else glyphs.weight(rest)
        yield Text(f"{INDENT}... {len(order) - TOP} others share {shown}", "dim")
    yield from _masked(data)


def _largest(data: Data) -> float:
    return max((abs(p) for p in data["weights"]), default=0.0)


def _chain(data: Data) -> Text:
    """The score of the key, link by link."""
    links = [f"{link['name']} {number(link['value'])}" for link in data["chain"]]
    why = data["masked"][data["key"]]
    line = f"{INDENT}key {data['key']}: " + " → ".join(links) + (f" ({why})" if why else "")
    return Text(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…", style("s"))


def _products(data: Data) -> Lines:
    """The products of the key by dim: a bar each, the running sum behind them, and the largest by name."""
    products, j = data["products"], data["key"]
    running, total = [], 0.0
    for x in products:
        total += x
        running.append(total)
    yield from strip(f"products of key {j}, by dim", products, "s")
    yield from strip("their running sum", running, "s")
    largest = sorted(range(len(products)), key=lambda d: -abs(products[d]))[:3]
    rest = total - sum(products[d] for d in largest)
    pairs = data["pairs"]
    named = [f"{number(products[d])} ({_dim(d, pairs)})" for d in largest]
    others = f"{number(rest)} ({len(products) - len(largest)} others)"
    yield from wrapped(f"key {j}: {' + '.join(named)} + {others} = {number(total)}")


def _dim(d: int, pairs: Sequence[int]) -> str:
    """A dim by its number, and the rotary pair that it belongs to."""
    return f"d {d}, pair {pairs[d]}" if d < len(pairs) and pairs[d] >= 0 else f"d {d}"


def _masked(data: Data) -> Lines:
    """How many keys are masked, and why."""
    reasons = [reason for reason in data["masked"] if reason]
    for reason in dict.fromkeys(reasons):
        count, first = reasons.count(reason), data["masked"].index(reason)
        keys = f"key {first}" if count == 1 else f"{count} keys, the first is {first}"
        yield from wrapped(f"masked: {keys}: s = -∞, so the weight is 0; why: {reason}")


def softmax(data: Data) -> Lines:
    """The parts of the softmax, one weight computed both ways, and the same block by block."""
    total = number(data["total"])
    shared = sum(data["weights"])
    yield Text(
        f"{INDENT}m = {number(data['row_max'])},  Σ exp(s-m) = {total},  "
        f"lse = {number(data['lse'])},  Σ p = {shared:.6f}"
    )
    if data["sink"] is not None:
        yield Text(
            f"{INDENT}sink: logit {number(data['sink'])}, in the denominator only: it takes {glyphs.weight(1 - shared)}"
        )
    j = data["key"]
    s, p = data["scores"][-1]["values"][j], glyphs.weight(data["weights"][j])
    if s is not None and data["sink"] is None:
        yield Text(
            f"{INDENT}key {j}: exp({number(s)} - {number(data['row_max'])}) / {total} = "
            f"exp({number(s)} - {number(data['lse'])}) = {p}"
        )
    elif s is not None:
        yield Text(
            f"{INDENT}key {j}: exp({number(s)} - {number(data['row_max'])}) / ({total} + exp({number(data['sink'])} - m)) = {p}"
        )
    yield from _online(data)


def _online(data: Data) -> Lines:
    """The row as a fused kernel goes through it."""
    blocks = data["online"]
    if len(blocks) < 2:
        return
    yield equation(data["equations"]["online"])
    yield Text(f"{INDENT}{'keys':>13} {'m':>10} {'r':>10} {'l':>10} {'|o|':>10}", "dim")
    shown = blocks if len(blocks) <= BLOCKS else [*blocks[: BLOCKS // 2], *blocks[-BLOCKS // 2 :]]
    for n, block in enumerate(shown):
        if len(blocks) > BLOCKS and n == BLOCKS // 2:
            yield Text(f"{INDENT}... {len(blocks) - BLOCKS} blocks more", "dim")
        span = f"{block['start']}-{block['stop'] - 1}"
        yield Text(
            f"{INDENT}{span:>13} {number(block['top'], 10)} {number(block['kept'], 10)} "
            f"{number(block['total'], 10)} {number(norm(block['output']), 10)}"
        )
    if blocks[-1]["total"]:
        yield Text(f"{INDENT}end: lse = m + ln l = {number(data['lse'])},  z = o / l", "dim")
