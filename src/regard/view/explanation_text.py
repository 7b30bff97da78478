"""The terminal page of an explanation, section by section, and the table of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from regard.language import PLACEHOLDER, language, translate, translate_count
from regard.text_table import line_width, wrap
from regard.view import terminal
from regard.view.terminal import (
    INDENT,
    WIDTH,
    Data,
    Lines,
    Sentences,
    equation,
    heading,
    indented,
    is_of_recording,
    large_pattern,
    legend,
    norm,
    number,
    prose,
    right,
    small_patterns,
    strip,
    style,
    wrapped,
)


def mixture(data: Data) -> Lines:
    """Generate the patterns that are combined in the head, and their factors."""
    mix = data["mixture"]
    yield from wrapped(translate(mix["text"]))
    heads = right(translate("factor"), 10) + right(translate("its row sums to"), 18)
    yield Text(INDENT + terminal.cell(translate("pattern"), 16) + heads, "dim")
    for term in mix["terms"]:
        mark = "▶" if term["is_explained"] else " "
        yield Text(
            f"{mark} {term['name']:<16}{number(term['factor'], 10)}{number(term['row_sum'], 18)}"
        )
    if mix["row"] is not None:
        total = number(sum(mix["row"]))
        yield indented("together: the row sums to {total}", total=total)
        for j in sorted(range(len(mix["row"])), key=lambda j: -abs(mix["row"][j]))[:4]:
            yield Text(f"{INDENT}{j:>6} {number(mix['row'][j], 10)}", "dim")


def state(data: Data) -> Lines:
    """Describe a row without a softmax: the sum of its weights, and the state it reads."""
    s = data["state"]
    row = [p for p, why in zip(data["weights"], data["masked"], strict=True) if not why]
    yield from prose(
        "no softmax: the weights of the row are not normalized; they sum to {total}, and {n} "
        "of {all} are negative",
        total=number(sum(row)),
        n=sum(p < 0 for p in row),
        all=len(row),
    )
    if not s:
        return
    shape = " x ".join(map(str, s["shape"]))
    yield indented(
        "state S of the head: {shape}, {values}, {bytes} at any sequence length",
        shape=shape,
        values=translate_count(s["num_values"], "value"),
        bytes=translate_count(s["bytes"], "byte"),
    )
    yield indented(
        "|S| {before} → {after} with this token;  effective rank {rank} of {most}",
        before=number(s["norm_before"]),
        after=number(s["norm"]),
        rank=number(s["rank"]),
        most=min(s["shape"]),
    )
    for n, values in enumerate(s["matrix"][:3]):
        yield from strip(translate("S, row {n}", n=n), values, "s")


def tensors(data: Data) -> Lines:
    """Generate each stage of the whole layer: shape, mean, deviation, and time."""
    left = f"{terminal.cell(translate('stage'), 8)}  {terminal.cell(translate('shape'), 18)}"
    names = (right(name, 10) for name in (translate("mean"), translate("std"), "ms"))
    yield Text(INDENT + left + "".join(names), "dim")
    for one in data["tensors"]:
        shape = " x ".join(map(str, one["shape"]))
        ms = "" if one["seconds"] is None else number(1e3 * one["seconds"], 10)
        yield Text(
            f"{INDENT}{one['name']:<8}  "
            f"{shape:<18}{number(one['mean'], 10)}{number(one['std'], 10)}{ms}"
        )
    if any(one["seconds"] is not None for one in data["tensors"]):
        yield from prose(
            "means and deviations leave out masked scores; a time is the shortest of five runs "
            "of that stage alone; scores are computed from the definition"
        )


def cost(data: Data) -> Lines:
    """Generate FLOPs and bytes of the row, and the sizes of caches for the layer."""
    c = data["cost"]
    yield from prose(
        "this row: {keys}; {flops} FLOPs for scores and weighted sum; {bytes} bytes read and "
        "written",
        keys=translate_count(c["keys"], "key"),
        flops=f"{c['flops']:,}",
        bytes=f"{c['bytes']:,}",
    )
    if c["layer_flops"]:
        yield from prose(
            "the layer, for one decoded token: {flops} FLOPs = {formula}",
            flops=f"{c['layer_flops']:,}",
            formula=c["formula"],
        )
    largest = max(cache["bytes"] for cache in c["caches"]) or 1
    tokens = translate_count(data["sizes"]["S"], "token")
    yield indented("cache of {tokens}, {dtype}", "dim", tokens=tokens, dtype=data["dtype"])
    for cache in c["caches"]:
        name = "▶ " if cache["is_this_layer"] else "  "
        name += terminal.cell(translate(cache["name"]), 14)
        figures = f"{cache['values_per_token']:>7,} x {cache['tokens']:<7,}{cache['bytes']:>13,} B "
        room = WIDTH - cell_len(name) - len(figures) - 1
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
    heads = right(translate("p of {j}", j=j), 24), terminal.cell(translate("strongest key"), 22)
    figures = right(translate("eff. keys"), 10) + right("TV", 8) + right("|Δz|/|z|", 10)
    yield Text(INDENT + "  ".join(heads) + figures, "dim")
    weights = data["weights"]
    best = max(range(len(weights)), key=lambda n: weights[n])
    yield _row(translate("actual"), weights[j], best, weights[best], data, "", "", "")
    for other in data["counterfactuals"]:
        yield _row(
            translate(other["name"]),
            other["weight"],
            other["top_key"],
            other["top_weight"],
            data,
            number(other["effective_keys"]),
            f"{other['total_variation']:.1%}",
            number(other["relative_change"]),
        )
    yield indented("eff. keys: exp(entropy); TV: total variation distance Σ |p´ - p| / 2", "dim")


def _row(
    name: str, p: float, top: int, p_top: float, data: Data, effective: str, moved: str, apart: str
) -> Text:
    shown = f"{top} {terminal.cell(data['pieces'][top], 8).rstrip()} {terminal.weight(p_top)}"
    return Text.assemble(
        f"{INDENT}{terminal.cell(name, 14)}{terminal.weight(p):>10}  ",
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
    """Generate the explained key's score step by step, then the keys of largest weight."""
    order = ordered(data)
    name = "additive" if data["kind"] == "additive" else "dot"
    yield equation(translate(data["equations"][name]))
    for link in data["chain"]:
        if link["name"] not in ("dot", "scaled", "additive", "masked", "effective"):
            yield equation(sentence("equation", link["equation"]))
    yield from _products(data)
    yield _chain(data)
    linear = data["kind"] == "linear"
    steps = data["scores"] if linear else data["scores"][:-1]
    last = "" if linear else " exp(s-m)"
    names = "".join(right(_link(step["name"])[:9], 10) for step in steps)
    left = f"{right(translate('key'), 6)} {terminal.cell(translate('token'), 10)}"
    yield Text(f"{left}{names}{last}  {'a_ij' if linear else translate('weight')}", "dim")
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
        keys = translate_count(len(order) - TOP, "other key")
        yield indented("... {keys} with total weight {total}", "dim", keys=keys, total=shown)
    yield from _masked(data)


