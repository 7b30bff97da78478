"""The command `regard generate`, which continues one prompt, or several at once."""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from regard import units
from regard.cli.options import (
    JSON,
    SOURCE,
    WEIGHTS,
    LoadOptions,
    PromptOptions,
    ProposalOptions,
    SamplingOptions,
    argument,
    grouped,
    load,
    note,
    note_names,
    option,
    usage_error,
)
from regard.errors import ArgumentError, FileError
from regard.files.reading import read_text
from regard.language import translate, translate_count
from regard.untrusted_text import MULTILINE, error_text, escape_controls

if TYPE_CHECKING:
    from regard.models import BatchGeneration, Model, Seq2Seq


def generate_seq2seq(
    model: Seq2Seq,
    texts: list[str],
    max_tokens: int,
    beams: int,
    length_penalty: float,
    json: bool,
) -> None:
    """Print the texts that an encoder-decoder generates, by beam search, or greedily if there is
    one beam.
    """
    start = time.perf_counter()
    answers = model.generate(
        texts, max_tokens=max_tokens, beams=beams, length_penalty=length_penalty
    )
    seconds = round(time.perf_counter() - start, 4)
    if json:
        rows = [
            {"prompt": prompt, "text": answer}
            for prompt, answer in zip(texts, answers, strict=True)
        ]
        typer.echo(json_format.dumps({"rows": rows, "seconds": seconds, "beams": beams}))
        return
    typer.echo("\n---\n".join(escape_controls(text, keep=MULTILINE) for text in answers))
    sys.stdout.flush()
    count = translate_count(len(answers), "text")
    note("{texts} in {seconds}", texts=count, seconds=units.seconds(seconds))


def print_batch(
    batch: BatchGeneration, *, at_once: bool, quiet: bool, with_prompt: bool = True
) -> None:
    """Generate the whole batch, and print words as they are generated, or each text when it and
    all texts before it are finished.

    Control characters are escaped.
    """
    if at_once and with_prompt:
        typer.echo(escape_controls(batch.rows[0].prompt, keep=MULTILINE), nl=False)
    shown = 0
    for _, piece in batch:
        if at_once:
            typer.echo(escape_controls(piece, keep=MULTILINE), nl=False)
            sys.stdout.flush()
        elif not quiet:
            shown = _print_finished(batch, shown, with_prompt=with_prompt)
    if at_once:
        typer.echo("")
    elif not quiet:
        _print_finished(batch, shown, with_prompt=with_prompt)


def _print_finished(batch: BatchGeneration, shown: int, *, with_prompt: bool) -> int:
    """Print the texts from index `shown` on that are finished, up to the first that is not; return
    how many are printed now.
    """
    for row in batch.rows[shown:]:
        if row.finished is None:
            break
        if shown:
            typer.echo("---")
        prompt = row.prompt if with_prompt else ""
        typer.echo(escape_controls(prompt + row.text, keep=MULTILINE))
        shown += 1
    return shown


