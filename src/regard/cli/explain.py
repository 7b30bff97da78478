"""`regard explain`: one query token of a text, step by step, in the numbers that the model computed."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli._model import AllowMissing, Dtype, Finite, Source, load
from regard.errors import ArgumentError, FileError

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Choice, Explanation
    from regard.models.model import Model

EPILOG = 'For example: regard explain "a fluffy blue creature roamed the verdant forest" --query creature'

Text = Annotated[str, typer.Argument(help="The text, 1 to 512 tokens.")]
Layer = Annotated[
    int | None,
    typer.Option(help="The layer, from 0; negative counts from the end.", show_default="chosen"),
]
Head = Annotated[
    int | None,
    typer.Option(
        help="The query head, from 0; negative counts from the end.", show_default="chosen"
    ),
]
Query = Annotated[
    str,
    typer.Option(
        help="The query token: its index (-1 is the last), or a word of the text: its last token."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Write one self-contained page to this file instead.", show_default="no page"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print every number as JSON.")]
List = Annotated[
    bool, typer.Option("--list", help="List what every head looks at from the query, and stop.")
]
Color = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colours.", show_default="on a terminal")
]


def explain(
    text: Text,
    layer: Layer = None,
    head: Head = None,
    query: Query = "-1",
    model: Source = "tiny",
    html: Html = None,
    json: Json = False,
    list_heads: List = False,
    color: Color = None,
    dtype: Dtype = None,
    allow_missing: AllowMissing = None,
    finite: Finite = False,
) -> None:
    """Follow one query token through one attention head, number by number: embedding, q, k, v, scores, softmax, output.

    A layer or head that is not given is chosen: the head that looks hardest at one other token than the first.
    """
    try:
        if html is not None:
            from regard.view.html import check_target

            check_target(html)
    except FileError as error:
        raise typer.BadParameter(str(error), param_hint="--html") from error
    from regard.models.model import Model

    loaded = load(model, dtype, allow_missing, finite, Model)
    try:
        i, choice = _choose(loaded, text, layer, head, query)
        if list_heads:
            _print_heads(loaded, text, i, choice, json, _console(color))
            return
        found = _explained(loaded, text, i, choice, model)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    _give(found, html, json, color)


def _choose(
    model: Model, text: str, layer: int | None, head: int | None, query: str
) -> tuple[int, Choice]:
    """The query's index, and the layer and head: those that were asked for, or those that the rule gives."""
    from regard.inspect import Choice, check_index, find_query, strongest_head
    from regard.inspect.explain import check_length

    ids = check_length(model.encode(text))
    i = find_query(model, text, _index_or_word(query))
    if layer is not None:
        layer = check_index("layer", layer, len(model.decoder.layers), "layer", "layers")
    if layer is not None and head is not None:
        return i, Choice(layer, head, "")
    return i, strongest_head(model, ids, i, layer=layer, head=head)


def _explained(model: Model, text: str, i: int, choice: Choice, source: str) -> Explanation:
    from regard.inspect import explain as explain_text

    found = explain_text(model, text, layer=choice.layer, head=choice.head, query=i)
    return replace(found, model=Path(source).name or source, chosen_by=choice.rule)


def _give(found: Explanation, html: Path | None, json: bool, color: bool | None) -> None:
    """Write the page where one was asked for; print JSON, or the terminal page."""
    data = found.as_dict()
    if html is not None:
        from regard.view.html import page, write

        size = write(html, page(data))
        typer.echo(
            f"{html}: {size / 1000:,.0f} kB, layer {found.layer}, head {found.head}", err=json
        )
    if json:
        typer.echo(json_format.dumps(data, allow_nan=False))
    elif html is None:
        from regard.view.ansi import show

        show(data, _console(color))


def _print_heads(
    model: Model, text: str, i: int, choice: Choice, json: bool, console: Console
) -> None:
    """What every head looks at from the query."""
    from regard.inspect import strongest_keys
    from regard.view.ansi import show_heads

    ids = model.encode(text)
    weights, keys = (found.tolist() for found in strongest_keys(model, ids, i))
    pieces = model.tokenizer.pieces(ids[0].tolist())
    rows: list[dict[str, Any]] = [
        {"layer": n, "head": h, "key": key, "piece": pieces[key], "weight": weight}
        for n, layer in enumerate(zip(weights, keys, strict=True))
        for h, (weight, key) in enumerate(zip(*layer, strict=True))
    ]
    if json:
        typer.echo(json_format.dumps({"query": i, "piece": pieces[i], "heads": rows}))
    else:
        show_heads(f"{i} {pieces[i]}", rows, (choice.layer, choice.head), console)


def _index_or_word(query: str) -> int | str:
    try:
        return int(query)
    except ValueError:
        return query


def _console(color: bool | None) -> Console:
    """A console of 80 columns; colours as asked, else on a terminal that wants them."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a glyph shows "?"
    if color is None:
        return Console(width=80)
    if color:
        return Console(width=80, force_terminal=True, no_color=False, color_system="truecolor")
    return Console(width=80, force_terminal=False, no_color=True, color_system=None)