def _largest(data: Data) -> float:
    """Return the largest absolute weight of the row."""
    return max((abs(p) for p in data["weights"]), default=0.0)


def _chain(data: Data) -> Text:
    """Return the score of the explained key, step by step, in one line."""
    links = [f"{_link(link['name'])} {terminal.score(link['value'])}" for link in data["chain"]]
    why = sentence("why", data["masked"][data["key"]])
    line = f"{INDENT}{_key(data['key'])}" + " → ".join(links) + (f" ({why})" if why else "")
    return Text(terminal.cell(line, WIDTH).rstrip(), style("s"))


def _key(j: int) -> str:
    """Return the beginning of a line about a key."""
    return translate("key {j}: ", j=j)


def _link(name: str) -> str:
    """Return the name of a step of a score in the reader's language."""
    return name if language() == "en" else Sentences(language()).named("link", name)


def sentence(group: str, english: str) -> str:
    """Return a sentence of an explanation in the reader's language."""
    return Sentences(language()).translated(group, english) if english else ""


def _products(data: Data) -> Lines:
    """Generate the products of the explained key by dim, their running sum, and the largest."""
    products, j = data["products"], data["key"]
    running, total = [], 0.0
    for x in products:
        total += x
        running.append(total)
    yield from strip(translate("products of key {j}, by dim", j=j), products, "s")
    yield from strip(translate("their running sum"), running, "s")
    largest = sorted(range(len(products)), key=lambda d: -abs(products[d]))[:3]
    rest = total - sum(products[d] for d in largest)
    pairs = data["pairs"]
    named = [f"{number(products[d])} ({_dim(d, pairs)})" for d in largest]
    count = translate("{n} others", n=len(products) - len(largest))
    sums = f"{' + '.join(named)} + {number(rest)} ({count}) = {number(total)}"
    yield from wrapped(_key(j) + sums)


