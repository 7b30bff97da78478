"""The short form of an explanation: one screen that leads to one weight."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from regard.view import terminal
from regard.view.explanation_text import ordered
from regard.view.terminal import (
    INDENT,
    WIDTH,
    Data,
    Lines,
    Sentences,
    is_of_recording,
    norm,
    number,
    style,
    wrap_cells,
    wrapped,
)

KEYS = 5
"""Number of keys that are listed; the weights of the others are summed."""
SECTIONS = {
    "inputs": ("5",),
    "score": ("2", "6"),
    "mask": ("8",),
    "softmax": ("3",),
    "output": ("4", "12"),
}
"""For each step, the sections of the walkthrough that build it from a small example."""
MIN_WIDTH = 60
"""The least width in cells; in a narrower terminal the lines are broken by the terminal."""
LABEL_WIDTH = 10
"""Width in cells of the number and the name of a step."""


def show_summary(data: Data, console: Console, lang: str = "en") -> None:
    """Print the short form of an explanation.

    >>> import regard
    >>> found = regard.inspect.explain(regard.load("tiny"), "to be or not to be", layer=1, head=2)
    >>> console = Console(width=80, record=True, quiet=True)
    >>> show_summary(found.as_dict(), console)
    >>> len(console.export_text().splitlines()) <= 26
    True
    """
    for line in summary(data, lang, min(max(console.width, MIN_WIDTH), WIDTH)):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def summary(data: Data, lang: str = "en", width: int = WIDTH) -> list[Text]:
    """Return the lines of the short form; none is wider than `width` cells, of at least 60."""
    say = Sentences(lang)
    lines = [*_sentence(data, say, width), *_head(data, say, width), Text()]
    lines += [*_keys(data, say, width), Text(), *_steps(data, say, width), *_next(data, say)]
    fitting: list[Text] = []
    for line in lines:
        line.rstrip()
        fitting += [line] if line.cell_len <= width else _broken(line, width)
    return fitting


def _broken(line: Text, width: int) -> Lines:
    """Generate the parts of a styled line that is too wide; all but the first are indented."""
    start = 0
    for part in wrap_cells(line.plain, width - 2 * len(INDENT)):
        begin = line.plain.index(part, start)
        indent = line.plain[:begin] if not start else 2 * INDENT
        start = begin + len(part)
        yield Text(indent).append_text(line[begin:start])


def _sentence(data: Data, say: Sentences, width: int) -> Lines:
    """Generate the words in one or two lines, with those of the query and the key marked."""
    same = data["row_pieces"] == data["pieces"]
    line, used = Text(INDENT), 0
    words = data["words"] or [
        {"start": j, "stop": j + 1, "text": piece} for j, piece in enumerate(data["pieces"])
    ]
    for word in words:
        own = range(word["start"], word["stop"])
        query, key = same and data["query"] in own, data["key"] in own
        hidden = all(data["masked"][j] for j in own)
        role = style("q" if query else "k", bold=True) if query or key else "dim" if hidden else ""
        token = Text.assemble(
            ("▶" if query else "◆" if key else "", style("q" if query else "k")),
            (terminal.cell(word["text"], 16).rstrip(), role),
            " ",
        )
        if line.cell_len + token.cell_len > width - 2:
            yield line
            line, used = Text(INDENT), used + 1
        if used == 2:
            tokens = say.count("more_token", len(data["pieces"]) - word["start"])
            yield Text(INDENT + say("sentence.more", tokens=tokens), "dim")
            return
        line.append_text(token)
    yield line


def _named(data: Data, j: int, piece: str, say: Sentences) -> str:
    """Return the word of a token; if it is only a part of it, with the token's own text."""
    word = next((x for x in data["words"] if x["start"] <= j < x["stop"]), None)
    shown = terminal.cell(piece, 16).rstrip()
    if word is None:
        return shown
    whole = terminal.cell(word["text"], 16).rstrip()
    return whole if word["stop"] - word["start"] == 1 else say("head.part", word=whole, piece=shown)


