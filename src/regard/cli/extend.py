"""The command `regard extend`, which tests a checkpoint under each context extension: perplexity by
length, passage retrieval, rotary frequencies and caches.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.options import (
    DEVICE,
    DTYPE,
    HTML_PAGE,
    IGNORE,
    JSON,
    REVISION,
    THREADS,
    argument,
    check_files,
    command_line,
    note,
    option,
)
from regard.errors import FileError
from regard.language import Phrase

if TYPE_CHECKING:
    from regard.compare.context_extension import ExtensionResults
    from regard.models import Model

EPILOG = (
    "For example: regard extend tiny --method yarn --method linear --length 512 --html "
    "extended.html"
)


def extend(
    source: str = argument(
        'The model: "tiny", a Hugging Face folder, or org/name on the hub.',
        default="tiny",
        metavar="MODEL",
    ),
    length: int | None = option(
        "Context length to reach, in tokens.", shown="four times the trained length", min=2
    ),
    method: list[str] | None = option(
        "Extension method: linear, ntk, dynamic, yarn or llama3. Repeatable. The model "
        "without extension is always included.",
        "--method",
        shown="all",
    ),
    text: str = option(
        "Text to test on: a UTF-8 file, a folder, or python-docs (its held-out part).",
        default="python-docs",
    ),
    windows: int = option("Number of windows of text for each length.", default=8, min=1),
    trials: int = option("Number of passages for each length and depth.", default=6, min=1),
    steps: int = option(
        "Number of tokens decoded with a cache across the trained length.", default=24, min=1
    ),
    seed: int = option("Random seed for passages and texts.", default=0, min=0),
    dtype: str | None = DTYPE,
    device: str | None = DEVICE,
    revision: str | None = REVISION,
    ignore: list[str] | None = IGNORE,
    threads: int | None = THREADS,
    json: bool = JSON,
    html: Path | None = HTML_PAGE,
    plot: Path | None = option(
        "Draw perplexity against length to this .svg, .png or .pdf file.", metavar="FILE"
    ),
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

    command = command_line()
    if options["json"]:
        typer.echo(json_format.dumps(results.as_dict(command), indent=1, allow_nan=False))
    else:
        typer.echo(render_table(results))
    if options["html"] is not None:
        write(options["html"], render_page(results, command))
    if options["plot"] is not None:
        charts.write(plots(results)[0], options["plot"])


def _report(line: str) -> None:
    note(line, "... ")
