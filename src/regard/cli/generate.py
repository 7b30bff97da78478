"""`regard generate`: continue one prompt, or several at once."""

from __future__ import annotations

import json as json_format
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    AllowMissing,
    Dtype,
    Finite,
    Ignore,
    LoadOptions,
    Revision,
    Source,
    load,
)
from regard.errors import ArgumentError, FileError
from regard.files.regular import text
from regard.foreign import LINES, inert, told

if TYPE_CHECKING:
    from regard.models import Batch, Model, Seq2Seq, TextEncoder


def generate_seq2seq(
    model: TextEncoder | Seq2Seq,
    texts: list[str],
    max_tokens: int,
    beams: int,
    length_penalty: float,
    json: bool,
) -> None:
    """What an encoder-decoder makes of the texts: by beam search, or token by token where there is
    one beam.
    """
    from regard.models import Seq2Seq

    if not isinstance(model, Seq2Seq):
        raise ArgumentError(
            "the model is an encoder, which continues nothing; use regard.load(...).embed"
        )
    start = time.perf_counter()
    said = model.generate(texts, max_tokens=max_tokens, beams=beams, length_penalty=length_penalty)
    seconds = round(time.perf_counter() - start, 4)
    if json:
        rows = [{"prompt": a, "text": b} for a, b in zip(texts, said, strict=True)]
        typer.echo(json_format.dumps({"rows": rows, "seconds": seconds, "beams": beams}))
        return
    typer.echo("\n---\n".join(inert(text, keep=LINES) for text in said))
    sys.stdout.flush()
    typer.echo(f"{len(said)} texts in {seconds} s", err=True)


def print_batch(batch: Batch, *, at_once: bool, quiet: bool) -> None:
    """Run to the end, printing words as they come, or each text when it and all before it are
    finished.

    What a terminal would obey is shown by its number; --json has every text as it is.
    """
    if at_once:
        typer.echo(inert(batch.rows[0].prompt, keep=LINES), nl=False)
    shown = 0
    for _, piece in batch:
        if at_once:
            typer.echo(inert(piece, keep=LINES), nl=False)
            sys.stdout.flush()
        elif not quiet:
            shown = _finished(batch, shown)
    if at_once:
        typer.echo("")
    elif not quiet:
        _finished(batch, shown)


def _finished(batch: Batch, shown: int) -> int:
    """Print the texts from `shown` on that are finished, up to the first that is not; how many are
    printed now.
    """
    for row in batch.rows[shown:]:
        if row.finished is None:
            break
        if shown:
            typer.echo("---")
        typer.echo(inert(row.prompt + row.text, keep=LINES))
        shown += 1
    return shown


def figures(batch: Batch) -> dict[str, Any]:
    """One text and its figures, or several under "rows"."""
    rows = [
        {"prompt": row.prompt, "text": row.text, "ids": row.ids, "finished": row.finished}
        for row in batch.rows
    ]
    return {
        **(rows[0] if len(rows) == 1 else {"rows": rows}),
        "tokens": sum(len(row.ids) for row in batch.rows),
        "prompt_tokens": batch.prompt_tokens,
        "seconds": round(batch.seconds, 4),
        "prefill_seconds": round(batch.prefill_seconds, 4),
        "decode_seconds": round(batch.decode_seconds, 4),
        "prefill_tokens_per_second": _speed(batch.prefill_tokens_per_second),
        "decode_tokens_per_second": _speed(batch.decode_tokens_per_second),
        "tokens_per_second": round(batch.tokens_per_second, 2),
        "cache_bytes": batch.cache_bytes,
        "cache": batch.cache,
    }


def beam_search(
    model: Model, texts: list[str], options: Any, beams: int, length_penalty: float
) -> dict[str, Any]:
    """The best text of a beam search and its figures; all of them under "beams"."""
    from regard.models.generation import search as run

    if len(texts) > 1:
        raise ArgumentError(f"beams takes one prompt, and there are {len(texts)}")
    done = run(model, texts[0], options, beams=beams, length_penalty=length_penalty)
    best = done.found[0]
    return {
        "prompt": texts[0],
        "text": best.text,
        "ids": list(best.ids),
        "finished": "end" if best.ended else "length",
        "score": best.score,
        "beams": [found._asdict() for found in done.found],
        "tokens": len(best.ids),
        "prompt_tokens": done.prompt_tokens,
        "steps": done.steps,
        "seconds": round(done.seconds, 4),
        "prefill_seconds": round(done.prefill_seconds, 4),
        "decode_seconds": round(done.seconds - done.prefill_seconds, 4),
        "prefill_tokens_per_second": _speed(
            done.prompt_tokens / done.prefill_seconds if done.prompt_tokens else 0
        ),
        "decode_tokens_per_second": _speed(done.steps / (done.seconds - done.prefill_seconds)),
        "tokens_per_second": round(len(best.ids) / done.seconds, 2),
        "cache_bytes": done.cache_bytes,
        "cache": options.room.cache,
    }


def _speed(x: float) -> float | None:
    """Tokens per second; None where nothing was read, or decoded."""
    return round(x, 2) if x else None


def print_summary(told: dict[str, Any]) -> None:
    """The figures in a line: reading a prompt and writing a token are two speeds."""
    score = f"score {told['score']:.3f}, " if "score" in told else ""
    read, wrote = told["prefill_tokens_per_second"], told["decode_tokens_per_second"]
    prompt = f"prompt of {told['prompt_tokens']}" + (f" at {read:,.1f} tokens/s" if read else "")
    decoding = (
        f"decoding at {wrote:,.1f} tokens/s" if wrote else "no token was decoded behind the first"
    )
    typer.echo(
        f"{told['tokens']} tokens, {score}{prompt}, {decoding}, {told['cache']} cache "
        f"{told['cache_bytes']:,} bytes",
        err=True,
    )