def figures(batch: BatchGeneration) -> dict[str, object]:
    """Return the figures of a batch for --json: one text by its fields, or several under "rows"."""
    rows = [
        {"prompt": row.prompt, "text": row.text, "ids": row.ids, "finished": row.finished}
        for row in batch.rows
    ]
    proposed = batch.speculation
    return {
        **(rows[0] if len(rows) == 1 else {"rows": rows}),
        **({} if proposed is None else {"proposed_tokens": proposed.proposed}),
        **({} if proposed is None else {"accepted_tokens": proposed.accepted}),
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


def _check_encoder_decoder(options: Any) -> None:
    """Raise for what an encoder-decoder, which is read by beams or by one, does not have."""
    from regard.models.generation.beam_search import check_beam_options

    if options.cuda_graph:
        raise usage_error(
            "--cuda-graph",
            "captures the step of a decoder, and this model is an encoder-decoder; leave "
            "--cuda-graph out",
        )
    if options.speculates:
        raise usage_error(
            None,
            "--speculate and --draft propose tokens to a decoder, and this model is an "
            "encoder-decoder; leave them out",
        )
    check_beam_options(options)


def beam_search(
    model: Model, texts: list[str], options: Any, beams: int, length_penalty: float
) -> dict[str, Any]:
    """Return the best text of a beam search with its figures, and all texts under "beams"."""
    from regard.models.generation import beam_search_text as run

    if len(texts) > 1:
        raise usage_error(
            "--beams",
            "takes one prompt, but there are {n}; give one of them, or leave --beams out",
            n=len(texts),
        )
    result = run(model, texts[0], options, beams=beams, length_penalty=length_penalty)
    best = result.completions[0]
    return {
        "prompt": texts[0],
        "text": best.text,
        "ids": list(best.ids),
        "finished": "end" if best.ended else "length",
        "score": best.score,
        "beams": [candidate._asdict() for candidate in result.completions],
        "tokens": len(best.ids),
        "prompt_tokens": result.prompt_tokens,
        "steps": result.steps,
        "seconds": round(result.seconds, 4),
        "prefill_seconds": round(result.prefill_seconds, 4),
        "decode_seconds": round(result.seconds - result.prefill_seconds, 4),
        "prefill_tokens_per_second": _speed(
            result.prompt_tokens / result.prefill_seconds if result.prompt_tokens else 0
        ),
        "decode_tokens_per_second": _speed(
            result.steps / (result.seconds - result.prefill_seconds)
        ),
        "tokens_per_second": round(len(best.ids) / result.seconds, 2),
        "cache_bytes": result.cache_bytes,
        "cache": options.cache_config.cache,
    }


def _speed(x: float) -> float | None:
    """Return tokens per second, or None if no token was processed."""
    return round(x, 2) if x else None


def print_summary(result: dict[str, Any]) -> None:
    """Print the figures on one line of standard error, with separate speeds of reading the prompt
    and of decoding.
    """
    prefill_speed, decode_speed = (
        result["prefill_tokens_per_second"],
        result["decode_tokens_per_second"],
    )
    parts = [translate_count(result["tokens"], "token")]
    if "score" in result:
        parts.append(translate("score {score}", score=f"{result['score']:.3f}"))
    n = result["prompt_tokens"]
    parts.append(
        translate("prompt of {n} at {speed} tokens/s", n=n, speed=f"{prefill_speed:,.1f}")
        if prefill_speed
        else translate("prompt of {n}", n=n)
    )
    parts.append(
        translate("decoding at {speed} tokens/s", speed=f"{decode_speed:,.1f}")
        if decode_speed
        else translate("no token was decoded after the first")
    )
    size = units.size(result["cache_bytes"])
    if "proposed_tokens" in result:
        n, m = result["accepted_tokens"], result["proposed_tokens"]
        parts.append(translate("{n} of {m} proposed tokens accepted", n=n, m=m))
    parts.append(translate("{kind} cache of {size}", kind=result["cache"], size=size))
    note(translate(", ").join(parts))


EPILOG = 'For example: regard generate "Return the" --max-tokens 40 --temperature 0.8 --seed 1'

MAX_PROMPT_BYTES = 64 << 20
"""The maximum size in bytes of a prompt."""
search_option = partial(option, panel="Beam search")
context_option = partial(option, panel="Context and cache")


@grouped
def generate(
    prompts: list[str] | None = argument(
        "Texts to continue, as one batch; none may be empty.", metavar="PROMPT"
    ),
    prompt_file: Path | None = option("Text file to continue; - is standard input."),
    model: str = SOURCE,
    max_tokens: int = option("Maximum number of new tokens.", default=64, min=0),
    stop: list[str] | None = option(
        "Stop the text before this string. Repeatable. A line break is $'\\n' in most shells."
    ),
    *,
    reading: PromptOptions,
    sampling: SamplingOptions,
    proposals: ProposalOptions,
    beams: int | None = search_option(
        "Use beam search with this many beams, which looks for the most likely whole text.",
        shown="off",
        min=1,
    ),
    length_penalty: float = search_option(
        "Values above 0 favour long texts: the score is sum of log p / n^penalty.", default=1.0
    ),
    chunk: int = context_option(
        "Maximum number of prompt tokens that are processed at once.", default=512, min=1
    ),
    max_context: int | None = context_option(
        "Maximum number of tokens, prompt included.", shown="no limit", min=1
    ),
    cache: str | None = context_option(
        "Kind of KV cache: growing, fixed, paged, quantized or fp8, which refuse more tokens "
        "than --max-context; ring or streaming, which drop old tokens; h2o, tova, snapkv, "
        "key_norm, keydiff, adakv, pyramidkv or expected_attention, which drop the tokens "
        "that a rule finds least important; quest, which keeps all and reads some.",
        shown="growing",
    ),
    cuda_graph: bool = context_option(
        "Capture the step that decodes a token as a CUDA graph, and run it again for every "
        "token; needs --device cuda.",
        "--cuda-graph",
        default=False,
    ),
    parallel: Literal["context"] | None = context_option(
        "Divide the tokens of the prompt and the cache among the processes that torchrun "
        "starts: torchrun --standalone --nproc-per-node 4 -m regard generate ... --parallel "
        "context.",
        shown="one process",
    ),
    weights: str | None = WEIGHTS,
    stream: bool = option("Print each word as soon as it is generated.", default=True),
    json: bool = JSON,
    load_options: LoadOptions,
) -> None:
    """Continue a prompt, or answer it with an encoder-decoder. The text goes to standard output;
    speed and cache size go to standard error.
    """
    from regard.models import Model, TextEncoder
    from regard.models.generation import (
        BatchGeneration,
        CacheConfig,
        GenerationOptions,
    )
    from regard.models.generation.beam_search import check_beam_options
    from regard.nn import stack_experts

    with _over_ranks(parallel):
        has_texts = bool(prompts) or prompt_file is not None
        texts = reading.prompts(lambda: _texts(prompts, prompt_file), has_texts=has_texts)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
        options = GenerationOptions(
            max_tokens,
            tuple(stop or ()),
            chunk,
            sampling.params(),
            CacheConfig(cache or "growing", max_context),
            cuda_graph,
            bool(reading.special),
            **proposals.chosen(load_options),
        )
        if beams is not None:
            check_beam_options(options)
        loaded = load(model, replace(load_options, weights=weights))
        if isinstance(loaded, TextEncoder):
            raise usage_error(
                "--model",
                "is an encoder, which generates no text; its vectors: regard.load({name}).embed",
                name=repr(model),
            )
        if not isinstance(loaded, Model):
            _check_encoder_decoder(options)
            generate_seq2seq(
                loaded, reading.read(loaded, texts), max_tokens, beams or 1, length_penalty, json
            )
            return
        if reading.special is None and loaded.has_tokenizer:
            note_names(loaded, texts)
        if cuda_graph:
            stack_experts(loaded.decoder)
        if beams is None:
            batch = BatchGeneration(loaded, texts, options)
        else:
            result = beam_search(loaded, texts, options, beams, length_penalty)
        if beams is None:
            at_once, with_prompt = (
                stream and not json and len(texts) == 1,
                not (reading.chat or reading.messages),
            )
            print_batch(batch, at_once=at_once, quiet=json, with_prompt=with_prompt)
            result = figures(batch)
        elif not json:
            prompt = texts[0] if isinstance(texts[0], str) else ""
            typer.echo(escape_controls(prompt + result["text"], keep=MULTILINE))
        if json:
            typer.echo(json_format.dumps(result))
            return
        sys.stdout.flush()  # so that the text comes before the summary on standard error
        print_summary(result)


@contextmanager
def _over_ranks(parallel: str | None) -> Iterator[None]:
    """Run the block over the ranks that torchrun started, of which only the first prints."""
    if parallel is None:
        yield
        return
    import torch.distributed as dist

    from regard.parallel import generation
    from regard.parallel.communication import join_torchrun

    join_torchrun("generate")
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(generation())
        if dist.get_rank():
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def _texts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """Return the prompts from the command line or from a file."""
    if bool(prompts) == (file is not None):
        raise usage_error("PROMPT", "give either a prompt or --prompt-file")
    if file is None:
        return prompts or []
    try:
        if str(file) != "-":
            return [read_text(file, MAX_PROMPT_BYTES)]
        raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        if len(raw) > MAX_PROMPT_BYTES:
            raise FileError(f"standard input has more than {MAX_PROMPT_BYTES} bytes")
        return [raw.decode("utf-8")]
    except FileError as error:
        raise ArgumentError(str(error), argument="prompt_file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(
            "--prompt-file", "standard input: {value}", value=error_text(error)
        ) from error
