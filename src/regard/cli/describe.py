"""The command `regard describe`, which lists the mechanisms, or prints the equation, the options
and the cost of one.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regard import units
from regard.cli.options import JSON, SET, argument, option, usage_error
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
    from regard.nn.variants.registry import find_variant, in_teaching_order, parse_options

    if name is None:
        mechanisms = {
            entry.name: {"family": entry.family, "about": entry.summary}
            for entry in in_teaching_order()
        }
        typer.echo(json_format.dumps(mechanisms) if json else _list())
        return
    entry = find_variant(name)
    options = {**entry.published_options, **parse_options(settings or [], entry)}
    module = _build(entry, dim, heads, options)
    description = _describe(module, context)
    if figure is not None:
        _draw(figure, entry, module, dim, heads, options)
    if json:
        typer.echo(json_format.dumps(_figures_as_json(entry, dim, heads, options, description)))
    else:
        typer.echo(_description_text(entry, dim, heads, options, description))


def _list() -> str:
    """Return the mechanisms by groups; lines are wrapped at the width of the terminal."""
    from regard.nn.variants import VARIANTS
    from regard.nn.variants.registry import GROUPS

    columns = line_width()
    name_width = max(map(len, VARIANTS)) + 4
    blocks = []
    for group in GROUPS:
        title = translate(
            "{kind}: {title}",
            kind=translate(f"{group.family} attention"),
            title=translate(group.title),
        )
        lines = [
            wrap(
                translate(entry.summary),
                columns,
                indent=f"  {entry.name}".ljust(name_width),
                hang=" " * name_width,
            )
            for entry in group.variants()
        ]
        blocks.append("\n".join([wrap(title, columns), *lines]))
    return "\n\n".join(blocks)


def _build(entry: Variant, dim: int, heads: int, options: dict[str, object]) -> nn.Module:
    """Build a layer without memory for its weights, because only sizes are needed."""
    import torch

    with torch.device("meta"):
        return entry.build(dim, heads, **options)


def _describe(module: nn.Module, context: int) -> Description | None:
    """Return the description of a layer; None if it has no figures of its own."""
    describe_layer = getattr(module, "describe", None)
    return describe_layer(context) if describe_layer is not None else None


def _draw(
    path: Path, entry: Variant, module: nn.Module, dim: int, heads: int, options: dict[str, object]
) -> None:
    """Write the figure of a mechanism: its heads and cache, or its mask."""
    from regard.cli.options import check_files
    from regard.view.charts import write
    from regard.view.heatmaps import CachedHeads, HeadsFigure, MaskFigure

    check_files({}, pictures={"--figure": path})
    mask = getattr(module, "mask", None)
    if entry.name in ("mha", "gqa", "mqa", "mla"):
        sizes = {k: v for k, v in options.items() if isinstance(v, int)}
        D, groups = sizes.get("head_dim", dim // heads), sizes.get("groups", 8)
        kv_rank, rope_dim = sizes.get("kv_rank", 512), sizes.get("rope_dim", 64)
        write(
            HeadsFigure(
                (
                    CachedHeads("MHA", heads, heads, 2 * heads * D),
                    CachedHeads("GQA", heads, groups, 2 * groups * D),
                    CachedHeads("MQA", heads, 1, 2 * D),
                    CachedHeads(
                        "MLA", heads, 0, kv_rank + rope_dim, f"latent {kv_rank}, key {rope_dim}"
                    ),
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
    figures = (
        {}
        if description is None
        else {
            **asdict(description),
            "cached_values": description.cached_values,
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
    from regard.nn.variants.registry import equation_symbols

    columns = line_width()

    def listed(title: str, rows: dict[str, str]) -> list[str]:
        """Return a title and its rows, wrapped, with the meanings below one another."""
        column = min(24, max(map(display_width, rows), default=0) + 4)
        lines = []
        for name, text in rows.items():
            gap = " " * max(2, column - 2 - display_width(name))
            lines.append(wrap(text, columns, indent=f"  {name}{gap}", hang=" " * column))
        return ["", title, *lines] if rows else []

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
    head = translate("{name}: {summary}", name=entry.name, summary=translate(entry.summary))
    lines = [
        wrap(head, columns),
        "",
        wrap(entry.equation, columns, indent="  ", hang="    "),
        *listed(translate("where"), {name: translate(text) for name, text in symbols.items()}),
        *listed(translate("who and when"), usage_rows),
        *listed(translate("options, for --set name=value"), meanings),
        "",
        wrap(translate("Source: {source}", source=entry.source), columns),
    ]
    sizes = {"dim": dim, "heads": heads, **options}
    written = ", ".join(f"{key}={value}" for key, value in sizes.items())
    if description is None:
        none = translate(
            "It attends to a second sequence, so a layer has no cache figures ({sizes}).",
            sizes=written,
        )
        return "\n".join([*lines, "", wrap(none, columns)])
    title = translate(
        "One layer, {sizes}, context {context}:",
        sizes=written,
        context=f"{description.context:,}",
    )
    return "\n".join([*lines, "", wrap(title, columns), *_figure_lines(description, columns)])


def _figure_lines(description: Description, columns: int) -> list[str]:
    """Return the figures of a layer with their units and formulas, one a line."""
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
    column = max(map(display_width, rows)) + 4
    return [
        wrap(
            text,
            columns,
            indent=f"  {name}" + " " * (column - 2 - display_width(name)),
            hang=" " * column,
        )
        for name, text in rows.items()
    ]
