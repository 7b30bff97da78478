"""The terminal page of `regard explain`: each step with its equation and its numbers, in 80 columns, with or without colour.

The data is `Explanation.as_dict()`: lists, numbers and strings; None is a masked score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.view import beside, glyphs, scores, sections
from regard.view.lines import (
    Data,
    Lines,
    equation,
    heading,
    style,
    wrapped,
)


def show(data: Data, console: Console) -> None:
    """Print the page on a rich console; its colours are as many as the console's.

    >>> from io import StringIO
    >>> show({}, Console(file=StringIO()))
    Traceback (most recent call last):
    KeyError: 'sizes'
    """
    for line in page(data):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def page(data: Data) -> list[Text]:
    """The lines of the page; none is wider than 80 cells."""
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
    """What the page shows of this mechanism: title, equation, and who draws it."""
    kind = data["kind"]
    score = {"softmax": "scaled", "additive": "additive", "linear": "effective"}[kind]
    steps: list[tuple[str, str, Callable[[Data], Lines]]] = [("tokens", "tokens", sections.tokens)]
    if data["normed"]:
        steps.append(("hidden state", "hidden", sections.hidden))
    steps += [
        ("query, key, value", "project", sections.projected),
        ("scores", score, scores.scores),
    ]
    if kind == "linear":
        steps.append(("state", "", beside.state))
    else:
        steps.append(("softmax", "softmax", scores.softmax))
    steps.append(("weighted values", "mix", sections.mix))
    if data["mixture"]:
        steps.append(("a mix of patterns", "", beside.mixture))
    steps.append(("heads joined, output projection", "output", sections.output))
    if data["patterns"]:
        steps.append(("the whole pattern", "pattern", sections.pattern))
    if data["predictions"]:
        steps.append(("next token", "predict", sections.predictions))
    if data["tensors"]:
        steps.append(("the layer's tensors", "", beside.tensors))
    if data["cost"]:
        steps.append(("cost", "cost", beside.cost))
    if data["elsewhere"]:
        steps.append(("the same q and k elsewhere", "elsewhere", beside.elsewhere))
    return steps


def show_heads(
    query: str, rows: Sequence[Mapping[str, Any]], chosen: tuple[int, int], console: Console
) -> None:
    """Print a row per head: the key that it looks at hardest, and with what weight; the chosen head marked.

    Args:
        query: what the query is called.
        rows: {"layer", "head", "key", "piece", "weight"} of each head.
        chosen: (layer, head).

    >>> show_heads("1 b", [{"layer": 0, "head": 0, "key": 1, "piece": "b", "weight": 1}], (0, 0), Console(width=80))
    The hardest look of query 1 b at another token than the first, in each head
      layer head  weight                           key token
    ▶     0    0  1.0000 ████████████████████████    1 b
    """
    lines = [
        Text(
            f"The hardest look of query {glyphs.cell(query, 20).rstrip()} at another token than the first, in each head"
        ),
        Text("  layer head  weight                           key token", "dim"),
    ]
    for row in rows:
        here = (row["layer"], row["head"]) == chosen
        lines.append(
            Text.assemble(
                ("▶ " if here else "  ", style("q")),
                f"{row['layer']:>5} {row['head']:>4}  ",
                f"{glyphs.weight(row['weight'])} ",
                (glyphs.bar(row["weight"], 24), style("s")),
                f" {row['key']:>4} ",
                glyphs.cell(row["piece"], 16).rstrip(),
                style="bold" if here else "",
            )
        )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def _title(data: Data) -> Lines:
    n, i = data["sizes"], data["query"]
    yield Text.assemble(
        ("regard explain", "bold"),
        f"  {glyphs.cell(data['model'], 24).rstrip()}: {n['layers']} layers, H {n['H']}, G {n['G']}, D {n['D']}",
    )
    yield Text.assemble(
        "layer ", (f"{data['layer']}", "bold"), ", head ", (f"{data['head']}", "bold"),
        f" (reads key/value head {data['group']}), query token ", (f"{i} ", "bold"),
        (glyphs.cell(data["query_piece"], 12).rstrip(), style("q", bold=True)), f", position {data['query_position']}",
    )  # fmt: skip
    j = data["key"]
    yield Text.assemble(
        "key ", (f"{j} ", "bold"), (glyphs.cell(data["pieces"][j], 12).rstrip(), style("k", bold=True)),
        f", position {data['positions'][j]}; {glyphs.cell(data['place'], 28).rstrip()}: "
        f"{glyphs.cell(data['mechanism'], 18).rstrip()}",
    )  # fmt: skip
    yield from wrapped(_ran(data))
    for name in ("chosen_by", "key_chosen_by"):
        if data[name]:
            yield from wrapped(f"{'chosen' if name == 'chosen_by' else 'key chosen'}: {data[name]}")
    for note in data["notes"]:
        yield from wrapped(f"note: {note}")


def _ran(data: Data) -> str:
    """What ran, in words."""
    n, calls = data["sizes"], data["calls"]
    own = f"kernel {data['kernel']}" if data["kind"] == "softmax" else "no softmax kernel"
    text = f"one pass (prefill), {own}, {data['dtype']}, {n['T']} queries, {n['S']} {data['keys_are']}; rows are queries, columns are keys"
    if len(calls) > 1:
        text += f"; call {calls[data['call']]!r} of {', '.join(calls)}"
    return text


def _check(data: Data) -> Lines:
    yield heading("check")
    worst = max(data["checks"], key=lambda name: data["checks"][name])
    yield from wrapped(
        f"{len(data['checks'])} steps recomputed and compared with what the model computed: "
        f"at most {data['check']:.1e} apart ({worst})"
    )
    for name, off in data["checks"].items():
        yield Text(f"{'  '}{off:>8.1e}  {name}", "dim")