def _head(data: Data, say: Sentences, width: int) -> Lines:
    """Generate the sentence that says which head was chosen, and what it does here."""
    n, j = data["sizes"], data["key"]
    p = data["weights"][j]
    linear = data["kind"] == "linear"
    piece = data["query_piece"]
    query = (
        _named(data, data["query"], piece, say)
        if data["row_pieces"] == data["pieces"]
        else terminal.cell(piece, 16).rstrip()
    )
    named: dict[str, str | Text] = {
        "head": Text(say("head.place_head", n=str(data["head"])), "bold"),
        "model": terminal.cell(data["model"], 20).rstrip(),
        "heads": say.count("head", n["H"]),
    }
    if is_of_recording(data):
        place = Text(terminal.cell(data["place"], width - 2).rstrip(), "bold")
        places = say.count("place", n["layers"])
        yield say.styled("head.recorded", place=place, places=places, **named)
    else:
        layer = Text(say("head.place_layer", n=str(data["layer"])), "bold")
        layers = say.count("layer", n["layers"])
        yield say.styled("head.place", layer=layer, layers=layers, **named)
    yield Text(INDENT) + say.styled(
        "head.reads",
        query=Text(f"▶ {query}", style("q", bold=True)),
        i=str(data["query"]),
        key=Text(f"◆ {_named(data, j, data['pieces'][j], say)}", style("k", bold=True)),
        j=str(j),
        share=say("head.factor", n=number(p)) if linear else say("head.share", p=f"{p:.1%}"),
    )
    if data["chosen_by"]:
        yield from wrapped(
            say("head.chosen", rule=say.translated("rule", data["chosen_by"])), width
        )
    if len(data["calls"]) > 1:
        name, calls = data["calls"][data["call"]], say("list.separator").join(data["calls"])
        yield from wrapped(say("head.call", name=repr(name), calls=calls), width)
    for note in data["notes"]:
        yield from wrapped(say("head.note", note=say.translated("note", note)), width)


def _keys(data: Data, say: Sentences, width: int) -> Lines:
    """Generate the keys with the largest weights, and the sum of the others."""
    order = ordered(data)
    linear = data["kind"] == "linear"
    piece_width = 28 if width == WIDTH else 18
    title, room = say("keys.title", n=str(KEYS)), piece_width + 17
    if cell_len(title) >= room:
        yield Text(title, "dim")
        title = ""
    columns = say("keys.factor" if linear else "keys.score_weight")
    yield Text(set_cell_size(title, room) + columns, "dim")
    for j in order[:KEYS]:
        p, s = data["weights"][j], data["scores"][-1]["values"][j]
        shown = number(p, 8) if linear else f"{number(s, 8)}    {terminal.weight(p)}"
        room = (30 if linear else 24) - (WIDTH - width) + (28 - piece_width)
        share = abs(p) / max(max((abs(x) for x in data["weights"]), default=0.0), 1.0)
        yield Text.assemble(
            ("◆" if j == data["key"] else " ", style("k")),
            f"{j:>5} ",
            terminal.cell(data["pieces"][j], piece_width),
            (f"{shown} ", "bold" if j == data["key"] else ""),
            (terminal.bar(share, room).rstrip(), style("s")),
        )
    rest, hidden = order[KEYS:], sum(bool(reason) for reason in data["masked"])
    total = sum(data["weights"][j] for j in rest)
    parts = []
    if rest:
        shown = number(total) if linear else terminal.weight(total)
        parts.append(say("keys.rest", keys=say.count("other_key", len(rest)), sum=shown))
    if hidden:
        reasons = dict.fromkeys(say.translated("why", why) for why in data["masked"] if why)
        listed = say("list.separator").join(reasons)
        parts.append(say("keys.hidden", keys=say.count("key", hidden), reasons=listed))
    if parts:
        yield Text(INDENT + say("keys.separator").join(parts), "dim")


def _steps(data: Data, say: Sentences, width: int) -> Lines:
    """Generate the five steps with their numbers."""
    yield Text.assemble(
        (say("steps.title"), "bold"),
        say(
            "steps.vectors",
            p=number(data["weights"][data["key"]]),
            numbers=say.count("number", data["sizes"]["D"]),
        ),
    )
    steps = {
        "inputs": _inputs,
        "score": _score,
        "mask": _mask,
        "softmax": _softmax,
        "output": _output,
    }
    for i, (name, text) in enumerate(steps.items(), 1):
        label = set_cell_size(f"{i} {say(f'step.{name}')}", LABEL_WIDTH)
        sections = ",\N{NO-BREAK SPACE}".join(SECTIONS[name])
        lines = wrap_cells(f"{text(data, say)} [{sections}]", width - LABEL_WIDTH)
        yield Text.assemble((label, style("s", bold=True)), lines[0])
        for line in lines[1:]:
            yield Text(" " * LABEL_WIDTH + line)


