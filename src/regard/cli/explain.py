"""The command `regard explain`, which follows one query and one key of a text step by step, in the
numbers that the kernel computed.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard import units
from regard.cli.options import (
    COLOR,
    JSON,
    LANG,
    SET,
    TEXT_FILE,
    LoadOptions,
    PromptOptions,
    argument,
    check_files,
    console_of,
    grouped,
    load,
    model_option,
    option,
    refuse_given,
    usage_error,
    working,
)
from regard.language import counted
from regard.untrusted_text import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Explanation
    from regard.inspect.model_run import ModelRun

EPILOG = (
    'For example: regard explain "a fluffy blue creature roamed the verdant forest" --query '
    "creature"
)
USAGE = "TEXT"  # or --file, or --module
row_option = partial(option, panel="What to explain")
output_option = partial(option, panel="Output")
mechanism_option = partial(option, panel="A mechanism with random weights")
module_option = partial(option, panel="A module of your own")
MAX_TOKENS = 1 << 14
"""The maximum number of tokens of a text; a small model takes half a minute for that many."""


@dataclass(frozen=True)
class Row:
    """The options that say which query, key and head are explained."""

    layer: int | None = row_option(
        "Layer, from 0; negative numbers count from the end.", shown="chosen by the weights"
    )
    head: int | None = row_option(
        "Query head, from 0; negative numbers count from the end.", shown="chosen by the weights"
    )
    query: str | None = row_option(
        "Query token: its index (-1 is the last token), or a word of the text, which means "
        "its last token.",
        shown="the last token, or of a text encoder the word with the largest weight",
    )
    key: str | None = row_option(
        "Key token, named as for --query.", shown="the key with the largest weight, not the query"
    )
    place: str | None = row_option(
        "Attention module, by its path such as decoder.layers.0.cross, instead of --layer.",
        shown="by --layer",
    )
    call: str | None = row_option(
        "Which call of the module, if it computes attention several times (branches, passes): "
        "a name or a number.",
        shown="the one with the largest weight",
    )
    target: str | None = row_option(
        "Target text of an encoder-decoder.", shown="the text that it generates"
    )


@dataclass(frozen=True)
class Output:
    """The options that say how an explanation is shown."""

    html: Path | None = output_option(
        "Write one self-contained HTML page to this file, instead of printing text."
    )
    lang: str | None = LANG
    beside: str | None = output_option("Another text to compare with on the page (--html).")
    beside_model: str | None = output_option(
        "Another model to compare with on the page (--html): a name or a folder.",
        shown="the same model",
    )
    figure: Path | None = output_option(
        "Draw the head's attention pattern and the query's row to this .svg, .png or .pdf file."
    )
    json: bool = JSON
    full: bool = output_option(
        "Print every step with all numbers, instead of one screen.", "--full", default=False
    )
    list_heads: bool = output_option(
        "List the key with the largest weight in every head for this query, and exit.",
        "--list",
        default=False,
    )
    color: bool | None = COLOR


@grouped
def explain(
    text: str | None = argument(
        "The text, with at least one token; none with --module.",
        shown="that of --file",
        metavar="TEXT",
    ),
    file: str | None = TEXT_FILE,
    *,
    row: Row,
    model: str | None = model_option(
        'The model: "tiny", which comes with the package, "minilm" or "smollm2" from packages, a '
        "Hugging Face folder, a GGUF file, or org/name on the hub.",
        shown="a trained model that is installed and reads the text's language, or tiny",
    ),
    attention: str | None = mechanism_option(
        "Explain this mechanism of the catalogue (regard describe) with random weights, "
        "instead of a model."
    ),
    settings: list[str] | None = SET,
    seed: int = mechanism_option("Random seed for the weights.", default=0),
    module: str | None = module_option(
        "Instead of a text: your own function, which is imported and called without arguments. "
        "It returns (model, inputs) or (model, inputs, labels): any torch.nn.Module, its "
        "inputs, and texts for its tokens, as regard.inspect.record takes them.",
        metavar="PACKAGE.MODULE:FUNCTION",
    ),
    batch: int = module_option("Row of the batch of --module.", default=0, min=0),
    output: Output,
    reading: PromptOptions,
    load_options: LoadOptions,
) -> None:
    """Follow one query and one key through one attention head, number by number: inputs, scores,
    softmax, values and output.

    One screen is printed: the strongest keys, and five steps. --full prints all steps.

    If none of --layer, --head and --key is given, and the model's next token stands in the text,
    the head is chosen that adds the most to the logit of that token by reading it. Otherwise the
    head is chosen in which the query has the largest weight on the key; if --key is not given,
    the largest weight on any word counts, except on the first token, the query's word and its
    neighbours.
    """
    check_files({"--html": output.html}, pictures={"--figure": output.figure})
    if output.html is None and (output.beside or output.beside_model):
        raise usage_error("--beside", "compares two runs on the page; add --html FILE")
    if row.place is not None and row.layer is not None:
        raise usage_error("--place", "already names the layer; leave --layer out")
    flags = [*reading.flags_given(), *load_options.flags_given()]
    if module is not None:
        others: dict[str, Any] = {"TEXT": text, "--file": file, "--attention": attention}
        others |= {"--target": row.target, "--call": row.call, "--set": settings, "--seed": seed}
        others |= {"--beside": output.beside, "--beside-model": output.beside_model}
        others |= {"--model": model} | dict.fromkeys(flags, True)
        refuse_given(
            others,
            "does not apply to --module, whose function builds model and inputs; leave it out",
        )
        _explain_module(module, row, batch, output)
        return
    prompt = reading.prompt(text, file)
    if batch:
        raise usage_error("--batch", "applies to --module only; leave it out")
    check_options(attention, model or "tiny", {"--set": settings, "--seed": seed}, flags)
    with working("running the model", len(prompt)):
        if attention is not None:
            run = mechanism(attention, prompt, settings, seed, row.target)
        else:
            model = model or _default_model(prompt)
            run = read_text(prompt, model, load_options, target=row.target, reading=reading)
    target = ExplainTarget(run, row)
    if output.list_heads:
        print_heads(target, output.json, console_of(output.color), output.lang)
        return
    explanation = target.explained()
    beside_run = None
    if output.beside or output.beside_model:
        if output.beside and reading.messages:
            raise usage_error("--beside", "is another text than --messages; give one of them")
        # --revision, --allow-missing, --ignore and --finite apply to the folder of --model only
        plain = LoadOptions(load_options.dtype, load_options.device)
        beside_run = read_text(
            reading.prompt(output.beside, None) if output.beside else prompt,
            output.beside_model or model or "tiny",
            plain if output.beside_model else load_options,
            target=row.target,
            reading=reading,
        )

    _write_output(explanation, partial(page_data, explanation, run, beside=beside_run), output)


def _default_model(text: str) -> str:
    """Return the model for a text where none is named, and say which one it is."""
    from regard.files.named_packages import NAMED_PACKAGES, is_installed
    from regard.language import translate

    # a script above U+2E80 is one of East Asia; SmolLM2 and MiniLM read English
    trained = ("gemma3",) if any(letter > "\u2e80" for letter in text) else ("smollm2", "minilm")
    name = next(filter(is_installed, trained), "tiny")
    note = translate("note: without --model, {name}, which is installed, reads the text", name=name)
    if name == "tiny":
        note = translate(
            "note: without --model, tiny reads the text, which knows few words; install a trained "
            "model: {install}",
            install=NAMED_PACKAGES[trained[0]].install,
        )
    typer.echo(note, err=True)
    return name


def _explain_module(name: str, row: Row, batch: int, output: Output) -> None:
    """Explain a row of a module of the user's own, or list its places."""
    from regard.cli import _module
    from regard.language import translate
    from regard.text_table import format_table

    query, key = _index_or_word(row.query or "-1"), row.key and _index_or_word(row.key)
    run = _module.run_module(name)
    if output.list_heads:
        places = _module.list_places(run)
        titles = [translate(title) for title in _module.PLACE_TITLES]
        rows = [titles, *([str(x) for x in place.values()] for place in places)]
        table = escape_controls(format_table(rows), keep="\n")
        typer.echo(json_format.dumps(places) if output.json else table)
        return
    place = row.place if row.place is not None else row.layer
    target = _module.choose_module_head(run, query, key, place, row.head, batch)
    explanation = _module.explain_module(run, target, query, key, batch)
    _write_output(explanation, partial(_module.page_data, run, explanation, batch=batch), output)


