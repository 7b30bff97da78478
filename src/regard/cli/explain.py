"""`regard explain`: one query and one key of a text, step by step, in the numbers that the kernel
computed.
"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import units
from regard.cli.options import (
    AllowMissing,
    Dtype,
    Finite,
    How,
    Ignore,
    Revision,
    Source,
    check_files,
    load,
)
from regard.errors import ArgumentError
from regard.foreign import inert

if TYPE_CHECKING:
    from rich.console import Console

    from regard.inspect import Explanation
    from regard.inspect.explain.reading import Reading

EPILOG = (
    'For example: regard explain "a fluffy blue creature roamed the verdant forest" --query '
    "creature"
)
WHERE, OUT, MECHANISM = "Where to look", "What to write", "A mechanism with random weights"
LONGEST = 1 << 14
"""Tokens of a text that is explained, at most: they take half a minute on a small model."""

Text = Annotated[str, typer.Argument(help="The text, at least one token.")]
Layer = Annotated[
    int | None,
    typer.Option(
        help="The layer, from 0; negative counts from the end.",
        show_default="chosen",
        rich_help_panel=WHERE,
    ),
]
Head = Annotated[
    int | None,
    typer.Option(
        help="The query head, from 0; negative counts from the end.",
        show_default="chosen",
        rich_help_panel=WHERE,
    ),
]
Query = Annotated[
    str,
    typer.Option(
        help="The query token: its index (-1 is the last), or a word of the text: its last token.",
        rich_help_panel=WHERE,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help="The key, likewise.", show_default="the strongest other one", rich_help_panel=WHERE
    ),
]
Place = Annotated[
    str | None,
    typer.Option(
        help="The attention by its place, such as decoder.layers.0.cross, instead of --layer.",
        show_default="by --layer",
        rich_help_panel=WHERE,
    ),
]
Call = Annotated[
    str | None,
    typer.Option(
        help="Of several calls at a place (branches, passes), which: a name or a number.",
        show_default="the sharpest",
        rich_help_panel=WHERE,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Of an encoder-decoder: what it is to have said.",
        show_default="its answer",
        rich_help_panel=WHERE,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="Look at this mechanism of the catalogue (regard describe) instead of a model.",
        show_default="a model",
        rich_help_panel=MECHANISM,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Its options as name=value. Repeatable.",
        show_default="a small example's",
        rich_help_panel=MECHANISM,
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random weights.", rich_help_panel=MECHANISM)]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Write one self-contained page to this file instead.",
        show_default="no page",
        rich_help_panel=OUT,
    ),
]
Figure = Annotated[
    Path | None,
    typer.Option(
        help="Draw the head's pattern and the row to this .svg, .png or .pdf.",
        show_default="no figure",
        rich_help_panel=OUT,
    ),
]
Lang = Annotated[
    str | None,
    typer.Option(
        help="The language of the page: en or zh.", show_default="the locale's", rich_help_panel=OUT
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        help="Another text, to compare with on the page (--html).",
        show_default="none",
        rich_help_panel=OUT,
    ),
]
BesideModel = Annotated[
    str | None,
    typer.Option(
        help="Another model, to compare with on the page: a name or a folder.",
        show_default="the same",
        rich_help_panel=OUT,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print every number as JSON.", rich_help_panel=OUT)
]
List = Annotated[
    bool,
    typer.Option(
        "--list",
        help="List what every head looks at from the query, and stop.",
        rich_help_panel=OUT,
    ),
]
Color = Annotated[
    bool | None,
    typer.Option(
        "--color/--no-color", help="Colours.", show_default="on a terminal", rich_help_panel=OUT
    ),
]


def explain(
    text: Text,
    layer: Layer = None,
    head: Head = None,
    query: Query = "-1",
    key: Key = None,
    place: Place = None,
    call: Call = None,
    target: Target = None,
    model: Source = "tiny",
    attention: Attention = None,
    settings: Set = None,
    seed: Seed = 0,
    html: Html = None,
    lang: Lang = None,
    beside: Beside = None,
    beside_model: BesideModel = None,
    figure: Figure = None,
    json: Json = False,
    list_heads: List = False,
    color: Color = None,
    dtype: Dtype = None,
    revision: Revision = None,
    allow_missing: AllowMissing = None,
    ignore: Ignore = None,
    finite: Finite = False,
) -> None:
    """Follow one query and one key through one attention head, number by number: inputs, scores,
    softmax, values, output.

    A layer or head that is not given is chosen: the head that looks hardest at the key, or at one
    other token than the first.
    """
    check_files({"--html": html}, pictures={"--figure": figure})
    _check_lang(lang)
    if html is None and (beside or beside_model):
        raise typer.BadParameter("compares on the page; add --html FILE", param_hint="--beside")
    how = How(dtype, allow_missing, ignore, finite, revision)
    check(attention, model, {"--set": settings, "--seed": seed}, how)
    try:
        if attention is not None:
            found = mechanism(attention, text, settings, seed, target)
        else:
            found = read(text, model, how, target=target)
        look = Look(found, query, key, layer, head, place)
        if list_heads:
            print_heads(look, json, _console(color))
            return
        told = look.explained(call)
        other = None
        if beside or beside_model:
            # options that speak of one folder are that folder's; another model has its own dtype
            # only
            beside_how = How(dtype) if beside_model else how
            other = read(beside or text, beside_model or model, beside_how, target=target)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    _give(told, (found, other), html, figure, lang, json, color)


def _check_lang(lang: str | None) -> None:
    if lang is not None:
        from regard.view.report.lang import check_language

        try:
            check_language(lang)
        except ArgumentError as error:
            raise typer.BadParameter(str(error), param_hint="--lang") from error


def _give(
    found: Explanation,
    reads: tuple[Reading, Reading | None],
    html: Path | None,
    figure: Path | None,
    lang: str | None,
    json: bool,
    color: bool | None,
) -> None:
    """Write the page and the figure where they were asked for; print JSON, or the terminal page."""
    data = found.as_dict()
    if html is not None:
        from regard.view.html import write

        size = write(html, page(found, reads[0], data, lang, reads[1]))
        typer.echo(
            f"{inert(str(html))}: {units.size(size)}, layer {found.layer}, head {found.head}",
            err=json,
        )
    if figure is not None:
        from regard.view.figure import draw

        typer.echo(f"{inert(str(figure))}: {units.size(draw(data, figure))}", err=json)
    if json:
        typer.echo(json_format.dumps(data, allow_nan=False))
    elif html is None and figure is None:
        from regard.view.explanation import show

        show(data, _console(color))


def _console(color: bool | None) -> Console:
    """A console of 80 columns; colours as asked, else on a terminal that wants them."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a glyph shows "?"
    if color is None:
        return Console(width=80)
    if color:
        return Console(width=80, force_terminal=True, no_color=False, color_system="truecolor")
    return Console(width=80, force_terminal=False, no_color=True, color_system=None)


