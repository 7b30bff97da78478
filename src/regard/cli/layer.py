"""`regard layer`: one layer of attention on random tokens, every tensor of it printed."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import units
from regard.cli.options import check_files
from regard.errors import ArgumentError
from regard.untrusted_text import escape_controls

if TYPE_CHECKING:
    from regard.inspect.explain.layer_stages import LayerStages

EPILOG = "For example: regard layer mha gpt mla --tokens 64"

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Mechanisms of the catalogue; of several, the stages stand side by side.",
        show_default="mha",
    ),
]
Dim = Annotated[int, typer.Option(help="Model width M.", min=1)]
Heads = Annotated[int, typer.Option(help="Query heads H.", min=1)]
Batch = Annotated[int, typer.Option(help="Sequences B.", min=1, max=64)]
Tokens = Annotated[int, typer.Option(help="Tokens T of each.", min=1, max=1024)]
MaskOf = Annotated[str, typer.Option("--mask", help="A mask, as regard show takes it.")]
Seed = Annotated[int, typer.Option(help="Of the tokens and the weights.", min=0)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of the mechanism as name=value; repeatable."),
]
Html = Annotated[Path | None, typer.Option(help="Write a page, too.", show_default="no page")]
Figure = Annotated[
    Path | None,
    typer.Option(
        help="Draw the weights of a head to this .svg, .png or .pdf.", show_default="no figure"
    ),
]
Head = Annotated[int, typer.Option(help="The head that --figure draws.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print every number as JSON.")]


def layer(
    names: Names = None,
    dim: Dim = 512,
    heads: Heads = 8,
    batch: Batch = 2,
    tokens: Tokens = 4,
    mask: MaskOf = "causal",
    seed: Seed = 0,
    option: Set = None,
    html: Html = None,
    figure: Figure = None,
    head: Head = 0,
    json: Json = False,
) -> None:
    """Run one layer of attention on random tokens, and print all that it computes.

    Shapes, mask, raw scores, masked scores and weights of every head, the output, and for each
    stage its mean, deviation and time. The sizes are those of the notes' run, 2 x 4 x 512 with 8
    heads. It runs in evaluation mode: nothing is dropped.
    """
    check_files({"--html": html}, pictures={"--figure": figure})
    try:
        found = _found(names or ["mha"], dim, heads, batch, tokens, mask, seed, option)
        if figure is not None:
            _draw(found[0], head, figure)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    told = [one.as_dict() for one in found]
    if json:
        typer.echo(json_format.dumps(told, allow_nan=False))
    else:
        _print(told)
    if html is not None:
        _write(told, html)


def _found(
    names: list[str],
    dim: int,
    heads: int,
    batch: int,
    tokens: int,
    mask: str,
    seed: int,
    settings: list[str] | None,
) -> list[LayerStages]:
    from regard import masks
    from regard.inspect.explain.layer_stages import default_options, run_layers
    from regard.nn.variants.registry import find_variant, parse_options

    if settings and len(names) > 1:
        raise ArgumentError(
            f"--set is for one mechanism, and {len(names)} are named; leave it out, or name one"
        )
    options = None
    if settings:
        options = {
            **default_options(names[0], dim, heads),
            **parse_options(settings, find_variant(names[0])),
        }
    return run_layers(
        names,
        dim=dim,
        heads=heads,
        batch=batch,
        tokens=tokens,
        mask=masks.parse(mask),
        seed=seed,
        options=options,
    )


def _print(told: list[dict[str, object]]) -> None:
    from regard.view.layer_text import table, text

    if len(told) == 1:
        typer.echo(text(told[0]) + "\n")
    typer.echo(table(told))
    typer.echo("In evaluation mode; a time is the fastest of five runs of that stage alone.")


def _draw(found: LayerStages, head: int, path: Path) -> None:
    from regard.view import charts

    weights = found.stage("weights").values
    if head >= weights.shape[1]:
        raise ArgumentError(f"head is {head}; {found.name} has {weights.shape[1]} heads, from 0")
    title = f"{found.name}, weights of head {head}, {found.mask}"
    charts.write(charts.HeadWeights(weights[0, head].tolist(), title), path)


def _write(told: list[dict[str, object]], path: Path) -> None:
    from regard.view import html_page
    from regard.view.layer_text import sections

    command = shlex.join(["regard", *sys.argv[1:]])
    named = ", ".join(str(one["name"]) for one in told)
    facts = {"mode": "evaluation", "times": "the fastest of five runs of each stage alone"}
    page = html_page.page("One layer of attention", named, facts, command, sections(told))
    typer.echo(f"{escape_controls(str(path))}: {units.size(html_page.write(path, page))}", err=True)