EPILOG = 'For example: regard generate "Return the" --max-tokens 40 --temperature 0.8 --seed 1'

MAX_PROMPT_BYTES = 64 << 20
"""Bytes of a prompt, at most."""
CHOICE, SEARCH, CONTEXT = "How a token is chosen", "Beam search", "What the model keeps"

Prompts = Annotated[
    list[str] | None,
    typer.Argument(help="Texts to continue, as one batch; not empty.", metavar="PROMPT"),
]
PromptFile = Annotated[
    Path | None, typer.Option(help="A text file to continue, whole; - is standard input.")
]
MaxTokens = Annotated[int, typer.Option(help="Stop after as many new tokens.", min=0)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="End the text in front of this string; may be repeated. A line break is $'\\n' in "
        "most shells."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token; larger is more random.", min=0, rich_help_panel=CHOICE
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from the k likeliest tokens only.",
        min=1,
        show_default="all",
        rich_help_panel=CHOICE,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens whose sum first reaches p.",
        min=0,
        max=1,
        show_default="all",
        rich_help_panel=CHOICE,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample from tokens of at least p times the probability of the likeliest.",
        min=0,
        max=1,
        show_default="all",
        rich_help_panel=CHOICE,
    ),
]
Penalty = Annotated[
    float,
    typer.Option(
        help="Above 1 discourages tokens that stand in the text already.",
        min=0,
        rich_help_panel=CHOICE,
    ),
]
Seed = Annotated[
    int, typer.Option(help="Of the first prompt; the next have the next.", rich_help_panel=CHOICE)
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Search for the likeliest whole text, with so many beams.",
        min=1,
        show_default="off",
        rich_help_panel=SEARCH,
    ),
]
LengthPenalty = Annotated[
    float,
    typer.Option(
        help="Above 0 favours long texts: sum of log p / n^penalty.", rich_help_panel=SEARCH
    ),
]
Chunk = Annotated[
    int,
    typer.Option(
        help="Read the prompt in pieces of so many tokens.", min=1, rich_help_panel=CONTEXT
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="The most tokens, prompt included.",
        min=1,
        show_default="no bound",
        rich_help_panel=CONTEXT,
    ),
]
CacheKind = Annotated[
    str | None,
    typer.Option(
        help="growing, fixed, paged, quantised (refuse more than --max-context), ring or "
        "streaming (forget).",
        show_default="growing",
        rich_help_panel=CONTEXT,
    ),
]
Stream = Annotated[bool, typer.Option(help="Print each word as soon as it is known.")]
Json = Annotated[bool, typer.Option("--json", help="Print the texts and the figures as JSON.")]


def generate(
    prompts: Prompts = None,
    prompt_file: PromptFile = None,
    model: Source = "tiny",
    max_tokens: MaxTokens = 64,
    stop: Stop = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    beams: Beams = None,
    length_penalty: LengthPenalty = 1.0,
    chunk: Chunk = 512,
    max_context: MaxContext = None,
    cache: CacheKind = None,
    dtype: Dtype = None,
    revision: Revision = None,
    allow_missing: AllowMissing = None,
    ignore: Ignore = None,
    finite: Finite = False,
    stream: Stream = True,
    json: Json = False,
) -> None:
    """Continue a prompt, or answer it (encoder-decoders). Text goes to stdout; speed and cache size
    go to stderr.
    """
    from regard.models import Model
    from regard.models.generation import Batch, Options, Room, Sampling

    texts = _texts(prompts, prompt_file)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    try:
        options = Options(
            max_tokens,
            tuple(stop or ()),
            chunk,
            Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            Room(cache or "growing", max_context),
        )
        loaded = load(model, LoadOptions(dtype, allow_missing, ignore, finite, revision))
        if not isinstance(loaded, Model):
            generate_seq2seq(loaded, texts, max_tokens, beams or 1, length_penalty, json)
            return
        if beams is None:
            batch = Batch(loaded, texts, options)
        else:
            told = beam_search(loaded, texts, options, beams, length_penalty)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint=_option(str(error))) from error
    if beams is None:
        print_batch(batch, at_once=stream and not json and len(texts) == 1, quiet=json)
        told = figures(batch)
    elif not json:
        typer.echo(inert(texts[0] + told["text"], keep=LINES))
    if json:
        typer.echo(json_format.dumps(told))
        return
    sys.stdout.flush()  # before what follows on standard error
    print_summary(told)


def _texts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts, from the command line or from a file."""
    if bool(prompts) == (file is not None):
        raise typer.BadParameter("give a prompt, or --prompt-file", param_hint="PROMPT")
    if file is None:
        return prompts or []
    try:
        if str(file) != "-":
            return [text(file, MAX_PROMPT_BYTES)]
        raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        if len(raw) > MAX_PROMPT_BYTES:
            raise FileError(f"standard input has more than {MAX_PROMPT_BYTES} bytes")
        return [raw.decode("utf-8")]
    except FileError as error:
        raise typer.BadParameter(str(error), param_hint="--prompt-file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"standard input: {told(error)}", param_hint="--prompt-file"
        ) from error


def _option(message: str) -> str | None:
    """The option that an error speaks of first."""
    names = (
        "max_tokens|stop|temperature|top_k|top_p|min_p|repetition_penalty|beams|length_penalty|"
        "chunk|max_context|cache"
    )
    found = re.search(rf"\b({names})\b", message)
    return None if found is None else f"--{found[1].replace('_', '-')}"
