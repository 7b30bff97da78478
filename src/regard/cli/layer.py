"""The command `regard layer`, which runs one attention layer on random tokens and prints its
tensors.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regard import units
from regard.cli.options import (
    JSON,
    SET,
    argument,
    check_device_option,
    check_files,
    command_line,
    note,
    option,
    usage_error,
)
from regard.language import counted, translate
from regard.text_table import line_width, wrap
from regard.untrusted_text import escape_controls

if TYPE_CHECKING:
    from regard.inspect.explain.layer_stages import LayerStages

EPILOG = "For example: regard layer mha gpt mla --tokens 64"


def layer(
    names: list[str] | None = argument(
        "Mechanisms of the catalogue (regard describe); several are printed side by side.",
        shown="mha",
        metavar="MECHANISM",
    ),
    dim: int = option("Model width M.", default=512, min=1),
    heads: int = option("Number of query heads H.", default=8, min=1),
    batch: int = option("Number of sequences B.", default=2, min=1, max=64),
    tokens: int = option("Number of tokens T of each sequence.", default=4, min=1, max=1024),
    mask: str = option("Mask expression, as in regard show.", "--mask", default="causal"),
    seed: int = option("Random seed for the tokens and the weights.", default=0, min=0),
    settings: list[str] | None = SET,
    device: str | None = option("Device: cpu, cuda, ...", shown="the CPU"),
    html: Path | None = option("Also write the tensors as an HTML page to this file.", "--html"),
    figure: Path | None = option(
        "Draw the attention weights of one head to this .svg, .png or .pdf file."
    ),
    head: int = option(
        "Index of the head that is printed, and drawn by --figure.", default=0, min=0
    ),
    full: bool = option(
        "Print every head of every sequence and the outputs, not only one screen.",
        "--full",
        default=False,
    ),
    json: bool = JSON,
) -> None:
    """Run one layer of attention on random tokens, and print what it computes.

    Prints shapes, the mask, raw scores, masked scores and weights of one head, and the mean,
    standard deviation and time of each stage; --full prints every head and the outputs. The
    default input has 2 sequences of 4 tokens of width 512. The layer runs in evaluation mode,
    without dropout.
    """
    check_files({"--html": html}, pictures={"--figure": figure})
    check_device_option(device)
    from regard import masks
    from regard.inspect.explain.layer_stages import run_layers

    mechanisms = names or ["mha"]
    layers = run_layers(
        mechanisms,
        options=_options(mechanisms, settings, dim, heads),
        dim=dim,
        heads=heads,
        batch=batch,
        tokens=tokens,
        mask=masks.parse(mask),
        seed=seed,
        device=device,
    )
    if figure is not None or not (json or full or len(layers) > 1):
        _check_head(layers[0], head)
    if figure is not None:
        _draw(layers[0], head, figure)
    results = [one.as_dict() for one in layers]
    if json:
        typer.echo(json_format.dumps(results, allow_nan=False))
    else:
        _print(results, None if full else head)
    if html is not None:
        _write(results, html)


def _options(
    names: list[str], settings: list[str] | None, dim: int, heads: int
) -> dict[str, object] | None:
    """Return the options of a single mechanism that --set gives; say all options of each."""
    from regard.configs.suggested_sizes import DecoderSizes
    from regard.nn.variants.registry import named_options, sized_options, written

    if settings and len(names) > 1:
        raise usage_error(
            "--set",
            "applies to one mechanism, but {n} are named; leave it out, or name one",
            n=len(names),
        )
    options: dict[str, object] = {}
    for name in names:
        entry, options = named_options(name, settings or ())
        complete = sized_options(entry, options, DecoderSizes.of(dim, heads))
        if len(complete) > len(options):
            note(written(entry.name, complete), "... ")
    return options if settings else None


def _print(results: list[dict[str, object]], head: int | None) -> None:
    """Print the tensors of a layer, of one head or of all (None), and the table of the stages."""
    from regard.view.layer_text import screen, table, text

    if len(results) == 1:
        layer = results[0]
        typer.echo((text(layer) if head is None else screen(layer, head)) + "\n")
    typer.echo(table(results))
    sentence = translate(
        "The layer is in evaluation mode. A time is the fastest of five runs of that stage alone."
    )
    typer.echo(wrap(sentence, line_width()))
    if len(results) == 1 and head is not None:
        more = translate(
            "Go on: --full every head and the outputs; --head another head; regard layer mha mla "
            "compares mechanisms; regard describe lists all of them"
        )
        typer.echo(wrap(more, line_width()))


def _check_head(layer_stages: LayerStages, head: int) -> None:
    """Raise an error unless the layer has the head."""
    heads = layer_stages.stage("weights").values.shape[1]
    if head >= heads:
        raise usage_error(
            "--head",
            "head is {head}; {name} has {heads}, counted from 0",
            head=head,
            name=layer_stages.name,
            heads=counted(heads, "head"),
        )


def _draw(layer_stages: LayerStages, head: int, path: Path) -> None:
    from regard.view import charts, heatmaps

    weights = layer_stages.stage("weights").values[0, head]
    title = translate(
        "{name}, weights of head {head}, {mask}",
        name=layer_stages.name,
        head=head,
        mask=layer_stages.mask,
    )
    charts.write(heatmaps.HeadWeights(weights.tolist(), title), path)


def _write(results: list[dict[str, object]], path: Path) -> None:
    from regard.view import html_page
    from regard.view.layer_text import sections

    names = ", ".join(str(one["name"]) for one in results)
    facts = {
        translate("mode"): translate("evaluation"),
        translate("times"): translate("the fastest of five runs of each stage alone"),
    }
    title = translate("One layer of attention")
    page = html_page.page(title, names, facts, command_line(), sections(results))
    typer.echo(f"{escape_controls(str(path))}: {units.size(html_page.write(path, page))}", err=True)
