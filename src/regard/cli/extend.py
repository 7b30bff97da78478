"""`regard extend`: a checkpoint under each context extension: perplexity by length, a passage found
again, spectra, caches.
"""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Dtype, Ignore, Revision, check_files
from regard.errors import ArgumentError, FileError

if TYPE_CHECKING:
    from regard.compare.extension import Extended
    from regard.models import Model

EPILOG = (
    "For example: regard extend tiny --method yarn --method linear --length 512 --html "
    "extended.html"
)

Source = Annotated[
    str,
    typer.Argument(metavar="MODEL", help='"tiny", a Hugging Face folder, or org/name on the hub.'),
]
Length = Annotated[
    int | None,
    typer.Option(help="Tokens to reach.", min=2, show_default="four times the trained length"),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="linear, ntk, dynamic, yarn or llama3; repeatable.",
        show_default="all, and none",
    ),
]
Text = Annotated[
    str, typer.Option(help="A UTF-8 file, a folder, or python-docs (its held-out part).")
]
Windows = Annotated[int, typer.Option(help="Windows of text, for each length.", min=1)]
Trials = Annotated[int, typer.Option(help="Passages, for each length and depth.", min=1)]
Steps = Annotated[
    int, typer.Option(help="Tokens decoded with a cache across the trained length.", min=1)
]
Seed = Annotated[int, typer.Option(help="Of passages and where they stand.", min=0)]
Threads = Annotated[int | None, typer.Option(help="Threads.", min=1, show_default="torch's")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the plots.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw perplexity against length: .svg, .png or .pdf."),
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
    revision: Revision = None,
    ignore: Ignore = None,
    threads: Threads = None,
    json: Json = False,
    html: Html = None,
    plot: Plot = None,
) -> None:
    """Read far beyond the trained length under each extension of rotary positions; no weight
    changes.

    Perplexity of the same tokens behind ever more context; a passage that stands at a depth and is
    asked for by its beginning; how fast each pair of dims turns; and whether decoding with a cache
    equals passes over everything.
    """
    options = dict(locals())
    try:
        check_files({"--html": html}, pictures={"--plot": plot})
        found = _run(options)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    _write(found, options)


def _run(o: dict[str, Any]) -> Extended:
    """Load, read, measure."""
    import torch

    from regard.cli.options import How, load
    from regard.compare.extension import Asked, extend_all
    from regard.models import Model

    if o["threads"]:
        torch.set_num_threads(o["threads"])
    model = load(o["source"], How(o["dtype"], ignore=o["ignore"], revision=o["revision"]), Model)
    ids, told = _ids(model, o["text"])
    asked = Asked(
        o["length"], tuple(o["method"] or ()), o["windows"], o["trials"], o["steps"], o["seed"]
    )
    return extend_all(model, ids, asked, {"model": o["source"], "text": told}, _say)


def _ids(model: Model, source: str) -> tuple[Any, str]:
    """The ids of a text, and what it is called."""
    from regard.train.corpus import DEFAULT_SOURCE, load_documents, split_documents

    documents = load_documents(source)
    name = source
    if source == DEFAULT_SOURCE:
        documents, name = (
            split_documents(documents)[1],
            f"{source}, the part that tiny was not trained on",
        )
    if not model.has_tokenizer:
        raise FileError(
            f"the model has no tokenizer, and --text {source} must be read: add tokenizer.json to "
            "its folder"
        )
    return model.encode("\n\n".join(document.text for document in documents))[0], name


def _write(found: Extended, o: dict[str, Any]) -> None:
    """Print, and write what was asked for."""
    from regard.compare.extension import page, pictures, table
    from regard.view import charts
    from regard.view.html import write

    command = shlex.join(["regard", *sys.argv[1:]])
    typer.echo(
        json_format.dumps(found.as_dict(command), indent=1, allow_nan=False)
        if o["json"]
        else table(found)
    )
    if o["html"] is not None:
        write(o["html"], page(found, command))
    if o["plot"] is not None:
        charts.write(pictures(found)[0], o["plot"])


def _say(line: str) -> None:
    typer.echo(f"... {line}", err=True)