def read(text: str, source: str, how: How | None = None, *, target: str | None = None) -> Reading:
    """A reading of the text by the model of a folder or a name, or by the model of a trained
    task.
    """
    from dataclasses import replace

    from regard.inspect.explain.reading import reading

    if (Path(source) / "task.json").exists():
        return _task(text, source, target)
    found = reading(load(source, How() if how is None else how), text, target)
    _check_length(found)
    return replace(found, name=Path(source).name or source)


def mechanism(
    name: str, text: str, settings: Sequence[str] | None, seed: int, target: str | None
) -> Reading:
    """A reading of the text by a mechanism of the catalogue, with random weights."""
    from regard.inspect.explain.random_model import random_model
    from regard.nn.variants.registry import find, parse

    options = parse(settings or (), find(name))
    found = random_model(name, text, options=options, seed=seed, target=target)
    _check_length(found)
    return found


def _check_length(found: Reading) -> None:
    """Refuse a text whose every pair of tokens nobody would wait for, before the network runs.

    Raises:
        ArgumentError: it has more than `LONGEST` tokens.
    """
    longest = max(len(side.ids) for side in found.sides.values())
    if longest > LONGEST:
        raise ArgumentError(
            f"the text has {longest:,} tokens, and every pair of them is looked at; at most "
            f"{LONGEST:,} are explained: give a part of it"
        )


def check(attention: str | None, source: str, only: dict[str, Any], how: How) -> None:
    """Refuse options that belong to a mechanism where there is a model, and the other way round.

    >>> check("mqa", "tiny", {"--set": None}, How())
    """
    if attention is None:
        for flag, value in only.items():
            if value:
                raise typer.BadParameter(
                    "is for a mechanism with random weights; name one: --attention gqa",
                    param_hint=flag,
                )
    elif source != "tiny":
        raise typer.BadParameter(
            "makes a network of its own; leave --model out, or --attention",
            param_hint="--attention",
        )
    elif given := how.given():
        raise typer.BadParameter(
            "is for a model that is loaded, and --attention makes a network of its own; leave one "
            "of the two out",
            param_hint=given[0],
        )


