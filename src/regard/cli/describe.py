"""The command `regard describe`, which lists the mechanisms, or prints the equation, the options
and the cost of one.
"""

from __future__ import annotations

import json as json_format
import shutil
import sys
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.cost import Description
    from regard.nn.variants import Variant

EPILOG = "For example: regard describe mla --context 8192"

Name = Annotated[
    str | None,
    typer.Argument(help="A mechanism of the catalogue.", show_default="list all of them"),
]
Dim = Annotated[int, typer.Option(help="Model width M.", min=1)]
Heads = Annotated[int, typer.Option(help="Number of query heads H.", min=1)]
Context = Annotated[
    int, typer.Option(help="Number of tokens up to and including the decoded one.", min=1)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Option of the mechanism, such as window=512. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def describe(
    name: Name = None,
    dim: Dim = 32,
    heads: Heads = 4,
    context: Context = 4096,
    option: Set = None,
    json: Json = False,
) -> None:
    """List the mechanisms, or describe one: equation, source, options, cached values and FLOPs.

    The figures are those of one layer at the given sizes; options that are not set have the values
    of a small example.
    """
    from regard.nn.variants import VARIANTS
    from regard.nn.variants.registry import find_variant, parse_options

    if name is None:
        mechanisms = {
            entry.name: {"family": entry.family, "about": entry.summary}
            for entry in VARIANTS.values()
        }
        typer.echo(json_format.dumps(mechanisms) if json else _list(mechanisms))
        return
    try:
        entry = find_variant(name)
        options = {**entry.example_options, **parse_options(option or [], entry)}
        description = _describe(entry, dim, heads, options, context)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        typer.echo(json_format.dumps(_figures_as_json(entry, dim, heads, options, description)))
    else:
        typer.echo(_description_text(entry, dim, heads, options, description))


def _list(mechanisms: dict[str, dict[str, str]]) -> str:
    """Return one line for each mechanism, by family; on a terminal, lines are wrapped at its
    width.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    families: dict[str, list[str]] = {}
    name_width = max(map(len, mechanisms)) + 4
    for name, entry in mechanisms.items():
        line = fill(
            entry["about"],
            max(40, columns),
            initial_indent=f"  {name}".ljust(name_width),
            subsequent_indent=" " * name_width,
            break_long_words=False,
        )
        families.setdefault(entry["family"], []).append(line)
    return "\n\n".join("\n".join([family, *lines]) for family, lines in families.items())


def _describe(
    entry: Variant, dim: int, heads: int, options: dict[str, object], context: int
) -> Description | None:
    """Return the description of a layer, which is built without memory for its weights because only
    sizes are needed.
    """
    import torch

    with torch.device("meta"):
        module = entry.build(dim, heads, **options)
    describe_layer = getattr(module, "describe", None)
    return describe_layer(context) if describe_layer is not None else None


def _figures_as_json(
    entry: Variant,
    dim: int,
    heads: int,
    options: dict[str, object],
    description: Description | None,
) -> dict[str, object]:
    figures = (
        {}
        if description is None
        else {
            **asdict(description),
            "cached_values": description.cached_values,
            "kept": description.cached_values,  # the old name, for one release
        }
    )
    figures |= {"name": entry.name, "family": entry.family, "equation": entry.equation}
    return {**figures, "source": entry.source, "options": {"dim": dim, "heads": heads, **options}}


def _description_text(
    entry: Variant,
    dim: int,
    heads: int,
    options: dict[str, object],
    description: Description | None,
) -> str:
    sizes = ", ".join(
        f"{key}={value}" for key, value in {"dim": dim, "heads": heads, **options}.items()
    )
    lines = [
        f"{entry.name}: {entry.summary}",
        "",
        f"  {entry.equation}",
        "",
        f"Source: {entry.source}",
    ]
    if description is None:
        return "\n".join(
            [
                *lines,
                "",
                f"It attends to a second sequence, so a layer has no cache figures ({sizes}).",
            ]
        )
    cached_line = f"{'values cached in total':<26}{description.cached_values:,}"
    head, *rows = str(description).splitlines()
    return "\n".join(
        [
            *lines,
            "",
            f"One layer, {sizes}, {head.partition(', ')[2]}:",
            *(f"  {row}" for row in [*rows, cached_line]),
        ]
    )
