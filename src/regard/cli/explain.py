"""`regard explain`: one query and one key of a text, step by step, in the numbers that the kernel
computed.
"""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import units
from regard.cli._explain_target import Beside, BesideModel
from regard.cli.options import (
    AllowMissing,
    Dtype,
    Finite,
    How,
    Ignore,
    Revision,
    Source,
    check_files,
)
from regard.errors import ArgumentError
from regard.foreign import inert

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Explanation
    from regard.inspect.reading import Reading

EPILOG = (
    'For example: regard explain "a fluffy blue creature roamed the verdant forest" --query '
    "creature"
)
WHERE, OUT, MECHANISM = "Where to look", "What to write", "A mechanism with random weights"

Text = Annotated[str, typer.Argument(help="The text, at least one token.")]
Layer = Annotated[
    int | None,
    typer.Option(
        help="The layer, from 0; negative counts from the end.",
        show_default="chosen",
        rich_help_panel=WHERE,
    ),
]
Head = Annotated[
    int | None,
    typer.Option(
        help="The query head, from 0; negative counts from the end.",
        show_default="chosen",
        rich_help_panel=WHERE,
    ),
]
Query = Annotated[
    str,
    typer.Option(
        help="The query token: its index (-1 is the last), or a word of the text: its last token.",
        rich_help_panel=WHERE,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help="The key, likewise.", show_default="the strongest other one", rich_help_panel=WHERE
    ),
]
Place = Annotated[
    str | None,
    typer.Option(
        help="The attention by its place, such as decoder.layers.0.cross, instead of --layer.",
        show_default="by --layer",
        rich_help_panel=WHERE,
    ),
]
Call = Annotated[
    str | None,
    typer.Option(
        help="Of several calls at a place (branches, passes), which: a name or a number.",
        show_default="the sharpest",
        rich_help_panel=WHERE,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Of an encoder-decoder: what it is to have said.",
        show_default="its answer",
        rich_help_panel=WHERE,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="Look at this mechanism of the catalogue (regard describe) instead of a model.",
        show_default="a model",
        rich_help_panel=MECHANISM,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Its options as name=value. Repeatable.",
        show_default="a small example's",
        rich_help_panel=MECHANISM,
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random weights.", rich_help_panel=MECHANISM)]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Write one self-contained page to this file instead.",
        show_default="no page",
        rich_help_panel=OUT,
    ),
]
Figure = Annotated[
    Path | None,
    typer.Option(
        help="Draw the head's pattern and the row to this .svg, .png or .pdf.",
        show_default="no figure",
        rich_help_panel=OUT,
    ),
]
Lang = Annotated[
    str | None,
    typer.Option(
        help="The language of the page: en or zh.", show_default="the locale's", rich_help_panel=OUT
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print every number as JSON.", rich_help_panel=OUT)
]
List = Annotated[
    bool,
    typer.Option(
        "--list",
        help="List what every head looks at from the query, and stop.",
        rich_help_panel=OUT,
    ),
]
Color = Annotated[
    bool | None,
    typer.Option(
        "--color/--no-color", help="Colours.", show_default="on a terminal", rich_help_panel=OUT
    ),
]


def explain(
    text: Text,
    layer: Layer = None,
    head: Head = None,
    query: Query = "-1",
    key: Key = None,
    place: Place = None,
    call: Call = None,
    target: Target = None,
    model: Source = "tiny",
    attention: Attention = None,
    settings: Set = None,
    seed: Seed = 0,
    html: Html = None,
    lang: Lang = None,
    beside: Beside = None,
    beside_model: BesideModel = None,
    figure: Figure = None,
    json: Json = False,
    list_heads: List = False,
    color: Color = None,
    dtype: Dtype = None,
    revision: Revision = None,
    allow_missing: AllowMissing = None,
    ignore: Ignore = None,
    finite: Finite = False,
) -> None:
    """Follow one query and one key through one attention head, number by number: inputs, scores,
    softmax, values, output.

    A layer or head that is not given is chosen: the head that looks hardest at the key, or at one
    other token than the first.
    """
    check_files({"--html": html}, pictures={"--figure": figure})
    _check_lang(lang)
    if html is None and (beside or beside_model):
        raise typer.BadParameter("compares on the page; add --html FILE", param_hint="--beside")
    from regard.cli._explain_target import Look, check, mechanism, print_heads, read

    how = How(dtype, allow_missing, ignore, finite, revision)
    check(attention, model, {"--set": settings, "--seed": seed}, how)
    try:
        if attention is not None:
            found = mechanism(attention, text, settings, seed, target)
        else:
            found = read(text, model, how, target=target)
        look = Look(found, query, key, layer, head, place)
        if list_heads:
            print_heads(look, json, _console(color))
            return
        told = look.explained(call)
        other = None
        if beside or beside_model:
            # options that speak of one folder are that folder's; another model has its own dtype
            # only
            beside_how = How(dtype) if beside_model else how
            other = read(beside or text, beside_model or model, beside_how, target=target)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    _give(told, (found, other), html, figure, lang, json, color)


def _check_lang(lang: str | None) -> None:
    if lang is not None:
        from regard.view.report.lang import check_language

        try:
            check_language(lang)
        except ArgumentError as error:
            raise typer.BadParameter(str(error), param_hint="--lang") from error


def _give(
    found: Explanation,
    reads: tuple[Reading, Reading | None],
    html: Path | None,
    figure: Path | None,
    lang: str | None,
    json: bool,
    color: bool | None,
) -> None:
    """Write the page and the figure where they were asked for; print JSON, or the terminal page."""
    data = found.as_dict()
    if html is not None:
        from regard.cli._explain_target import page
        from regard.view.html import write

        size = write(html, page(found, reads[0], data, lang, reads[1]))
        typer.echo(
            f"{inert(str(html))}: {units.size(size)}, layer {found.layer}, head {found.head}",
            err=json,
        )
    if figure is not None:
        from regard.view.figure import draw

        typer.echo(f"{inert(str(figure))}: {units.size(draw(data, figure))}", err=json)
    if json:
        typer.echo(json_format.dumps(data, allow_nan=False))
    elif html is None and figure is None:
        from regard.view.explanation import show

        show(data, _console(color))


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
