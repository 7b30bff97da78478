"""The terminal page of an explanation: every step with its equation and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.units import plural
from regard.view import terminal
from regard.view.explanation_sentences import Sentences
from regard.view.terminal import (
    INDENT,
    WIDTH,
    Data,
    Lines,
    equation,
    heading,
    large_pattern,
    legend,
    norm,
    number,
    small_patterns,
    strip,
    style,
    wrapped,
)


def mixture(data: Data) -> Lines:
    """Generate the patterns that are combined in the head, and their factors."""
    mix = data["mixture"]
    yield from wrapped(mix["text"])
    yield Text(f"{INDENT}{'pattern':<16}{'factor':>10}{'its row sums to':>18}", "dim")
    for term in mix["terms"]:
        mark = "▶" if term["is_explained"] else " "
        yield Text(
            f"{mark} {term['name']:<16}{number(term['factor'], 10)}{number(term['row_sum'], 18)}"
        )
    if mix["row"] is not None:
        yield Text(f"{INDENT}together: the row sums to {number(sum(mix['row']))}")
        for j in sorted(range(len(mix["row"])), key=lambda j: -abs(mix["row"][j]))[:4]:
            yield Text(f"{INDENT}{j:>6} {number(mix['row'][j], 10)}", "dim")


def state(data: Data) -> Lines:
    """Describe the row of a mechanism without a softmax: the sum of its weights, and the recurrent
    state that the query reads, if there is one.
    """
    s, row = (
        data["state"],
        [p for p, why in zip(data["weights"], data["masked"], strict=True) if not why],
    )
    yield from wrapped(
        f"no softmax: the weights of the row are not normalised; they sum to {number(sum(row))}, "
        f"and {sum(p < 0 for p in row)} of {len(row)} are negative"
    )
    if not s:
        return
    shape = " x ".join(map(str, s["shape"]))
    yield Text(
        f"{INDENT}state S of the head: {shape}, {plural(s['num_values'], 'value')}, "
        f"{plural(s['bytes'], 'byte')} at any sequence length"
    )
    yield Text(
        f"{INDENT}|S| {number(s['norm_before'])} → {number(s['norm'])} with this token;  "
        "effective rank "
        f"{number(s['rank'])} of {min(s['shape'])}"
    )
    for n, values in enumerate(s["matrix"][:3]):
        yield from strip(f"S, row {n}", values, "s")


def tensors(data: Data) -> Lines:
    """Generate each stage of the whole layer: shape, mean, standard deviation, and time of that
    stage alone.
    """
    yield Text(f"{INDENT}{'stage':<8}  {'shape':<18}{'mean':>10}{'std':>10}{'ms':>10}", "dim")
    for one in data["tensors"]:
        shape = " x ".join(map(str, one["shape"]))
        ms = "" if one["seconds"] is None else number(1e3 * one["seconds"], 10)
        yield Text(
            f"{INDENT}{one['name']:<8}  "
            f"{shape:<18}{number(one['mean'], 10)}{number(one['std'], 10)}{ms}"
        )
    if any(one["seconds"] is not None for one in data["tensors"]):
        yield from wrapped(
            "means and deviations leave out masked scores; a time is the shortest of five runs of "
            "that stage alone; scores are computed from the definition"
        )


def cost(data: Data) -> Lines:
    """Generate FLOPs and bytes of the row, and the sizes of caches for the layer."""
    c = data["cost"]
    yield from wrapped(
        f"this row: {plural(c['keys'], 'key')}; {c['flops']:,} FLOPs for scores and weighted sum; "
        f"{c['bytes']:,} bytes read and written"
    )
    if c["layer_flops"]:
        yield from wrapped(
            f"the layer, for one decoded token: {c['layer_flops']:,} FLOPs = {c['formula']}"
        )
    largest = max(cache["bytes"] for cache in c["caches"]) or 1
    yield Text(f"{INDENT}cache of {plural(data['sizes']['S'], 'token')}, {data['dtype']}", "dim")
    for cache in c["caches"]:
        name = f"{'▶' if cache['is_this_layer'] else ' '} {cache['name']:<14}"
        figures = f"{cache['values_per_token']:>7,} x {cache['tokens']:<7,}{cache['bytes']:>13,} B "
        room = WIDTH - len(name) - len(figures) - 1
        yield Text.assemble(
            name,
            figures,
            (
                terminal.bar(cache["bytes"] / largest, room).rstrip(),
                style("k", bold=cache["is_this_layer"]),
            ),
        )


def counterfactuals(data: Data) -> Lines:
    """Generate the same row under each other mechanism."""
    j = data["key"]
    key = f"p of {j}"
    yield Text(
        f"{INDENT}{'':<14}{key:>10}  "
        f"{'strongest key':<22}{'eff. keys':>10}{'TV':>8}{'|Δz|/|z|':>10}",
        "dim",
    )
    weights = data["weights"]
    best = max(range(len(weights)), key=lambda n: weights[n])
    yield _row("actual", weights[j], best, weights[best], data, "", "", "")
    for other in data["counterfactuals"]:
        yield _row(
            other["name"],
            other["weight"],
            other["top_key"],
            other["top_weight"],
            data,
            number(other["effective_keys"]),
            f"{other['total_variation']:.1%}",
            number(other["relative_change"]),
        )
    yield Text(
        f"{INDENT}eff. keys: exp(entropy); TV: total variation distance Σ |p´ - p| / 2", "dim"
    )


def _row(
    name: str, p: float, top: int, p_top: float, data: Data, effective: str, moved: str, apart: str
) -> Text:
    shown = f"{top} {terminal.cell(data['pieces'][top], 8).rstrip()} {terminal.weight(p_top)}"
    return Text.assemble(
        f"{INDENT}{name:<14}{terminal.weight(p):>10}  ",
        terminal.cell(shown, 22),
        f"{effective:>10}{moved:>8}{apart:>10}",
    )


TOP = 8
"""Number of keys that are listed; the weights of the others are summed."""


def ordered(data: Data) -> Sequence[int]:
    """Return the visible keys, the largest weight first; the explained key if none is visible."""
    visible = [j for j, reason in enumerate(data["masked"]) if not reason]
    return sorted(visible, key=lambda j: -abs(data["weights"][j])) or [data["key"]]


def piece_of(data: Data, j: int) -> str:
    """Return the text of token j, cut to fit a line."""
    return terminal.cell(data["pieces"][j], 16).rstrip()


BLOCKS = 10
"""Number of blocks of the online softmax that are listed."""


def scores(data: Data) -> Lines:
    """Generate the score of the explained key step by step, then a row per key for the largest
    weights.
    """
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
        shown = number(p, 8) if linear else terminal.weight(p)
        yield Text.assemble(
            ("◆" if here else " ", style("k")),
            f"{j:>5} ",
            terminal.cell(data["pieces"][j], 10),
            (values, style("s")),
            "" if linear else number(data["exps"][j], 9),
            (f"  {shown} ", "bold"),
            (terminal.bar(abs(p) / max(_largest(data), 1.0), max(room, 0)).rstrip(), style("s")),
        )
    if order[TOP:]:
        rest = sum(data["weights"][j] for j in order[TOP:])
        shown = number(rest) if linear else terminal.weight(rest)
        yield Text(
            f"{INDENT}... {plural(len(order) - TOP, 'other key')} with total weight {shown}", "dim"
        )
    yield from _masked(data)


def _largest(data: Data) -> float:
    """Return the largest absolute weight of the row."""
    return max((abs(p) for p in data["weights"]), default=0.0)


def _chain(data: Data) -> Text:
    """Return the score of the explained key, step by step, in one line."""
    links = [f"{link['name']} {number(link['value'])}" for link in data["chain"]]
    why = data["masked"][data["key"]]
    line = f"{INDENT}key {data['key']}: " + " → ".join(links) + (f" ({why})" if why else "")
    return Text(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…", style("s"))


def _products(data: Data) -> Lines:
    """Generate the products of the explained key by dim: bars, their running sum, and the
    largest ones.
    """
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
    """Return the name of a dim, with the rotary pair that it belongs to."""
    return f"d {d}, pair {pairs[d]}" if d < len(pairs) and pairs[d] >= 0 else f"d {d}"


def _masked(data: Data) -> Lines:
    """Generate how many keys are masked, for each reason."""
    reasons = [reason for reason in data["masked"] if reason]
    for reason in dict.fromkeys(reasons):
        count, first = reasons.count(reason), data["masked"].index(reason)
        keys = f"key {first}" if count == 1 else f"{plural(count, 'key')}, the first is {first}"
        yield from wrapped(f"masked: {keys}; s = -∞ and the weight is 0; reason: {reason}")


def softmax(data: Data) -> Lines:
    """Generate the parts of the softmax, one weight computed in both ways, and the same block by
    block.
    """
    total = number(data["total"])
    shared = sum(data["weights"])
    yield Text(
        f"{INDENT}m = {number(data['row_max'])},  Σ exp(s-m) = {total},  "
        f"lse = {number(data['lse'])},  Σ p = {shared:.6f}"
    )
    if data["sink"] is not None:
        yield Text(
            f"{INDENT}sink: logit {number(data['sink'])}, in the denominator only; its weight is "
            f"{terminal.weight(1 - shared)}"
        )
    j = data["key"]
    s, p = data["scores"][-1]["values"][j], terminal.weight(data["weights"][j])
    if s is not None and data["sink"] is None:
        yield Text(
            f"{INDENT}key {j}: exp({number(s)} - {number(data['row_max'])}) / {total} = "
            f"exp({number(s)} - {number(data['lse'])}) = {p}"
        )
    elif s is not None:
        yield Text(
            f"{INDENT}key {j}: exp({number(s)} - {number(data['row_max'])}) / ({total} + "
            f"exp({number(data['sink'])} - m)) = {p}"
        )
    yield from _online(data)


def _online(data: Data) -> Lines:
    """Generate the row as a fused kernel computes it, block by block."""
    blocks = data["online"]
    if len(blocks) < 2:
        return
    yield equation(data["equations"]["online"])
    yield Text(f"{INDENT}{'keys':>13} {'m':>10} {'r':>10} {'l':>10} {'|o|':>10}", "dim")
    shown = blocks if len(blocks) <= BLOCKS else [*blocks[: BLOCKS // 2], *blocks[-BLOCKS // 2 :]]
    for n, block in enumerate(shown):
        if len(blocks) > BLOCKS and n == BLOCKS // 2:
            yield Text(f"{INDENT}... {plural(len(blocks) - BLOCKS, 'more block')}", "dim")
        span = f"{block['start']}-{block['stop'] - 1}"
        yield Text(
            f"{INDENT}{span:>13} {number(block['running_max'], 10)} {number(block['rescale'], 10)} "
            f"{number(block['running_sum'], 10)} {number(norm(block['running_output']), 10)}"
        )
    if blocks[-1]["running_sum"]:
        yield Text(f"{INDENT}end: lse = m + ln l = {number(data['lse'])},  z = o / l", "dim")


MAX_LISTED = 128
"""Number of tokens up to which all tokens are listed."""
MAX_HEADS = 16
"""Number of heads whose shares are drawn."""


def tokens(data: Data) -> Lines:
    """Generate the keys with their indices and weights; of a long text, only those near the
    query and the key.
    """
    line, before = Text(INDENT), -1
    own = data["query"] if data["row_pieces"] == data["pieces"] else -1
    for j in _shown(data, own):
        masked, here, key = bool(data["masked"][j]), j == own, j == data["key"]
        mark = (
            "▶" if here else "◆" if key else terminal.shade(None if masked else data["weights"][j])
        )
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
            (f"… {j - before - 1} more …  " if j > before + 1 else "", "dim"),
            (f"{j}", "dim"),
            (mark, style("q" if here else "k" if key else "s")),
            (piece_of(data, j), role),
            "  ",
        )
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
            (terminal.cell(data["query_piece"], 16).rstrip(), style("q", bold=True)),
        )
    yield Text(f"{INDENT}▶ query, ◆ key", "dim")
    yield legend("weight:")


def _shown(data: Data, query: int) -> Sequence[int]:
    """Return the keys that are listed: all of a short text, else the first ones, those near the
    query and the key, and those with the largest weights.
    """
    n = len(data["pieces"])
    if n <= MAX_LISTED:
        return range(n)
    neighbourhoods = [
        range(center - 5, center + 6)
        for center in (data["key"], query if query >= 0 else data["key"])
    ]
    chosen = {j for group in neighbourhoods for j in group if 0 <= j < n} | set(range(4))
    return sorted(chosen | set(ordered(data)[:TOP]))


def hidden(data: Data) -> Lines:
    """Generate the hidden state of the query: embedded, entering the layer, and normed."""
    for name, title in (
        ("embedding", "embedding of the token"),
        ("entering", f"h: input of layer {data['layer']}"),
        ("normed", "x: input of attention"),
    ):
        if data[name]:
            yield from strip(title, data[name], "")


def projected(data: Data) -> Lines:
    """Generate q of the query, and k and v of the explained key, after each step of their
    computation.
    """
    j = data["key"]
    named = f"{j} {piece_of(data, j)}"
    for step in data["q"]:
        yield from strip(f"q, {step['name']}", step["values"], "q")
    for step in data["k"]:
        yield from strip(f"k of {named}, {step['name']}", step["values"][j], "k")
    for step in data["values"]:
        yield from strip(f"v of {named}, {step['name']}", step["values"][j], "v")
    for step in (*data["q"], *data["k"]):
        if step["name"] not in ("projected", "rotated", "input"):
            yield equation(f"{step['name']}: {step['equation']}")
    angles = data["angle"]
    if angles:
        position, shown = data["query_position"], ", ".join(number(a) for a in angles[:5])
        yield equation(data["equations"]["rotate"])
        yield Text(
            f"{INDENT}{plural(len(angles), 'rotary pair')}, layout {data['layout']}; "
            f"angles of the query at position {position}:"
        )
        yield Text(f"{INDENT}φ = {shown} ... {number(angles[-1])} rad")


def mix(data: Data) -> Lines:
    """Generate the keys that contribute most to the output, by the norm of p v."""
    rows = data["contributions"]
    sizes = [norm(row) for row in rows]
    order = [j for j in sorted(range(len(sizes)), key=lambda j: -sizes[j]) if sizes[j] > 0]
    top = max((abs(x) for row in rows for x in row), default=0.0)
    for j in order[:3]:
        p = (
            number(data["weights"][j])
            if data["kind"] == "linear"
            else terminal.weight(data["weights"][j])
        )
        yield from strip(f"{p} v of {j} {piece_of(data, j)}", rows[j], "v", top)
    if order[3:]:
        rest = norm([sum(rows[j][d] for j in order[3:]) for d in range(len(rows[0]))])
        yield Text(
            f"{INDENT}... {plural(len(order) - 3, 'other key')}: "
            f"together a vector of norm {number(rest)}",
            "dim",
        )
    mixed, z = data["mixed"], data["z"]
    yield from strip("z: the weighted sum", mixed, "z", max(top, max(map(abs, mixed), default=0.0)))
    if len(mixed) != len(z) or norm([a - b for a, b in zip(mixed, z, strict=True)]) > 1e-4 * (
        norm(z) or 1.0
    ):
        yield from strip("z after a gate, norm, map or combination", z, "z")


def output(data: Data) -> Lines:
    """Generate the contribution of each head to the output, and the sums."""
    largest, count, E = max(map(abs, data["shares"])) or 1.0, len(data["shares"]), len(data["z"])
    yield Text(
        f"{INDENT}joined: {plural(count, 'head')} x {E} = {plural(count * E, 'value')}; "
        "share of each in out:"
    )
    slot = data["head"] % count
    for h, share in enumerate(data["shares"]):
        if count > MAX_HEADS and h not in _large(data["shares"], slot):
            continue
        here = h == slot
        bar = terminal.bar(abs(share) / largest, 44).rstrip()
        line = f"{INDENT}{'▶' if here else ' '} head {h:>2}  {share:>+8.1%}  {bar}"
        yield Text(line, style("z", bold=here) if here else "")
    yield from strip("W_O z: added by this head", data["head_out"], "z")
    yield from strip("out: output of attention", data["out"], "z")
    if data["residual"]:
        size = norm(data["out"]) / (norm(data["entering"]) or 1.0)
        yield from strip("h: hidden state after it", data["residual"], "")
        yield Text(f"{INDENT}|out| / |h before attention| = {number(size)}", "dim")


def _large(shares: Sequence[float], slot: int) -> set[int]:
    """Return the heads that are listed if there are many: the largest shares, and the explained
    head.
    """
    order = sorted(range(len(shares)), key=lambda h: -abs(shares[h]))
    return {slot, *order[: MAX_HEADS - 1]}


def pattern(data: Data) -> Lines:
    """Generate the pattern of the head, and small patterns of all heads of the layer."""
    yield from large_pattern(data)
    yield legend("weight:")
    yield from small_patterns(data)


def predictions(data: Data) -> Lines:
    """Generate the most likely next tokens."""
    for guess in data["predictions"]:
        p = guess["probability"]
        yield Text.assemble(
            f"{INDENT}{terminal.cell(guess['piece'], 16)} {p:>7.2%}  ",
            (terminal.bar(p, 48).rstrip(), style("z")),
        )


def show(data: Data, console: Console) -> None:
    """Print the page on a rich console.

    >>> from io import StringIO
    >>> show({}, Console(file=StringIO()))
    Traceback (most recent call last):
    KeyError: 'sizes'
    """
    for line in page(data):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def page(data: Data) -> list[Text]:
    """Return the lines of the page; none is wider than 80 cells."""
    lines = list(_title(data))
    for i, (title, name, draw) in enumerate(_steps(data), 1):
        lines += [Text(), heading(f"{i} {title}")]
        if name:
            lines.append(equation(data["equations"][name]))
        lines += draw(data)
    lines += [Text(), *_check(data)]
    for line in lines:
        line.rstrip()
    return lines


def _steps(data: Data) -> list[tuple[str, str, Callable[[Data], Lines]]]:
    """Return the sections of the page for this mechanism: title, name of the equation, and
    generator.
    """
    kind = data["kind"]
    score = {"softmax": "scaled", "additive": "additive", "linear": "effective"}[kind]
    steps: list[tuple[str, str, Callable[[Data], Lines]]] = [("tokens", "tokens", tokens)]
    if data["normed"]:
        steps.append(("hidden state", "hidden", hidden))
    steps += [
        ("query, key, value", "project", projected),
        ("scores", score, scores),
    ]
    if kind == "linear":
        steps.append(("state" if data["state"] else "no softmax", "", state))
    else:
        steps.append(("softmax", "softmax", softmax))
    steps.append(("weighted values", "mix", mix))
    if data["mixture"]:
        steps.append(("a mix of patterns", "", mixture))
    if data["out"]:
        steps.append(("heads joined, output projection", "output", output))
    if data["patterns"]:
        steps.append(("the whole pattern", "pattern", pattern))
    if data["predictions"]:
        steps.append(("next token", "predict", predictions))
    if data["tensors"]:
        steps.append(("the layer's tensors", "", tensors))
    if data["cost"]:
        steps.append(("cost", "cost", cost))
    if data["counterfactuals"]:
        steps.append(
            ("the same q and k under other mechanisms", "counterfactuals", counterfactuals)
        )
    return steps


def show_heads(
    query: str,
    rows: Sequence[Mapping[str, Any]],
    chosen: tuple[int, int],
    console: Console,
    lang: str = "en",
) -> None:
    """Print one row per head: the key with the largest weight, and that weight; the chosen head is
    marked.

    Args:
        query: name of the query.
        rows: {"layer", "head", "key", "piece", "weight"} of each head.
        chosen: (layer, head).
        console: where to print.
        lang: language of the headings, "en" or "zh".

    >>> row = {"layer": 0, "head": 0, "key": 1, "piece": "b", "weight": 1}
    >>> show_heads("1 b", [row], (0, 0), Console(width=80))
    Largest weight of query 1 b in each head, leaving out the first token
      layer head  weight                           key token
    ▶     0    0  1.0000 ████████████████████████    1 b
    """
    say = Sentences(lang)
    lines = [
        Text(say("heads.title", query=terminal.cell(query, 20).rstrip())),
        Text(say("heads.columns"), "dim"),
    ]
    for row in rows:
        here = (row["layer"], row["head"]) == chosen
        lines.append(
            Text.assemble(
                ("▶ " if here else "  ", style("q")),
                f"{row['layer']:>5} {row['head']:>4}  ",
                f"{terminal.weight(row['weight'])} ",
                (terminal.bar(row["weight"], 24), style("s")),
                f" {row['key']:>4} ",
                terminal.cell(row["piece"], 16).rstrip(),
                style="bold" if here else "",
            )
        )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def _title(data: Data) -> Lines:
    """Generate the first lines of the page: model, head, query, key and notes."""
    n, i = data["sizes"], data["query"]
    yield Text.assemble(
        ("regard explain", "bold"),
        f"  {terminal.cell(data['model'], 24).rstrip()}: {plural(n['layers'], 'layer')}, "
        f"H {n['H']}, G {n['G']}, D {n['D']}",
    )
    yield Text.assemble(
        "layer ",
        (f"{data['layer']}", "bold"),
        ", head ",
        (f"{data['head']}", "bold"),
        f" (reads key/value head {data['group']}), query token ",
        (f"{i} ", "bold"),
        (terminal.cell(data["query_piece"], 12).rstrip(), style("q", bold=True)),
        f", position {data['query_position']}",
    )
    j = data["key"]
    yield Text.assemble(
        "key ",
        (f"{j} ", "bold"),
        (terminal.cell(data["pieces"][j], 12).rstrip(), style("k", bold=True)),
        f", position {data['positions'][j]}; {terminal.cell(data['place'], 28).rstrip()}: "
        f"{terminal.cell(data['mechanism'], 18).rstrip()}",
    )
    yield from wrapped(_ran(data))
    for name in ("chosen_by", "key_chosen_by"):
        if data[name]:
            yield from wrapped(f"{'chosen' if name == 'chosen_by' else 'key chosen'}: {data[name]}")
    for note in data["notes"]:
        yield from wrapped(f"note: {note}")


def _ran(data: Data) -> str:
    """Describe the run in one sentence: kernel, dtype, and numbers of queries and keys."""
    n, calls = data["sizes"], data["calls"]
    own = f"kernel {data['kernel']}" if data["kind"] == "softmax" else "no softmax kernel"
    text = (
        f"one pass (prefill), {own}, {data['dtype']}, {plural(n['T'], 'query')}, {n['S']} "
        f"{data['key_kind']}; rows are queries, columns are keys"
    )
    if len(calls) > 1:
        text += f"; call {calls[data['call']]!r} of {', '.join(calls)}"
    return text


def _check(data: Data) -> Lines:
    """Generate the differences between recomputed numbers and those of the model."""
    yield heading("check")
    worst = max(data["checks"], key=lambda name: data["checks"][name])
    yield from wrapped(
        f"{plural(len(data['checks']), 'number')} recomputed and compared with the model; "
        f"the largest difference is {data['check']:.1e} ({worst})"
    )
    for name, off in data["checks"].items():
        yield Text(f"{'  '}{off:>8.1e}  {name}", "dim")