def _write_output(
    explanation: Explanation, page_of: Callable[[dict[str, Any]], dict[str, Any]], output: Output
) -> None:
    """Write the page and the figure if they were requested; print JSON or the text."""
    from regard.language import language, translate

    data, html, figure = explanation.as_dict(), output.html, output.figure
    if html is not None:
        from regard.view.html_page import write
        from regard.view.page import report_page

        size = write(html, report_page(page_of(data), output.lang or language()))
        line = translate(
            "{file}: {size}, {place}, head {head}",
            file=escape_controls(str(html)),
            size=units.size(size),
            place=explanation.place,
            head=explanation.head,
        )
        typer.echo(line, err=output.json)
    if figure is not None:
        from regard.view.heatmaps import draw_explanation

        size = draw_explanation(data, figure)
        typer.echo(f"{escape_controls(str(figure))}: {units.size(size)}", err=output.json)
    if output.json:
        typer.echo(json_format.dumps(data, allow_nan=False))
    elif html is None and figure is None:
        from regard.view.explanation_summary import show_summary
        from regard.view.explanation_text import show

        if output.full:
            show(data, console_of(output.color))
        else:
            show_summary(data, console_of(output.color), output.lang or language())


def read_text(
    text: Any,
    source: str,
    load_options: LoadOptions | None = None,
    *,
    target: str | None = None,
    reading: PromptOptions | None = None,
) -> ModelRun:
    """Run the model of a folder, of a name, or of a trained task on the text, and return the
    recorded run.
    """
    from dataclasses import replace

    from regard.inspect.metrics.text_fit import warn_about_text
    from regard.inspect.model_run import prepare_run
    from regard.language import translate

    if (Path(source) / "task.json").exists():
        if reading is not None and (flags := reading.flags_given()):
            raise usage_error(flags[0], "applies to a decoder, and this model is none")
        if load_options is not None and load_options.device not in (None, "cpu"):
            raise usage_error("--device", "a model that was trained on a task runs on the CPU here")
        return _run_task_model(text, source, target)
    model = load(source, LoadOptions() if load_options is None else load_options)
    prompt = text if reading is None else reading.read(model, [text])[0]
    run_on_text = prepare_run(model, prompt, target, last=1)
    _check_length(run_on_text)
    if isinstance(prompt, str) and (warning := warn_about_text(model, prompt)):
        typer.echo(translate("note: {note}", note=warning), err=True)
    return replace(run_on_text, name=Path(source).name or source)