def _task(text: str, folder: str, target: str | None) -> Reading:
    """What a model of a task says to a text, and where it looks meanwhile."""
    import torch

    from regard.inspect.explain.reading import Words, reading
    from regard.train.tasks.evaluate import Seq2SeqModel, generate_ids
    from regard.train.tasks.task import BOS, EOS, SPECIAL
    from regard.train.tasks.task_training import load as load_task

    network, task = load_task(folder)
    known = (*SPECIAL, *task.vocabulary.words)

    def named(ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(known[i] for i in ids)

    name, words = Path(folder).name, task.vocabulary.encode(task.tokenize(text))
    if task.kind == "causal":
        if target is not None:
            raise typer.BadParameter(
                "the task continues one row; leave it out", param_hint="--target"
            )
        return reading(Words(network, (words, named(words)), None, name, named))
    assert isinstance(network, Seq2SeqModel), "tasks of pairs are given to nothing else"
    source = [*words, EOS]
    if target is None:
        said = generate_ids(network, torch.tensor([source]), limit=2 * task.lengths[2] + 8)[0]
    else:
        said = task.vocabulary.encode(target.split() if task.target_separator else tuple(target))
    spoken = [BOS, *said]
    return reading(Words(network, (source, named(source)), (spoken, named(spoken)), name, named))


class Look:
    """Where to look: what was asked for, and what the rule chooses where nothing was."""

    def __init__(
        self,
        read: Reading,
        query: str,
        key: str | None,
        layer: int | None,
        head: int | None,
        place: str | None,
    ) -> None:
        from regard.inspect import Choice, check_index
        from regard.inspect.explain.choose import find_token, strongest

        self.read, self.place, self.key = read, place, None
        if place is not None and layer is not None:
            raise typer.BadParameter("names the layer too; leave --layer out", param_hint="--place")
        site = read.site(place=place) if place else read.main[0]
        self.i = find_token(read.sides[site.rows], _index_or_word(query))
        if key is not None:
            self.key = find_token(read.sides[site.columns], _index_or_word(key), "key")
        if layer is not None:
            layer = check_index("layer", layer, len(read.main), "layer", "layers")
        if head is not None and (layer is not None or place is not None):
            self.choice = Choice(layer if layer is not None else site.layer, head, "")
        else:
            self.choice = strongest(read, self.i, layer=layer, head=head, place=place, key=self.key)

    def explained(self, call: str | None) -> Explanation:
        """The explanation, with the rule that chose."""
        from dataclasses import replace

        from regard.inspect import explain as explain_reading

        layer = None if self.place else self.choice.layer
        found = explain_reading(
            self.read,
            layer=layer,
            place=self.place,
            head=self.choice.head,
            query=self.i,
            key=self.key,
            call=call,
        )
        return replace(found, where=replace(found.where, chosen_by=self.choice.rule))


def page(
    found: Explanation,
    read: Reading,
    data: dict[str, Any],
    lang: str | None,
    beside: Reading | None,
) -> str:
    """The page over a recording of the whole run, open at what is explained; and another run to
    compare it with.
    """
    from types import SimpleNamespace

    from regard.inspect.explain.capture import recorded
    from regard.inspect.report import report
    from regard.view.report import page as page_of
    from regard.view.report.lang import of_locale

    recording = recorded(read)
    names = [n for n in recording.places if n == found.place or n.startswith(f"{found.place}.")]
    if not names:
        raise typer.BadParameter(
            f"the page is over recorded softmax attention, and {found.mechanism} ran none; print "
            "to the terminal, or give --json",
            param_hint="--html",
        )
    plain = len(found.calls) == 1  # then keys of the call are columns of the place
    made = report(
        recording,
        b=None if beside is None else recorded(beside),
        model=SimpleNamespace(decoder=read.network),
        choice=(names[min(found.call, len(names) - 1)], found.head),
        query=found.query,
        key=found.key if plain else None,
        title=read.text[:80],
        explanation=data,
    )
    # what was asked for; the atlas is a click away
    made["meta"]["start"]["view"] = "cell" if beside is None else "compare"
    return page_of(made, lang or of_locale())


def print_heads(look: Look, json: bool, console: Console) -> None:
    """What every head looks at from the query."""
    from regard.inspect.explain.choose import looks
    from regard.view.explanation import show_heads

    read = look.read
    site = read.site(place=look.place) if look.place else read.main[0]
    weights, keys = (found.tolist() for found in looks(read, look.i, look.place))
    pieces, named = read.sides[site.columns].pieces, read.sides[site.rows].pieces[look.i]
    rows: list[dict[str, Any]] = [
        {"layer": n, "head": h, "key": key, "piece": pieces[key], "weight": weight}
        for n, layer in enumerate(zip(weights, keys, strict=True))
        for h, (weight, key) in enumerate(zip(*layer, strict=True))
    ]
    if json:
        typer.echo(json_format.dumps({"query": look.i, "piece": named, "heads": rows}))
    else:
        show_heads(f"{look.i} {named}", rows, (look.choice.layer, look.choice.head), console)


def _index_or_word(query: str) -> int | str:
    try:
        return int(query)
    except ValueError:
        return query