def _dim(d: int, pairs: Sequence[int]) -> str:
    """Return the name of a dim, with the rotary pair that it belongs to."""
    if d < len(pairs) and pairs[d] >= 0:
        return translate("d {d}, pair {pair}", d=d, pair=pairs[d])
    return f"d {d}"


def _masked(data: Data) -> Lines:
    """Generate how many keys are masked, for each reason."""
    reasons = [reason for reason in data["masked"] if reason]
    for reason in dict.fromkeys(reasons):
        count, first = reasons.count(reason), data["masked"].index(reason)
        keys = translate("key {first}", first=first)
        if count > 1:
            many = translate_count(count, "key")
            keys = translate("{keys}, the first is {first}", keys=many, first=first)
        yield from prose(
            "masked: {keys}; s = -∞ and the weight is 0; reason: {reason}",
            keys=keys,
            reason=sentence("why", reason),
        )


def softmax(data: Data) -> Lines:
    """Generate the parts of the softmax, one weight in both ways, and block by block."""
    top, total = terminal.score(data["row_max"]), terminal.score(data["total"])
    shared = sum(data["weights"])
    yield Text(
        f"{INDENT}m = {top},  Σ exp(s-m) = {total},  "
        f"lse = {terminal.score(data['lse'])},  Σ p = {shared:.6f}"
    )
    if data["sink"] is not None:
        yield indented(
            "sink: logit {logit}, in the denominator only; its weight is {weight}",
            logit=number(data["sink"]),
            weight=terminal.weight(1 - shared),
        )
    j, s = data["key"], data["scores"][-1]["values"][data["key"]]
    if s is not None:
        shown, p = terminal.score(s), terminal.weight(data["weights"][j])
        share = (
            f"{total} = exp({shown} - {terminal.score(data['lse'])})"
            if data["sink"] is None
            else f"({total} + exp({terminal.score(data['sink'])} - m))"
        )
        yield Text(f"{INDENT}{_key(j)}exp({shown} - {top}) / {share} = {p}")
    yield from _online(data)


