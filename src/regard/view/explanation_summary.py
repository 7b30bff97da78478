"""The short form of an explanation: one screen with the sentence, the head, the strongest keys and
the five steps that lead to one weight.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from regard.units import plural
from regard.view import terminal
from regard.view.explanation_text import ordered, piece_of
from regard.view.terminal import INDENT, WIDTH, Data, Lines, norm, number, style, wrapped

KEYS = 5
"""Number of keys that are listed; the weights of the others are summed."""
WALKTHROUGH = "docs/walkthrough.md"
SECTIONS = {"inputs": "5", "score": "2 and 6", "mask": "8", "softmax": "3", "output": "4 and 12"}
"""For each step, the sections of the walkthrough that build it from a small example."""


def show_summary(data: Data, console: Console) -> None:
    """Print the short form of an explanation.

    Args:
        data: an explanation as plain data, from `as_dict()`.
        console: where to print.

    >>> import regard
    >>> found = regard.inspect.explain(regard.load("tiny"), "to be or not to be", layer=1, head=2)
    >>> console = Console(width=80, record=True, quiet=True)
    >>> show_summary(found.as_dict(), console)
    >>> len(console.export_text().splitlines()) <= 26
    True
    """
    for line in summary(data):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def summary(data: Data) -> list[Text]:
    """Return the lines of the short form; none is wider than 80 cells."""
    lines = [*_sentence(data), *_head(data), Text(), *_keys(data), Text()]
    lines += [*_steps(data), *_next(data)]
    for line in lines:
        line.rstrip()
    return lines


def _sentence(data: Data) -> Lines:
    """Generate the tokens in one or two lines, with the query and the key marked."""
    same = data["row_pieces"] == data["pieces"]
    line, used = Text(INDENT), 0
    for j in range(len(data["pieces"])):
        query, key = same and j == data["query"], j == data["key"]
        token = Text.assemble(
            ("▶" if query else "◆" if key else "", style("q" if query else "k")),
            (
                piece_of(data, j),
                style("q", bold=True)
                if query
                else style("k", bold=True)
                if key
                else "dim"
                if data["masked"][j]
                else "",
            ),
            " ",
        )
        if line.cell_len + token.cell_len > WIDTH - 2:
            yield line
            line, used = Text(INDENT), used + 1
        if used == 2:
            yield Text(f"{INDENT}... {plural(len(data['pieces']) - j, 'more token')}", "dim")
            return
        line.append_text(token)
    yield line


def _head(data: Data) -> Lines:
    """Generate the sentence that says which head was chosen, and what it does here."""
    n, j = data["sizes"], data["key"]
    p = data["weights"][j]
    share = f"{p:.1%} of its attention" if data["kind"] != "linear" else f"factor {number(p)}"
    query = terminal.cell(data["query_piece"], 16).rstrip()
    yield Text.assemble(
        ("Layer ", "bold"),
        (f"{data['layer']}", "bold"),
        (", head ", "bold"),
        (f"{data['head']}", "bold"),
        f" of {terminal.cell(data['model'], 20).rstrip()} "
        f"({plural(n['layers'], 'layer')} of {plural(n['H'], 'head')}): ",
    )
    yield Text.assemble(
        INDENT,
        (f"▶ {query}", style("q", bold=True)),
        f" (token {data['query']}) reads ",
        (f"◆ {piece_of(data, j)}", style("k", bold=True)),
        f" (token {j}): {share}",
    )
    if data["chosen_by"]:
        yield from wrapped(f"This is {data['chosen_by']}.")
    if len(data["calls"]) > 1:
        name = data["calls"][data["call"]]
        yield from wrapped(f"call {name!r} of {', '.join(data['calls'])}")
    for note in data["notes"]:
        yield from wrapped(f"note: {note}")


def _keys(data: Data) -> Lines:
    """Generate the keys with the largest weights, and the sum of the others."""
    order = ordered(data)
    linear = data["kind"] == "linear"
    columns = "factor a" if linear else "score s  weight p"
    yield Text(f"What this query reads most (first {KEYS}):      {columns}", "dim")
    for j in order[:KEYS]:
        p, s = data["weights"][j], data["scores"][-1]["values"][j]
        shown = number(p, 8) if linear else f"{number(s, 8)}    {terminal.weight(p)}"
        room = 30 if linear else 24
        share = abs(p) / max(max((abs(x) for x in data["weights"]), default=0.0), 1.0)
        yield Text.assemble(
            ("◆" if j == data["key"] else " ", style("k")),
            f"{j:>5} ",
            terminal.cell(data["pieces"][j], 28),
            (f"{shown} ", "bold" if j == data["key"] else ""),
            (terminal.bar(share, room).rstrip(), style("s")),
        )
    rest, hidden = order[KEYS:], sum(bool(reason) for reason in data["masked"])
    total = sum(data["weights"][j] for j in rest)
    parts = []
    if rest:
        shown = number(total) if linear else terminal.weight(total)
        parts.append(f"{plural(len(rest), 'other key')}: {shown} together")
    if hidden:
        reasons = ", ".join(dict.fromkeys(reason for reason in data["masked"] if reason))
        parts.append(f"{plural(hidden, 'key')} hidden ({reasons})")
    if parts:
        yield Text(f"{INDENT}{'; '.join(parts)}", "dim")


def _steps(data: Data) -> Lines:
    """Generate the five steps with their numbers."""
    target = number(data["weights"][data["key"]])
    yield Text.assemble(
        ("How the number is computed: ", "bold"),
        f"{target}, from vectors of {plural(data['sizes']['D'], 'number')}",
    )
    steps: tuple[tuple[str, Callable[[Data], str]], ...] = (
        ("inputs", _inputs),
        ("score", _score),
        ("mask", _mask),
        ("softmax", _softmax),
        ("output", _output),
    )
    for i, (name, text) in enumerate(steps, 1):
        words = [*text(data).split(), f"[{SECTIONS[name].replace(' ', chr(160))}]"]
        lines = [f"{i} {name:<8}"]
        for word in words:
            if cell_len(lines[-1]) + 1 + cell_len(word) > WIDTH:
                lines.append(" " * 10)
            lines[-1] += f"{'' if lines[-1].endswith(' ') else ' '}{word}"
        yield Text.assemble((lines[0][:10], style("s", bold=True)), lines[0][10:])
        yield from map(Text, lines[1:])


def _inputs(data: Data) -> str:
    q, k = data["q"][-1]["values"], data["k"][-1]["values"][data["key"]]
    return (
        "x is the state of a token, W_Q and W_K are learned: query q = W_Q x of ▶, key k = W_K x "
        f"of ◆; their lengths are {number(norm(q))} and {number(norm(k))}"
    )


def _score(data: Data) -> str:
    j = data["key"]
    if data["kind"] == "linear":
        return "no score: this mechanism weights each value by a recurrence"
    links = [f"{link['name']} {number(link['value'])}" for link in data["chain"]]
    if data["kind"] == "additive":
        return f"s = w · tanh(q + k): {' → '.join(links)}"
    first, s = data["scores"][0]["values"][j], data["scores"][-1]["values"][j]
    if [link["name"] for link in data["chain"]] == ["dot", "scaled", "masked"]:
        return f"s = q · k × scale = {number(first)} × {number(data['scale'])} = {number(s)}"
    return f"q · k, then: {' → '.join(links)}"


def _mask(data: Data) -> str:
    reason = data["masked"][data["key"]]
    if reason:
        return f"the query may not see this key ({reason}): s = -∞"
    hidden = sum(bool(each) for each in data["masked"])
    n = len(data["masked"])
    return f"this key is visible; {hidden} of {plural(n, 'key')} are hidden from the query"


def _softmax(data: Data) -> str:
    p, s = data["weights"][data["key"]], data["scores"][-1]["values"][data["key"]]
    if data["kind"] == "linear":
        return f"none: the factor of this value is {number(p)}"
    if s is None:
        return "the weight of a hidden key is 0"
    if data["sink"] is not None:
        return (
            f"p = exp(s) / (sum of exp over all visible keys and the sink) = {terminal.weight(p)}"
        )
    return (
        f"p = exp(s) / Σ exp(s) over visible keys = exp({number(s)} - {number(data['lse'])}) "
        f"= {terminal.weight(p)}"
    )


def _output(data: Data) -> str:
    row, z = data["contributions"][data["key"]], data["mixed"]
    text = (
        f"z = Σ p v over keys, value v = W_V x: of z, length {number(norm(z))}, this key gives "
        f"{number(norm(row))}"
    )
    shares = data["shares"]
    if len(shares) > data["head"]:
        text += f"; the head gives {shares[data['head']]:.1%} of the layer's output"
    return text


def _next(data: Data) -> Lines:
    """Generate the check, and where to go on."""
    yield Text(
        f"Checked: {plural(len(data['checks']), 'number')} computed again differ from the model's "
        f"by {data['check']:.1e} at most",
        "dim",
    )
    yield Text.assemble(
        ("Go on: ", "bold"),
        "--full every step; --html FILE a page with all heads; --list all heads;",
    )
    yield Text(f"{INDENT}--query --key --layer --head choose; [n]: section n of {WALKTHROUGH}")