def _equations(data: Data, letter: str, say: Sentences) -> str:
    """Return the equations of the steps that compute q, k or v, one after the other."""
    steps = data["values" if letter == "v" else letter]
    return say("steps.then").join(say.translated("equation", x["equation"]) for x in steps)


def _inputs(data: Data, say: Sentences) -> str:
    q, k = data["q"][-1]["values"], data["k"][-1]["values"][data["key"]]
    text = say(
        "steps.inputs",
        q=_equations(data, "q", say),
        nq=number(norm(q)),
        k=_equations(data, "k", say),
        nk=number(norm(k)),
    )
    return text + (say("steps.rotation") if data["layout"] else "")


def _has_own_rule(data: Data) -> bool:
    """Return whether the weights follow from scores by another rule than a softmax."""
    return data["kind"] == "linear" and any(x["name"] == "masked" for x in data["chain"])


def _score(data: Data, say: Sentences) -> str:
    if data["kind"] == "linear" and not _has_own_rule(data):
        return say("steps.linear_score")
    links, before = [], 0.0
    for step in data["scores"]:
        if step["name"] == "masked":
            break
        value = step["values"][data["key"]]
        if step["name"] == "dot":
            link = f"q_i · k_j = {terminal.score(value)}"
        elif step["name"] in ("scaled", "biased", "additive"):
            link = say(
                f"chain.{step['name']}",
                value=terminal.score(value),
                scale=f"{data['scale']:.9g}",
                bias=terminal.score(value - before),
            )
        else:
            link = f"{say.translated('equation', step['equation'])} = {terminal.score(value)}"
        links.append(link)
        before = value
    return say("list.then").join(links) + " = s"


def _mask(data: Data, say: Sentences) -> str:
    reason = data["masked"][data["key"]]
    if reason:
        return say("steps.hidden", reason=say.translated("why", reason))
    hidden = sum(bool(each) for each in data["masked"])
    keys = say.count("key", len(data["masked"]))
    return say("steps.visible", hidden=f"{hidden:,}", keys=keys)


def _softmax(data: Data, say: Sentences) -> str:
    p, s = data["weights"][data["key"]], data["scores"][-1]["values"][data["key"]]
    if _has_own_rule(data):
        return say("steps.rule_factor", equation=data["chain"][-1]["equation"], p=number(p))
    if data["kind"] == "linear":
        return say("steps.linear_factor", p=number(p))
    if s is None:
        return say("steps.hidden_weight")
    lse, sink = data["lse"], data["sink"]
    if sink is None:
        return say(
            "steps.softmax", s=terminal.score(s), lse=terminal.score(lse), p=terminal.weight(p)
        )
    total = terminal.score(float(np.logaddexp(lse, sink)))
    return say(
        "steps.sink",
        s=terminal.score(s),
        lse=total,
        p=terminal.weight(p),
        sink=terminal.score(sink),
    )


def _output(data: Data, say: Sentences) -> str:
    row, z = data["contributions"][data["key"]], data["mixed"]
    key = "steps.output_linear" if data["kind"] == "linear" else "steps.output"
    v = _equations(data, "v", say)
    text = say(key, v=v, z=number(norm(z)), row=number(norm(row)))
    shares = data["shares"]
    if len(shares) > data["head"]:
        text += say("steps.output_share", share=f"{shares[data['head']]:.1%}")
    return text


def _next(data: Data, say: Sentences) -> Lines:
    """Generate the check, and where to go on."""
    numbers = say.count("number", len(data["checks"]))
    checked = say("next.checked", numbers=numbers, difference=f"{data['check']:.1e}")
    yield Text(checked, "dim")
    yield Text.assemble((say("next.go_on"), "bold"), say("next.options"))
    yield Text(INDENT + say("next.choose"))