def mechanism(
    name: str, text: str, settings: Sequence[str] | None, seed: int, target: str | None
) -> ModelRun:
    """Run a mechanism of the catalogue with random weights on the text, and return the recorded
    run.
    """
    from regard.inspect.explain.random_model import random_model
    from regard.nn.variants.registry import find_variant, parse_options

    options = parse_options(settings or (), find_variant(name))
    run = random_model(name, text, options=options, seed=seed, target=target)
    _check_length(run)
    return run


def _check_length(run: ModelRun) -> None:
    """Raise an error for a text that is too long, before the network runs."""
    longest = max(len(side.ids) for side in run.sequences.values())
    if longest > MAX_TOKENS:
        raise usage_error(
            None,
            "the text has {tokens}, and every pair of them is computed; the limit is {tokens2}; "
            "give a part of it",
            tokens=counted(longest, "token"),
            tokens2=counted(MAX_TOKENS, "token"),
        )


def check_options(
    attention: str | None,
    source: str,
    mechanism_options: dict[str, object],
    model_flags: Sequence[str],
) -> None:
    """Raise an error for options of a mechanism where there is a model, and the other way round."""
    if attention is None:
        refuse_given(
            mechanism_options,
            "applies only to a mechanism with random weights; name one, such as --attention gqa",
        )
    elif source != "tiny":
        raise usage_error(
            "--attention", "builds a network with random weights; leave out --model or --attention"
        )
    elif model_flags:
        raise usage_error(
            model_flags[0],
            "applies to a model that is loaded, but --attention builds a network with random "
            "weights; leave one of them out",
        )


