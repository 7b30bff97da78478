"""The command `regard chat`, a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from regard.cli.options import (
    WEIGHTS,
    LoadOptions,
    ProposalOptions,
    SamplingOptions,
    argument,
    grouped,
    load,
    note,
    option,
)
from regard.errors import ArgumentError
from regard.untrusted_text import MULTILINE, error_text, escape_controls

if TYPE_CHECKING:
    from regard.models.generation import Conversation

EPILOG = "For example: regard chat smollm2"
RESET, EXIT = "/reset", "/exit"
MAX_LINE = 1 << 20
"""The maximum number of characters of a message."""


@grouped
def chat(
    model: str = argument(
        'The model: "smollm2", a Hugging Face folder, a GGUF file, or org/name on the hub.', ...
    ),
    system: str | None = option(
        "A message before all others, which says how to answer.", shown="that of the template"
    ),
    max_tokens: int = option("Maximum number of tokens of an answer.", default=512, min=1),
    *,
    sampling: SamplingOptions,
    proposals: ProposalOptions,
    stats: bool = option("Print the speed after each answer.", "--stats", default=False),
    weights: str | None = WEIGHTS,
    load_options: LoadOptions,
) -> None:
    """Talk with a model in its own chat template: each line is a message, and the answer is printed
    while it is generated. The caches stay, so that a turn reads only what is new.

    /reset begins again, /exit or Ctrl-D leaves, and Ctrl-C ends an answer. Lines from a pipe are
    answered one by one.
    """
    from regard.models import Model
    from regard.models.generation import Conversation, GenerationOptions

    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    options = GenerationOptions(
        max_tokens, sampling=sampling.params(), **proposals.chosen(load_options)
    )
    loaded = load(model, replace(load_options, weights=weights), Model)
    conversation = Conversation(loaded, system=system, options=options)
    if sys.stdin.isatty():
        note("each line is a message; /reset begins again, /exit leaves, Ctrl-C ends an answer")
    while (line := _next_line()) is not None:
        text = line.strip()
        if text == EXIT:
            break
        if text == RESET:
            conversation.reset()
            note("the conversation begins again")
        elif text.startswith("/") and text[1:].isalpha():
            note("{command} is no command; /reset and /exit are", command=text)
        elif text:
            _answer(conversation, text)
            if stats:
                _print_speed(conversation)


def _next_line() -> str | None:
    """Return the next line of standard input, or None at its end."""
    try:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (keys that edit the line)
            return input("> ")
        line = sys.stdin.readline(MAX_LINE)
    except KeyboardInterrupt:
        typer.echo("")
        return ""
    except EOFError:
        typer.echo("")
        return None
    return line or None


def _answer(conversation: Conversation, text: str) -> None:
    """Print the answer to a message; Ctrl-C ends it."""
    try:
        with closing(conversation.answer(text)) as pieces:
            for piece in pieces:
                typer.echo(escape_controls(piece, keep=MULTILINE), nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except ArgumentError as error:  # the template refuses the message; the next one may be fine
        note(error_text(error))
        return
    typer.echo("")
    generation = conversation.generation
    if generation is not None and generation.finished == "length":
        note("the answer reached --max-tokens")


def _print_speed(conversation: Conversation) -> None:
    """Print the speed of the last answer on standard error."""
    x = conversation.generation
    if x is not None and x.ids:  # Ctrl-C may have come before the first token
        note(
            "read {n} at {reading:.1f} tokens/s, wrote {m} at {writing:.1f} tokens/s",
            n=x.prompt_tokens,
            reading=x.prefill_tokens_per_second,
            m=len(x.ids),
            writing=x.decode_tokens_per_second,
        )
