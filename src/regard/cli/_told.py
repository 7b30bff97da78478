"""What `regard generate` prints: texts as they come, and what they cost."""

from __future__ import annotations

import json as json_format
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from regard.errors import ArgumentError
from regard.foreign import LINES, inert

if TYPE_CHECKING:
    from regard.models import Batch, Model, Seq2Seq, TextEncoder


def answer(
    model: TextEncoder | Seq2Seq,
    texts: list[str],
    max_tokens: int,
    beams: int,
    length_penalty: float,
    json: bool,
) -> None:
    """What an encoder-decoder makes of the texts: by beam search, or token by token where there is one beam."""
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


def tell(batch: Batch, *, at_once: bool, quiet: bool) -> None:
    """Run to the end, printing words as they come, or each text when it and all before it are finished.

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
    """Print the texts from `shown` on that are finished, up to the first that is not; how many are printed now."""
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


def search(
    model: Model, texts: list[str], options: Any, beams: int, length_penalty: float
) -> dict[str, Any]:
    """The best text of a beam search and its figures; all of them under "beams"."""
    from regard.models.generation import search as run

    if len(texts) > 1:
        raise ArgumentError(f"beams takes one prompt, and there are {len(texts)}")
    done = run(model, texts[0], options, beams=beams, length_penalty=length_penalty)
    best = done.found[0]
    return {
        "prompt": texts[0], "text": best.text, "ids": list(best.ids),
        "finished": "end" if best.ended else "length", "score": best.score,
        "beams": [found._asdict() for found in done.found],
        "tokens": len(best.ids), "prompt_tokens": done.prompt_tokens, "steps": done.steps,
        "seconds": round(done.seconds, 4), "prefill_seconds": round(done.prefill_seconds, 4),
        "decode_seconds": round(done.seconds - done.prefill_seconds, 4),
        "prefill_tokens_per_second": _speed(done.prompt_tokens / done.prefill_seconds if done.prompt_tokens else 0),
        "decode_tokens_per_second": _speed(done.steps / (done.seconds - done.prefill_seconds)),
        "tokens_per_second": round(len(best.ids) / done.seconds, 2),
        "cache_bytes": done.cache_bytes, "cache": options.room.cache,
    }  # fmt: skip


def _speed(x: float) -> float | None:
    """Tokens per second; None where nothing was read, or decoded."""
    return round(x, 2) if x else None


def sum_up(told: dict[str, Any]) -> None:
    """The figures in a line: reading a prompt and writing a token are two speeds."""
    score = f"score {told['score']:.3f}, " if "score" in told else ""
    read, wrote = told["prefill_tokens_per_second"], told["decode_tokens_per_second"]
    prompt = f"prompt of {told['prompt_tokens']}" + (f" at {read:,.1f} tokens/s" if read else "")
    decoding = (
        f"decoding at {wrote:,.1f} tokens/s" if wrote else "no token was decoded behind the first"
    )
    typer.echo(
        f"{told['tokens']} tokens, {score}{prompt}, {decoding}, {told['cache']} cache {told['cache_bytes']:,} bytes",
        err=True,
    )