def _online(data: Data) -> Lines:
    """Generate the row as a fused kernel computes it, block by block."""
    blocks = data["online"]
    if len(blocks) < 2:
        return
    yield equation(data["equations"]["online"])
    heads = f"{right(translate('keys'), 13)} {'m':>10} {'r':>10} {'l':>10} {'|o|':>10}"
    yield Text(INDENT + heads, "dim")
    shown = blocks if len(blocks) <= BLOCKS else [*blocks[: BLOCKS // 2], *blocks[-BLOCKS // 2 :]]
    for n, block in enumerate(shown):
        if len(blocks) > BLOCKS and n == BLOCKS // 2:
            more = translate_count(len(blocks) - BLOCKS, "more block")
            yield Text(f"{INDENT}... {more}", "dim")
        span = f"{block['start']}-{block['stop'] - 1}"
        yield Text(
            f"{INDENT}{span:>13} {number(block['running_max'], 10)} {number(block['rescale'], 10)} "
            f"{number(block['running_sum'], 10)} {number(norm(block['running_output']), 10)}"
        )
    if blocks[-1]["running_sum"]:
        yield indented("end: lse = m + ln l = {lse},  z = o / l", "dim", lse=number(data["lse"]))


MAX_LISTED = 128
"""Number of tokens up to which all tokens are listed."""
MAX_HEADS = 16
"""Number of heads whose shares are drawn."""


def tokens(data: Data) -> Lines:
    """Generate the keys and weights; of a long text, those near the query and the key."""
    line, before = Text(INDENT), -1
    own = data["query"] if data["row_pieces"] == data["pieces"] else -1
    for j in _shown(data, own):
        masked, here, key = bool(data["masked"][j]), j == own, j == data["key"]
        mark = (
            "▶" if here else "◆" if key else terminal.shade(None if masked else data["weights"][j])
        )
        role = style("q" if here else "k", bold=True) if here or key else "dim" if masked else ""
        token = Text.assemble(
            (_more(j - before - 1) + ("  " if j > before + 1 else ""), "dim"),
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
    yield line.append(_more(rest), "dim")
    if own < 0:
        yield Text.assemble(
            INDENT,
            translate("query "),
            (f"{data['query']} ", "dim"),
            (terminal.cell(data["query_piece"], 16).rstrip(), style("q", bold=True)),
        )
    yield indented("▶ query, ◆ key", "dim")
    yield legend(translate("weight:"))


def _more(n: int) -> str:
    """Return how many tokens are left out; nothing for none."""
    return translate("… {n} more …", n=n) if n else ""


def _shown(data: Data, query: int) -> Sequence[int]:
    """Return the listed keys: all of a short text, else the first, near and largest ones."""
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
        ("embedding", translate("embedding of the token")),
        ("entering", translate("h: input of layer {n}", n=data["layer"])),
        ("normed", translate("x: input of attention")),
    ):
        if data[name]:
            yield from strip(title, data[name], "")


def projected(data: Data) -> Lines:
    """Generate q of the query, and k and v of the key, after each step."""
    j = data["key"]
    named = f"{j} {piece_of(data, j)}"
    for steps in (data["q"], data["k"], data["values"]):
        for step in steps:
            yield equation(sentence("equation", step["equation"]))
    for step in data["q"]:
        yield from strip(f"q, {translate(step['name'])}", step["values"], "q")
    for step in data["k"]:
        title = translate("k of {key}, {step}", key=named, step=translate(step["name"]))
        yield from strip(title, step["values"][j], "k")
    for step in data["values"]:
        title = translate("v of {key}, {step}", key=named, step=translate(step["name"]))
        yield from strip(title, step["values"][j], "v")
    angles = data["angle"]
    if angles:
        position, shown = data["query_position"], ", ".join(number(a) for a in angles[:5])
        yield equation(translate(data["equations"]["rotate"]))
        yield indented(
            "{pairs}, layout {layout}; angles of the query at position {position}:",
            pairs=translate_count(len(angles), "rotary pair"),
            layout=data["layout"],
            position=position,
        )
        yield Text(f"{INDENT}φ = {shown} ... {number(angles[-1])} rad")


def mix(data: Data) -> Lines:
    """Generate the keys that contribute most to the output, by the norm of p v."""
    rows = data["contributions"]
    sizes = [norm(row) for row in rows]
    order = [j for j in sorted(range(len(sizes)), key=lambda j: -sizes[j]) if sizes[j] > 0]
    top = max((abs(x) for row in rows for x in row), default=0.0)
    for j in order[:3]:
        p = (number if data["kind"] == "linear" else terminal.weight)(data["weights"][j])
        title = translate("{p} v of {key}", p=p, key=f"{j} {piece_of(data, j)}")
        yield from strip(title, rows[j], "v", top)
    if order[3:]:
        rest = number(norm([sum(rows[j][d] for j in order[3:]) for d in range(len(rows[0]))]))
        keys = translate_count(len(order) - 3, "other key")
        yield indented("... {keys}: together a vector of norm {norm}", "dim", keys=keys, norm=rest)
    mixed, z = data["mixed"], data["z"]
    full = max(top, max(map(abs, mixed), default=0.0))
    yield from strip(translate("z: the weighted sum"), mixed, "z", full)
    if len(mixed) != len(z) or norm([a - b for a, b in zip(mixed, z, strict=True)]) > 1e-4 * (
        norm(z) or 1.0
    ):
        yield from strip(translate("z after a gate, norm, map or combination"), z, "z")


def output(data: Data) -> Lines:
    """Generate the contribution of each head to the output, and the sums."""
    largest, count, E = max(map(abs, data["shares"])) or 1.0, len(data["shares"]), len(data["z"])
    yield indented(
        "joined: {heads} x {size} = {values}; share of each in out:",
        heads=translate_count(count, "head"),
        size=E,
        values=translate_count(count * E, "value"),
    )
    slot = data["head"] % count
    for h, share in enumerate(data["shares"]):
        if count > MAX_HEADS and h not in _large(data["shares"], slot):
            continue
        here = h == slot
        bar = terminal.bar(abs(share) / largest, 44).rstrip()
        name = translate("head {n}", n=f"{h:>2}")
        line = f"{'▶' if here else ' '} {name}  {share:>+8.1%}  {bar}"
        yield Text(INDENT + line, style("z", bold=here) if here else "")
    yield from strip(translate("W_O z: added by this head"), data["head_out"], "z")
    yield from strip(translate("out: output of attention"), data["out"], "z")
    if data["residual"]:
        size = norm(data["out"]) / (norm(data["entering"]) or 1.0)
        yield from strip(translate("h: hidden state after it"), data["residual"], "")
        yield indented("|out| / |h before attention| = {size}", "dim", size=number(size))


def _large(shares: Sequence[float], slot: int) -> set[int]:
    """Return the heads that are listed: the largest shares, and the explained head."""
    order = sorted(range(len(shares)), key=lambda h: -abs(shares[h]))
    return {slot, *order[: MAX_HEADS - 1]}


def pattern(data: Data) -> Lines:
    """Generate the pattern of the head, and small patterns of all heads of the layer."""
    yield from large_pattern(data)
    yield legend(translate("weight:"))
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
    """Print the page on a rich console."""
    for line in page(data):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def page(data: Data) -> list[Text]:
    """Return the lines of the page; none is wider than 80 cells."""
    lines = list(_title(data))
    for i, (title, name, draw) in enumerate(_steps(data), 1):
        lines += [Text(), heading(f"{i} {title}")]
        if name:
            lines.append(equation(translate(data["equations"][name])))
        lines += draw(data)
    lines += [Text(), *_check(data)]
    for line in lines:
        line.rstrip()
    return lines


def _steps(data: Data) -> list[tuple[str, str, Callable[[Data], Lines]]]:
    """Return the sections that apply: title, name of the equation, and generator."""
    kind = data["kind"]
    score = {"softmax": "scaled", "additive": "additive", "linear": "effective"}[kind]
    linear = kind == "linear"
    steps: list[tuple[object, str, str, Callable[[Data], Lines]]] = [
        (True, translate("tokens"), "tokens", tokens),
        (data["normed"], translate("hidden state"), "hidden", hidden),
        (True, translate("query, key, value"), "", projected),
        (True, translate("scores"), score, scores),
        (linear, translate("state" if data["state"] else "no softmax"), "", state),
        (not linear, translate("softmax"), "softmax", softmax),
        (True, translate("weighted values"), "mix", mix),
        (data["mixture"], translate("a mix of patterns"), "", mixture),
        (data["out"], translate("heads joined, output projection"), "output", output),
        (data["patterns"], translate("the whole pattern"), "pattern", pattern),
        (data["predictions"], translate("next token"), "predict", predictions),
        (data["tensors"], translate("the layer's tensors"), "", tensors),
        (data["cost"], translate("cost"), "cost", cost),
        (
            data["counterfactuals"],
            translate("the same q and k under other mechanisms"),
            "counterfactuals",
            counterfactuals,
        ),
    ]
    return [(title, name, draw) for applies, title, name, draw in steps if applies]


def show_heads(
    query: str,
    rows: Sequence[Mapping[str, Any]],
    chosen: tuple[int, int],
    console: Console,
    lang: str = "en",
) -> None:
    """Print a row per head: its strongest key and weight; the chosen head is marked."""
    say = Sentences(lang)
    title = say("heads.title", query=terminal.cell(query, 20).rstrip())
    lines = [
        *(Text(line) for line in wrap(title, line_width()).splitlines()),
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
    n, i, j = data["sizes"], data["query"], data["key"]
    layer = Text(f"{data['layer']}", "bold")
    layers = translate_count(n["layers"], "layer")
    where = translate_styled("layer {layer}", layer=layer)
    if is_of_recording(data):
        layers = translate_count(n["layers"], "recorded place")
        where = Text(terminal.cell(data["place"], 28).rstrip(), "bold")
    yield Text.assemble(
        ("regard explain", "bold"),
        f"  {terminal.cell(data['model'], 24).rstrip()}: {layers}, "
        f"H {n['H']}, G {n['G']}, D {n['D']}",
    )
    query = terminal.cell(data["query_piece"], 12).rstrip()
    yield translate_styled(
        "{where}, head {head} (reads key/value head {group}), query token {i} {query}, "
        "position {position}",
        where=where,
        head=Text(f"{data['head']}", "bold"),
        group=Text(f"{data['group']}"),
        i=Text(f"{i}", "bold"),
        query=Text(query, style("q", bold=True)),
        position=Text(f"{data['query_position']}"),
    )
    mechanism = terminal.cell(data["mechanism"], 18).rstrip()
    yield translate_styled(
        "key {j} {key}, position {position}; {place}: {mechanism}",
        j=Text(f"{j}", "bold"),
        key=Text(terminal.cell(data["pieces"][j], 12).rstrip(), style("k", bold=True)),
        position=Text(f"{data['positions'][j]}"),
        place=Text(terminal.cell(data["place"], 28).rstrip()),
        mechanism=Text(mechanism),
    )
    yield from wrapped(_ran(data))
    if data["chosen_by"]:
        yield from prose("chosen: {rule}", rule=sentence("rule", data["chosen_by"]))
    if data["key_chosen_by"]:
        yield from prose("key chosen: {rule}", rule=translate(data["key_chosen_by"]))
    for note in data["notes"]:
        yield from prose("note: {note}", note=sentence("note", note))


def translate_styled(text: str, /, **values: Text) -> Text:
    """Return a text in the reader's language, with styled texts in place of its placeholders."""
    parts = PLACEHOLDER.split(translate(text))
    return Text.assemble(*(values[part] if n % 2 else part for n, part in enumerate(parts)))


def _ran(data: Data) -> str:
    """Describe the run in one sentence: kernel, dtype, and numbers of queries and keys."""
    n, calls = data["sizes"], data["calls"]
    kernel = translate("kernel {name}", name=data["kernel"])
    text = translate(
        "one pass (prefill), {kernel}, {dtype}, {queries}, {keys} {kind}; rows are queries, "
        "columns are keys",
        kernel=kernel if data["kind"] == "softmax" else translate("no softmax kernel"),
        dtype=data["dtype"],
        queries=translate_count(n["T"], "query"),
        keys=n["S"],
        kind=translate(data["key_kind"]),
    )
    if len(calls) > 1:
        name = repr(calls[data["call"]])
        text += translate("; call {name} of {calls}", name=name, calls=", ".join(calls))
    return text


def _check(data: Data) -> Lines:
    """Generate the differences between recomputed numbers and those of the model."""
    yield heading(translate("check"))
    worst = max(data["checks"], key=lambda name: data["checks"][name])
    yield from prose(
        "{numbers} recomputed and compared with the model; the largest difference is "
        "{difference} ({name})",
        numbers=translate_count(len(data["checks"]), "number"),
        difference=f"{data['check']:.1e}",
        name=translate(worst),
    )
    for name, off in data["checks"].items():
        yield Text(f"{INDENT}{off:>8.1e}  {translate(name)}", "dim")
