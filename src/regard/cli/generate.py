"""`regard generate`: continue a prompt."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated, Any

import typer

from regard.errors import ArgumentError

EPILOG = 'For example: regard generate "Return the" --max-tokens 40 --temperature 0.8 --seed 1'

Prompt = Annotated[str, typer.Argument(help="The text to continue; not empty.")]
Source = Annotated[
    str, typer.Option(help='"tiny", which comes with the package, or a model folder.')
]
MaxTokens = Annotated[int, typer.Option(help="Stop after as many new tokens.", min=0)]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token; larger is more random.", min=0)
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from the k likeliest tokens only.", min=1, show_default="all"),
]
Seed = Annotated[int, typer.Option(help="Of the sampling.")]
Stream = Annotated[bool, typer.Option(help="Print each word as soon as it is known.")]
Json = Annotated[bool, typer.Option("--json", help="Print the text and the figures as JSON.")]


def generate(
    prompt: Prompt,
    model: Source = "tiny",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    seed: Seed = 0,
    stream: Stream = True,
    json: Json = False,
) -> None:
    """Continue a prompt. Text goes to stdout; the speed and the size of the cache go to stderr."""
    import regard

    loaded = regard.load(model)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    try:
        going = loaded.generate(
            prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    at_once = stream and not json
    if at_once:
        typer.echo(prompt, nl=False)
    for piece in going:
        if at_once:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    figures: dict[str, Any] = {
        "tokens": len(going.ids),
        "seconds": round(going.seconds, 4),
        "tokens_per_second": round(going.tokens_per_second, 2),
        "cache_bytes": going.cache_bytes,
    }
    if json:
        told = {"prompt": prompt, "text": going.text, "ids": going.ids, **figures}
        typer.echo(json_format.dumps(told))
        return
    typer.echo("" if at_once else prompt + going.text)
    sys.stdout.flush()  # before what follows on standard error
    typer.echo(
        f"{len(going.ids)} tokens, {going.tokens_per_second:.1f} tokens/s, cache {going.cache_bytes:,} bytes",
        err=True,
    )
