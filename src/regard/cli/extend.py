"""The command `regard extend`, which tests a checkpoint under each context extension: perplexity by
length, passage retrieval, rotary frequencies and caches.
"""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Device, Dtype, Ignore, Revision, check_files, note
from regard.errors import FileError
from regard.language import Phrase

if TYPE_CHECKING:
    from regard.compare.context_extension import ExtensionResults
    from regard.models import Model

EPILOG = (
    "For example: regard extend tiny --method yarn --method linear --length 512 --html "
    "extended.html"
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help='The model: "tiny", a Hugging Face folder, or org/name on the hub.'
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        help="Context length to reach, in tokens.",
        min=2,
        show_default="four times the trained length",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help=(
            "Extension method: linear, ntk, dynamic, yarn or llama3. Repeatable. The "
            "model without extension is always included."
        ),
        show_default="all",
    ),
]
Text = Annotated[
    str,
    typer.Option(
        help=("Text to test on: a UTF-8 file, a folder, or python-docs (its held-out part).")
    ),
]
Windows = Annotated[int, typer.Option(help="Number of windows of text for each length.", min=1)]
Trials = Annotated[int, typer.Option(help="Number of passages for each length and depth.", min=1)]
Steps = Annotated[
    int,
    typer.Option(help="Number of tokens decoded with a cache across the trained length.", min=1),
]
Seed = Annotated[int, typer.Option(help="Random seed for passages and texts.", min=0)]
Threads = Annotated[
    int | None, typer.Option(help="Number of CPU threads.", min=1, show_default="torch's number")
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots to this file.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw perplexity against length to this .svg, .png or .pdf file."
    ),
]


def extend(
    source: Source = "tiny",
    length: Length = None,
    method: Methods = None,
    text: Text = "python-docs",
    windows: Windows = 8,
    trials: Trials = 6,
    steps: Steps = 24,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    ignore: Ignore = None,
    threads: Threads = None,
    json: Json = False,
    html: Html = None,
    plot: Plot = None,
) -> None:
    """Test a model far beyond its trained length under each extension of rotary positions; no
    weight is changed.

    Measures the perplexity of the same tokens after more and more context; whether a passage is
    retrieved from each depth of a text; how fast each rotary pair turns; and whether decoding with
    a cache equals a pass over the whole sequence.
    """
    options = dict(locals())
    check_files({"--html": html}, pictures={"--plot": plot})
    results = _run(options)
    _write(results, options)


def _run(options: dict[str, Any]) -> ExtensionResults:
    """Load the model, read the text, and measure."""
    import torch

    from regard.cli.options import LoadOptions, load
    from regard.compare.context_extension import ExtensionOptions, extend_all
    from regard.models import Model

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    model = load(
        options["source"],
        LoadOptions(
            options["dtype"],
            ignore=options["ignore"],
            revision=options["revision"],
            device=options["device"],
        ),
        Model,
    )
    ids, text_name = _ids(model, options["text"])
    extension_options = ExtensionOptions(
        options["length"],
        tuple(options["method"] or ()),
        options["windows"],
        options["trials"],
        options["steps"],
        options["seed"],
    )
    return extend_all(
        model, ids, extension_options, {"model": options["source"], "text": text_name}, _report
    )


def _ids(model: Model, source: str) -> tuple[Any, str]:
    """Return the token ids of a text, and the name of the text."""
    from regard.train.corpus import DEFAULT_SOURCE, load_documents, split_documents

    documents = load_documents(source)
    name = source
    if source == DEFAULT_SOURCE:
        documents, name = (
            split_documents(documents)[1],
            Phrase("{source}, the part that tiny was not trained on", source=source),
        )
    if not model.has_tokenizer:
        raise FileError(
            f"the model has no tokenizer, which --text {source} needs; add tokenizer.json to its "
            "folder"
        )
    return model.encode("\n\n".join(document.text for document in documents))[0], name


def _write(results: ExtensionResults, options: dict[str, Any]) -> None:
    """Print the results, and write the requested files."""
    from regard.compare.context_extension_report import plots, render_page, render_table
    from regard.view import charts
    from regard.view.html_page import write

    command = shlex.join(["regard", *sys.argv[1:]])
    typer.echo(
        json_format.dumps(results.as_dict(command), indent=1, allow_nan=False)
        if options["json"]
        else render_table(results)
    )
    if options["html"] is not None:
        write(options["html"], render_page(results, command))
    if options["plot"] is not None:
        charts.write(plots(results)[0], options["plot"])


def _report(line: str) -> None:
    note(line, "... ")
