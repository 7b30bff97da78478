"""Beam search from a prompt: the texts that a model finds likeliest as a whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.generation.batch import Options
from regard.models.generation.beam import beam_search
from regard.models.generation.context import Context, padded
from regard.models.generation.reading import encoded
from regard.models.generation.room import Room

if TYPE_CHECKING:
    from regard.models.model import Model


class Found(NamedTuple):
    """A text that beam search found behind a prompt.

    Attributes:
        text: the new text.
        ids: its ids, without the one that ended it.
        score: sum of log p / n^length_penalty, as `beam_search` has it.
        ended: whether it ended by itself, and not at max_tokens.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class Search:
    """What a beam search found, and what it cost.

    Attributes:
        found: at most `beams` texts, best first.
        seconds: the time it took.
        prefill_seconds, prompt_tokens: the part of it that reading the prompt took, and how many tokens that were: all but the
            last, with which the search begins.
        steps: how many times all beams went on by a token.
        cache_bytes: what the caches of all beams held at the end.
    """

    found: list[Found]
    seconds: float
    prefill_seconds: float
    prompt_tokens: int
    steps: int
    cache_bytes: int


@torch.inference_mode()
def search(
    model: Model, prompt: str, options: Options, *, beams: int = 4, length_penalty: float = 1.0
) -> Search:
    """The best continuations of a prompt, best first, as `beam_search` ranks them.

    Args:
        model: the model; the prompt is read once, and its caches are then shared out to the beams.
        prompt: not empty.
        options: max_tokens, at least 1; chunk; room. Sampling and stop strings are for `Batch`.
        beams: how many beginnings are kept.
        length_penalty: 0 ranks by probability, more favours long texts.

    Raises:
        ArgumentError: as `beam_search` and `Room`; the prompt is empty; or options name a sampler or a stop string.

    >>> import regard
    >>> found = search(regard.load("tiny"), "Return the", Options(max_tokens=3), beams=2).found
    >>> len(found), found[0].score >= found[1].score
    (2, True)
    """
    if not options.sampling.greedy or options.sampling.repetition_penalty != 1 or options.stop:
        raise ArgumentError(
            "beam search takes no sampler and no stop string; leave out temperature, repetition_penalty and stop, or beams"
        )
    room, ids = options.room or Room(), encoded(model, prompt, begun=False)
    room = room.sized(len(ids), options.max_tokens)
    start = time.perf_counter()
    context = Context(model.decoder, room, beams)
    if ids[:-1]:
        context.read(padded([ids[:-1]])[0].to(context.device), chunk=options.chunk)

    read, steps = time.perf_counter() - start, 0

    def step(last: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return context.read(last)[:, None]

    first = torch.tensor(ids[-1:], device=context.device)
    (best,) = beam_search(
        step, first, end=model.ends, limit=options.max_tokens,
        reorder=context.select, beams=beams, length_penalty=length_penalty,
    )  # fmt: skip
    found = [Found(model.tokenizer.decode(x.ids), *x) for x in best]
    return Search(
        found, time.perf_counter() - start, read, len(ids) - 1, steps, context.bytes
    )  # fmt: skip
