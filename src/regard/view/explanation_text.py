"""The terminal page of an explanation, and the table of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.language import PLACEHOLDER, translate, translate_count
from regard.text_table import line_width, wrap
from regard.view import terminal
from regard.view.explanation_sections import (
    cost,
    counterfactuals,
    hidden,
    mix,
    mixture,
    output,
    pattern,
    predictions,
    projected,
    scores,
    sentence,
    softmax,
    state,
    tensors,
    tokens,
)
from regard.view.explanation_sentences import Sentences
from regard.view.terminal import (
    INDENT,
    Data,
    Lines,
    equation,
    heading,
    style,
    wrapped,
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
            lines.append(equation(translate(data["equations"][name])))
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
    steps: list[tuple[str, str, Callable[[Data], Lines]]] = [
        (translate("tokens"), "tokens", tokens)
    ]
    if data["normed"]:
        steps.append((translate("hidden state"), "hidden", hidden))
    steps += [
        (translate("query, key, value"), "", projected),
        (translate("scores"), score, scores),
    ]
    if kind == "linear":
        steps.append((translate("state") if data["state"] else translate("no softmax"), "", state))
    else:
        steps.append((translate("softmax"), "softmax", softmax))
    steps.append((translate("weighted values"), "mix", mix))
    if data["mixture"]:
        steps.append((translate("a mix of patterns"), "", mixture))
    if data["out"]:
        steps.append((translate("heads joined, output projection"), "output", output))
    if data["patterns"]:
        steps.append((translate("the whole pattern"), "pattern", pattern))
    if data["predictions"]:
        steps.append((translate("next token"), "predict", predictions))
    if data["tensors"]:
        steps.append((translate("the layer's tensors"), "", tensors))
    if data["cost"]:
        steps.append((translate("cost"), "cost", cost))
    if data["counterfactuals"]:
        steps.append(
            (
                translate("the same q and k under other mechanisms"),
                "counterfactuals",
                counterfactuals,
            )
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

    >>> row = {"layer": 0, "head": 0, "key": 1, "piece": "b", "weight": 1}
    >>> show_heads("1 b", [row], (0, 0), Console(width=80))
    Largest weight of query 1 b in each head, leaving out the first token
      layer head  weight                           key token
    ▶     0    0  1.0000 ████████████████████████    1 b
    """
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
    layers = translate_count(n["layers"], "layer")
    yield Text.assemble(
        ("regard explain", "bold"),
        f"  {terminal.cell(data['model'], 24).rstrip()}: {layers}, "
        f"H {n['H']}, G {n['G']}, D {n['D']}",
    )
    query = terminal.cell(data["query_piece"], 12).rstrip()
    yield translate_styled(
        "layer {layer}, head {head} (reads key/value head {group}), query token {i} {query}, "
        "position {position}",
        layer=Text(f"{data['layer']}", "bold"),
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
        rule = sentence("rule", data["chosen_by"])
        yield from wrapped(translate("chosen: {rule}", rule=rule))
    if data["key_chosen_by"]:
        rule = translate(data["key_chosen_by"])
        yield from wrapped(translate("key chosen: {rule}", rule=rule))
    for note in data["notes"]:
        yield from wrapped(translate("note: {note}", note=sentence("note", note)))


def translate_styled(text: str, /, **values: Text) -> Text:
    """Return a text in the reader's language, with styled texts in place of its placeholders.

    >>> translate_styled("kernel {name}", name=Text("tiled")).plain
    'kernel tiled'
    """
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
    yield from wrapped(
        translate(
            "{numbers} recomputed and compared with the model; the largest difference is "
            "{difference} ({name})",
            numbers=translate_count(len(data["checks"]), "number"),
            difference=f"{data['check']:.1e}",
            name=translate(worst),
        )
    )
    for name, off in data["checks"].items():
        yield Text(f"{INDENT}{off:>8.1e}  {translate(name)}", "dim")
