"""`regard describe`: the catalogue of mechanisms, and what one layer of each keeps and computes."""

from __future__ import annotations

import json as json_format
import shutil
import sys
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

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
Heads = Annotated[int, typer.Option(help="Query heads H.", min=1)]
Context = Annotated[int, typer.Option(help="Tokens up to the one that is decoded.", min=1)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of the mechanism, such as --set window=512; repeatable."),
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
    """List the mechanisms, or describe one: equation, source, options, cached values, FLOPs.

    The figures are of one layer at the given sizes; options that are not set are those of a small
    example.
    """
    from regard.nn.variants import VARIANTS
    from regard.nn.variants.registry import find, parse

    if name is None:
        found = {
            entry.name: {"family": entry.family, "about": entry.sentence}
            for entry in VARIANTS.values()
        }
        typer.echo(json_format.dumps(found) if json else _list(found))
        return
    try:
        entry = find(name)
        options = {**entry.sizes, **parse(option or [], entry)}
        told = _describe(entry, dim, heads, options, context)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        typer.echo(json_format.dumps(_figures(entry, dim, heads, options, told)))
    else:
        typer.echo(_page(entry, dim, heads, options, told))


def _list(found: dict[str, dict[str, str]]) -> str:
    """One line each, by family; on a terminal, lines are broken to its width."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    families: dict[str, list[str]] = {}
    name_width = max(map(len, found)) + 4
    for name, about in found.items():
        line = fill(
            about["about"],
            max(40, columns),
            initial_indent=f"  {name}".ljust(name_width),
            subsequent_indent=" " * name_width,
            break_long_words=False,
        )
        families.setdefault(about["family"], []).append(line)
    return "\n\n".join("\n".join([family, *lines]) for family, lines in families.items())


def _describe(
    entry: Variant, dim: int, heads: int, options: dict[str, Any], context: int
) -> Description | None:
    """The description of a layer without memory for its weights: only sizes are asked for."""
    import torch

    with torch.device("meta"):
        module = entry.build(dim, heads, **options)
    told = getattr(module, "describe", None)
    return told(context) if told is not None else None


def _figures(
    entry: Variant, dim: int, heads: int, options: dict[str, Any], told: Description | None
) -> dict[str, Any]:
    figures = {} if told is None else {**asdict(told), "kept": told.cached_values}
    figures |= {"name": entry.name, "family": entry.family, "equation": entry.equation}
    return {**figures, "source": entry.source, "options": {"dim": dim, "heads": heads, **options}}


def _page(
    entry: Variant, dim: int, heads: int, options: dict[str, Any], told: Description | None
) -> str:
    sizes = ", ".join(
        f"{key}={value}" for key, value in {"dim": dim, "heads": heads, **options}.items()
    )
    lines = [
        f"{entry.name}: {entry.sentence}",
        "",
        f"  {entry.equation}",
        "",
        f"Source: {entry.source}",
    ]
    if told is None:
        return "\n".join(
            [
                *lines,
                "",
                f"It takes a second sequence, so that a layer has no cache figures ({sizes}).",
            ]
        )
    kept = f"{'values cached in all':<26}{told.cached_values:,}"
    head, *rows = str(told).splitlines()
    return "\n".join(
        [
            *lines,
            "",
            f"One layer, {sizes}, {head.partition(', ')[2]}:",
            *(f"  {row}" for row in [*rows, kept]),
        ]
    )