def _run_task_model(text: str, folder: str, target: str | None) -> ModelRun:
    """Run a model that `regard train --task` has trained on a text, and return the recorded run."""
    import torch

    from regard.inspect.model_run import PretokenizedInput, prepare_run
    from regard.train.tasks.evaluate import Seq2SeqModel, generate_ids
    from regard.train.tasks.task import BOS, EOS, SPECIAL
    from regard.train.tasks.task_training import load as load_task

    network, task = load_task(folder)
    vocabulary_words = (*SPECIAL, *task.vocabulary.words)

    def as_words(ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(vocabulary_words[i] for i in ids)

    name, words = Path(folder).name, task.vocabulary.encode(task.tokenize(text))
    if task.kind == "causal":
        if target is not None:
            raise usage_error("--target", "the task continues one row; leave it out")
        return prepare_run(
            PretokenizedInput(network, (words, as_words(words)), None, name, as_words)
        )
    assert isinstance(network, Seq2SeqModel), "the model of a seq2seq task is a Seq2SeqModel"
    source = [*words, EOS]
    if target is None:
        answer = generate_ids(network, torch.tensor([source]), limit=2 * task.lengths[2] + 8)[0]
    else:
        answer = task.vocabulary.encode(target.split() if task.target_separator else tuple(target))
    target_ids = [BOS, *answer]
    return prepare_run(
        PretokenizedInput(
            network, (source, as_words(source)), (target_ids, as_words(target_ids)), name, as_words
        )
    )


class ExplainTarget:
    """The attention head, query and key to explain: those that were given, and a choice by rule for
    the others.
    """

    def __init__(self, read: ModelRun, row: Row) -> None:
        from regard.inspect import Choice
        from regard.inspect.explain.head_choice import (
            choose_head,
            find_token,
            name_mover,
            striking_query,
        )
        from regard.inspect.model_run import check_index

        self.read, self.place, self.call, self.key = read, row.place, row.call, None
        layer, head, place = row.layer, row.head, row.place
        site = read.site(place=place) if place else read.main_sites[0]
        query = striking_query(read) if row.query is None else _index_or_word(row.query)
        self.query_index = find_token(read.sequences[site.query_sequence], query)
        if row.key is not None:
            keys = read.sequences[site.key_sequence]
            self.key = find_token(keys, _index_or_word(row.key), "key")
        if layer is not None:
            layer = check_index("layer", layer, len(read.main_sites), "layer", "layers")
        if head is not None and (layer is not None or place is not None):
            self.choice = Choice(layer if layer is not None else site.layer, head, "")
        else:
            is_free = all(x is None for x in (layer, head, place, row.key, row.call))
            mover = name_mover(read, self.query_index) if is_free else None
            self.choice = mover or choose_head(
                read, self.query_index, layer=layer, head=head, place=place, key=self.key
            )

    def explained(self) -> Explanation:
        """Return the explanation, with the rule by which the head was chosen."""
        from dataclasses import replace

        from regard.inspect import explain as explain_run

        layer = None if self.place else self.choice.layer
        explanation = explain_run(
            self.read,
            layer=layer,
            place=self.place,
            head=self.choice.head,
            query=self.query_index,
            # the key that chose the head, unless one was given, or a call that may lack it
            key=self.choice.key if self.key is None and self.call is None else self.key,
            call=self.call,
        )
        return replace(explanation, where=replace(explanation.where, chosen_by=self.choice.rule))


def page_data(
    explanation: Explanation, read: ModelRun, data: dict[str, object], beside: ModelRun | None
) -> dict[str, Any]:
    """Return the data of the page with a recording of the whole run, opened at the explained query,
    and optionally another run to compare with.
    """
    from types import SimpleNamespace

    from regard.inspect.explain.captured_run import record_run
    from regard.inspect.report import report

    recording = record_run(read)
    names = [
        n
        for n in recording.places
        if n == explanation.place or n.startswith(f"{explanation.place}.")
    ]
    if not names:
        raise usage_error(
            "--html",
            "the page shows recorded softmax attention, but {mechanism} computes none; leave "
            "--html out, or give --json instead",
            mechanism=explanation.mechanism,
        )
    # if there are several calls, key indices of a call differ from columns of the place
    has_one_call = len(explanation.calls) == 1
    report_data = report(
        recording,
        b=None if beside is None else record_run(beside),
        model=SimpleNamespace(decoder=read.network),
        choice=(names[min(explanation.call, len(names) - 1)], explanation.head),
        query=explanation.query,
        key=explanation.key if has_one_call else None,
        title=read.text[:80],
        explanation=data,
    )
    # open the view of the explained weight, or the comparison; the page has the other views too
    report_data["meta"]["start"]["view"] = "cell" if beside is None else "compare"
    return report_data


def print_heads(target: ExplainTarget, json: bool, console: Console, lang: str | None) -> None:
    """Print the key with the largest weight in every head for the query."""
    from regard.inspect.explain.head_choice import strongest_keys_of_run
    from regard.language import language
    from regard.view.explanation_text import show_heads

    run = target.read
    site = run.site(place=target.place) if target.place else run.main_sites[0]
    weights, keys = (
        values.tolist() for values in strongest_keys_of_run(run, target.query_index, target.place)
    )
    tokens, query_token = (
        run.sequences[site.key_sequence].pieces,
        run.sequences[site.query_sequence].pieces[target.query_index],
    )
    rows: list[dict[str, object]] = [
        {"layer": n, "head": h, "key": key, "piece": tokens[key], "weight": weight}
        for n, layer in enumerate(zip(weights, keys, strict=True))
        for h, (weight, key) in enumerate(zip(*layer, strict=True))
    ]
    if json:
        result = {"query": target.query_index, "piece": query_token, "heads": rows}
        typer.echo(json_format.dumps(result))
    else:
        show_heads(
            f"{target.query_index} {query_token}",
            rows,
            (target.choice.layer, target.choice.head),
            console,
            lang or language(),
        )


def _index_or_word(query: str) -> int | str:
    try:
        return int(query)
    except ValueError:
        return query
