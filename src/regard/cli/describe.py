"""The command `regard describe`, which lists the mechanisms, or prints the equation, the options
and the cost of one.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regard import units
from regard.cli.options import JSON, SET, argument, check_files, option, usage_error
from regard.configs.catalogue import GROUPS
from regard.language import translate
from regard.text_table import display_width, line_width, wrap

if TYPE_CHECKING:
    from torch import nn

    from regard.cost import Description
    from regard.nn.variants import Variant

EPILOG = "For example: regard describe mla --context 8192"


def describe(
    name: str | None = argument("A mechanism of the catalogue.", shown="list all of them"),
    dim: int = option("Model width M.", default=4096, min=1),
    heads: int = option("Number of query heads H.", default=32, min=1),
    context: int = option(
        "Number of tokens up to and including the decoded one.", default=4096, min=1
    ),
    settings: list[str] | None = SET,
    figure: Path | None = option(
        "Draw the heads and the cache beside those of mha, gqa, mqa and mla, or the mask, to "
        "this .svg, .png or .pdf file.",
        "--figure",
        metavar="FILE",
    ),
    json: bool = JSON,
) -> None:
    """List the mechanisms, or describe one: its equation with every symbol, its options, who uses
    it, when to choose it, and what it caches and computes.

    The figures are those of one layer at the given sizes; options that are not set have the values
    of a published model.
    """
    if name is None:
        mechanisms = {
            name: {"family": group.family, "about": summary}
            for group in GROUPS
            for name, summary in group.summaries().items()
        }
        typer.echo(json_format.dumps(mechanisms) if json else _list(mechanisms))
        return
    from regard.nn.variants.registry import find_variant, parse_options

    entry = find_variant(name)
    options = {**entry.published_options, **parse_options(settings or [], entry)}
    module = build_without_memory(entry, dim, heads, options)
    description = describe_layer(module, context)
    if figure is not None:
        _draw(figure, entry, module, dim, heads, options)
    if json:
        typer.echo(json_format.dumps(_figures_as_json(entry, dim, heads, options, description)))
    else:
        typer.echo(_description_text(entry, dim, heads, options, description))


def _list(names: Iterable[str]) -> str:
    """Return the mechanisms by groups; lines are wrapped at the width of the terminal."""
    columns = line_width()
    name_width = max(map(len, names)) + 4
    blocks = []
    for group in GROUPS:
        title = translate(
            "{kind}: {title}",
            kind=translate(f"{group.family} attention"),
            title=translate(group.title),
        )
        lines = [
            wrap(
                translate(summary),
                columns,
                indent=f"  {name}".ljust(name_width),
                hang=" " * name_width,
            )
            for name, summary in group.summaries().items()
        ]
        blocks.append("\n".join([wrap(title, columns), *lines]))
    return "\n\n".join(blocks)


def build_without_memory(
    entry: Variant, dim: int, heads: int, options: dict[str, object]
) -> nn.Module:
    """Build a layer without memory for its weights, because only sizes are needed."""
    import torch

    with torch.device("meta"):
        return entry.build(dim, heads, **options)


def describe_layer(module: nn.Module, context: int) -> Description | None:
    """Return the description of a layer; None if it has no figures of its own."""
    own = getattr(module, "describe", None)
    return own(context) if own is not None else None


def _draw(
    path: Path, entry: Variant, module: nn.Module, dim: int, heads: int, options: dict[str, object]
) -> None:
    """Write the figure of a mechanism: its heads and cache, or its mask."""
    from regard.view.charts import write
    from regard.view.heatmaps import CachedHeads, HeadsFigure, MaskFigure

    check_files({}, pictures={"--figure": path})
    mask = getattr(module, "mask", None)
    if entry.name in ("mha", "gqa", "mqa", "mla"):
        sizes = {k: v for k, v in options.items() if isinstance(v, int)}
        D, groups = sizes.get("head_dim", dim // heads), sizes.get("groups", 8)
        kv_rank, rope_dim = sizes.get("kv_rank", 512), sizes.get("rope_dim", 64)
        latent = translate("latent {kv_rank}, key {rope_dim}", kv_rank=kv_rank, rope_dim=rope_dim)
        write(
            HeadsFigure(
                (
                    CachedHeads("MHA", heads, heads, 2 * heads * D),
                    CachedHeads("GQA", heads, groups, 2 * groups * D),
                    CachedHeads("MQA", heads, 1, 2 * D),
                    CachedHeads("MLA", heads, 0, kv_rank + rope_dim, latent),
                )
            ),
            path,
        )
    elif mask is not None and entry.example_options:
        from regard.span import Span

        small = getattr(entry.example(), "mask", None)
        assert small is not None, entry.name
        positions = Span(0, 24)
        visible = small.block(positions, positions)[0, 0].numpy()
        write(MaskFigure(visible, f"{entry.name}: {small}"), path)
    else:
        raise usage_error(
            "--figure",
            "there is no figure of {name}; --figure draws mha, gqa, mqa and mla side by side, and "
            "mechanisms that are defined by a mask",
            name=entry.name,
        )


def _figures_as_json(
    entry: Variant,
    dim: int,
    heads: int,
    options: dict[str, object],
    description: Description | None,
) -> dict[str, object]:
    figures: dict[str, object] = {}
    if description is not None:
        figures = {**asdict(description), "cached_values": description.cached_values}
    figures |= {"name": entry.name, "family": entry.family, "equation": entry.equation}
    return {**figures, "source": entry.source, "options": {"dim": dim, "heads": heads, **options}}


def fact_tables(
    entry: Variant,
    dim: int,
    heads: int,
    options: dict[str, object],
    description: Description | None,
) -> dict[str, dict[str, str]]:
    """Return what is known of a mechanism as tables of two columns, by title: its symbols, who uses
    it and when, its options, and the figures of a layer.

    The command and the page of the mechanism on the site show the same tables.
    """
    from regard.nn.variants.registry import equation_symbols

    meanings = {
        name: translate(
            "{meaning} (here {value})",
            meaning=translate(meaning).rstrip(".。"),
            value=options[name],
        )
        if name in options
        else translate(meaning)
        for name, meaning in entry.option_meanings.items()
    }
    symbols = equation_symbols(entry)
    usage_rows = {
        translate("used by"): translate(entry.users),
        translate("choose if"): translate(entry.choose),
        translate("avoid if"): translate(entry.avoid),
    }
    if relatives := entry.relatives():
        usage_rows[translate("relatives")] = ", ".join(one.name for one in relatives)
    tables = {
        translate("where"): {name: translate(text) for name, text in symbols.items()},
        translate("who and when"): usage_rows,
        translate("options, for --set name=value"): meanings,
    }
    if description is not None:
        title = translate(
            "One layer, {sizes}, context {context}:",
            sizes=_sizes(dim, heads, options),
            context=f"{description.context:,}",
        )
        tables[title] = _figure_rows(description)
    return tables


def _sizes(dim: int, heads: int, options: dict[str, object]) -> str:
    """Return the sizes of a layer as text."""
    sizes = {"dim": dim, "heads": heads, **options}
    return ", ".join(f"{key}={value}" for key, value in sizes.items())


def _description_text(
    entry: Variant,
    dim: int,
    heads: int,
    options: dict[str, object],
    description: Description | None,
) -> str:
    columns = line_width()

    def listed(title: str, rows: dict[str, str]) -> list[str]:
        """Return a title and its rows, wrapped, with the meanings below one another."""
        widest = max(map(display_width, rows), default=0) + 4
        column = widest if title == figures else min(24, widest)
        lines = []
        for name, text in rows.items():
            gap = " " * max(2, column - 2 - display_width(name))
            lines.append(wrap(text, columns, indent=f"  {name}{gap}", hang=" " * column))
        return ["", wrap(title, columns), *lines] if rows else []

    tables = fact_tables(entry, dim, heads, options, description)
    figures = list(tables)[3] if description is not None else ""
    head = translate("{name}: {summary}", name=entry.name, summary=translate(entry.summary))
    source = wrap(translate("Source: {source}", source=entry.source), columns)
    lines = [wrap(head, columns), "", wrap(entry.equation, columns, indent="  ", hang="    ")]
    for title, rows in tables.items():
        lines += ["", source] * (title == figures) + listed(title, rows)
    if description is None:
        none = translate(
            "It attends to a second sequence, so a layer has no cache figures ({sizes}).",
            sizes=_sizes(dim, heads, options),
        )
        lines += ["", source, "", wrap(none, columns)]
    code = "\n".join(f"  {line}".rstrip() for line in entry.code().splitlines())
    return "\n".join([*lines, "", translate("a small example"), code])


def _figure_rows(description: Description) -> dict[str, str]:
    """Return the figures of a layer with their units and formulas, by name."""
    total, work = description.cached_values, description.flops_per_token

    def with_formula(text: str, formula: str) -> str:
        return f"{text} = {formula}" if formula else text

    cached = translate("{n}, {size} in 16 bits each", n=f"{total:,}", size=units.size(2 * total))
    rows = {
        translate("parameters"): str(description.parameters),
        translate("values cached per token"): str(description.kv_per_token),
        translate("tokens cached"): str(description.kv_tokens),
        translate("values of the state"): str(description.state),
        translate("work of one token"): with_formula(units.count(work.value, "FLOP"), work.formula),
        translate("values cached in total"): cached,
    }
    if (read := description.read) is not None:
        count, size = f"{read.value:,}", units.size(2 * read.value)
        text = translate("{n}, {size} in 16 bits each", n=count, size=size)
        rows[translate("values read per token")] = with_formula(text, read.formula)
    return rows
