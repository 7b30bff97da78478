"""Evaluation of a trained task: answers, accuracy by length, and alignments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import EncoderDecoder, RecurrentEncoderDecoder
from regard.models.generation import beam_search, greedy
from regard.nn.rnn import Carried
from regard.tap import Trace
from regard.train.losses import where
from regard.train.tasks.task import BOS, EOS, IGNORED, Example, Padded, Task, pad

Reader = EncoderDecoder | RecurrentEncoderDecoder
"""A model that reads a source and says a target."""


class Telling:
    """A model between two tokens of what it says: the step that `greedy` and `beam_search` ask for.

    >>> from regard.models import recurrent
    >>> telling = Telling(recurrent(7, 4, 4, attention="bahdanau"), torch.tensor([[3, 4, 2]]))
    >>> telling.step(torch.tensor([[1]])).shape
    torch.Size([1, 1, 7])
    """

    def __init__(self, model: Reader, source: Int[Tensor, "B S"]) -> None:
        self.model, positions = model, where(source)
        if isinstance(model, RecurrentEncoderDecoder):
            self.carried = model.begin(model.encode(source, positions))
        else:
            self.caches = model.new_caches()
            self.memory: dict[str, Any] = {
                "memory": model.encode(source, positions),
                "memory_positions": positions,
            }

    def step(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 V"]:
        """Logits for the token behind ids, which are kept."""
        if isinstance(self.model, RecurrentEncoderDecoder):
            logits, self.carried = self.model.step(ids, self.carried)
            return logits
        memory, self.memory = self.memory, {}  # the caches have it from here on
        return self.model.decode(ids, self.caches, **memory)

    def select(self, rows: Int[Tensor, " N"]) -> None:
        """What is kept for row i becomes what was kept for row rows[i]."""
        if isinstance(self.model, RecurrentEncoderDecoder):
            hidden, cross = self.carried
            if cross is not None:
                cross.select(rows)
            self.carried = Carried(tuple(part.index_select(1, rows) for part in hidden), cross)
            return
        for cache in (cache for pair in self.caches for cache in pair):
            cache.select(rows)


@torch.no_grad()
def say(
    model: Reader, source: Int[Tensor, "B S"], *, limit: int, beams: int = 1
) -> list[list[int]]:
    """The ids that a model says about each source, without `EOS`: the likeliest at each step, or
    the best of a beam search.

    Raises:
        ArgumentError: limit or beams is less than 1.

    >>> from regard.models import recurrent
    >>> len(say(recurrent(7, 4, 4), torch.tensor([[3, 4, 2]]), limit=2))
    1
    """
    telling = Telling(model, source)
    first = torch.full((len(source),), BOS, device=source.device)
    if beams == 1:
        rows = greedy(telling.step, first, end=EOS, limit=limit).tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]
    found = beam_search(
        telling.step, first, end=EOS, limit=limit, reorder=telling.select, beams=beams
    )
    return [list(best[0].ids) if best else [] for best in found]


@dataclass(frozen=True)
class Outcome:
    """What a model said to an example: of rows, the answers alone.

    >>> Outcome(Example(("a",), ("a",)), ("b",), ("a",)).right
    False
    """

    example: Example
    said: tuple[str, ...]
    wanted: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Every word of it."""
        return self.said == self.wanted


@torch.no_grad()
def outcomes(
    model: nn.Module, task: Task, examples: Sequence[Example], *, batch: int = 64, beams: int = 1
) -> list[Outcome]:
    """What a model says to each example, in the examples' order; the model in evaluation mode for
    as long.

    A model of rows is given the right tokens up to each answer, so one mistake does not lead to the
    next.

    Raises:
        ArgumentError: batch or beams is less than 1, or beams are more than 1 for a task of rows.
    """
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; it must be 1 or more")
    if beams != 1 and task.kind == "rows":
        raise ArgumentError(
            f"task {task.name!r} asks for single tokens and searches nothing; leave beams at 1"
        )
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda i: examples[i].length)
    found: dict[int, Outcome] = {}
    was_training = model.training
    model.eval()
    try:
        for i in range(0, len(order), batch):
            part = [examples[j] for j in order[i : i + batch]]
            rows = pad(task, part).to(device)
            answer = (
                _said(model, task, rows, beams)
                if task.kind == "pairs"
                else _filled(model, task, rows)
            )
            for j, example, said in zip(order[i : i + batch], part, answer, strict=True):
                wanted = tuple(word for word in example.target if word)
                found[j] = Outcome(example, tuple(said), wanted)
    finally:
        model.train(was_training)
    return [found[i] for i in range(len(examples))]


def _said(model: nn.Module, task: Task, rows: Padded, beams: int) -> list[list[str]]:
    assert isinstance(model, Reader), f"{type(model).__name__} reads no source"
    limit = 2 * task.lengths[2] + 8  # more than any target has, and the same for every batch
    return [
        task.vocabulary.decode(ids) for ids in say(model, rows.source, limit=limit, beams=beams)
    ]


def _filled(model: nn.Module, task: Task, rows: Padded) -> list[list[str]]:
    best = model(rows.source).argmax(-1)
    words = task.vocabulary.words
    special = len(task.vocabulary) - len(words)
    return [
        [words[i - special] if i >= special else "" for i in row[asked].tolist()]
        for row, asked in zip(best, rows.target != IGNORED, strict=True)
    ]


@dataclass(frozen=True)
class Bin:
    """How many sources of `low` to `high` tokens were answered right.

    >>> whole = Bin("validation", 1, 4, 20, 20)
    >>> whole.share, [round(x, 3) for x in whole.interval]
    (1.0, [0.839, 1.0])
    """

    split: str
    low: int
    high: int
    examples: int
    right: int

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / self.examples

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies, 19 times of 20.

        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  z = 1.96

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        n, p, z = self.examples, self.share, 1.96
        middle, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - reach) / (1 + z * z / n)), min(
            1.0, (middle + reach) / (1 + z * z / n)
        )


def by_length(task: Task, split: str, found: Sequence[Outcome], count: int = 8) -> list[Bin]:
    """Outcomes of a split counted by the length of the source, in at most `count` bins of like
    width; empty ones are left out.

    Raises:
        ArgumentError: count is less than 1.
    """
    if count < 1:
        raise ArgumentError(f"count is {count}; it must be 1 or more")
    shortest, trained, longest = task.lengths
    low, high = (trained + 1, longest) if split == "longer" else (shortest, trained)
    width = -(-(high + 1 - low) // count)
    bins = []
    for start in range(low, high + 1, width):
        stop = min(start + width - 1, high)
        inside = [outcome for outcome in found if start <= outcome.example.length <= stop]
        if inside:
            bins.append(Bin(split, start, stop, len(inside), sum(o.right for o in inside)))
    return bins


@dataclass(frozen=True)
class Alignment:
    """Weights of one head: a row for each token said, a column for each token of the source.

    head: which it is. place: the same, with how it was chosen.
    weights: [said, source], each row a distribution.
    """

    outcome: Outcome
    head: str
    place: str
    source: tuple[str, ...]
    said: tuple[str, ...]
    weights: Float[Tensor, "T S"]


@torch.no_grad()
def alignment(
    model: nn.Module, task: Task, outcome: Outcome, *, head: str | None = None
) -> Alignment | None:
    """The alignment of what a model said; None for a model without attention.

    A model with one head has one. Of several heads in several layers the sharpest is taken: the one
    whose largest weights, averaged over the rows, are largest; or the `head` of another alignment.
    The taps hold what the kernel computed: nothing is computed again by other means.
    """
    device = next(model.parameters()).device
    if task.kind == "pairs":
        encode = task.vocabulary.encode
        source = torch.tensor([[*encode(outcome.example.source), EOS]], device=device)
        target = torch.tensor([[BOS, *encode(outcome.said)]], device=device)
        found = _patterns(model, (source, target, where(source)), cross=True)
        columns, rows = (*outcome.example.source, "⏎"), (*outcome.said, "⏎")
        asked = torch.ones(len(rows), dtype=torch.bool)
    else:
        batch = pad(task, [outcome.example]).to(device)
        found = _patterns(model, (batch.source,), cross=False)
        columns, rows = outcome.example.source, outcome.said
        asked = (batch.target[0] != IGNORED).cpu()
    if not found:
        return None
    heads = {place: x[asked] for place, x in found.items()}
    best = (
        max(heads, key=lambda place: float(heads[place].amax(-1).mean())) if head is None else head
    )
    how = f", the sharpest of {len(heads)} heads" if len(heads) > 1 and head is None else ""
    return Alignment(outcome, best, best + how, columns, rows, heads[best])


def _patterns(
    model: nn.Module, inputs: tuple[Any, ...], *, cross: bool
) -> dict[str, Float[Tensor, "T S"]]:
    """Every head's pattern of one example, by the name of its place."""
    was_training = model.training
    model.eval()
    try:
        with Trace("pattern", missing="ignore") as trace:  # a model without attention has none
            model(*inputs)
    finally:
        model.train(was_training)
    found: dict[str, Tensor] = {}
    for name in trace:
        place = name.removesuffix(".pattern")
        if place.startswith("encoder") or (cross and place.endswith("attention")):
            continue  # the source to itself, the target to itself
        pattern = (
            torch.cat(trace.every(name), 2)[0].float().cpu()
        )  # [H,T,S]; a step each, or all at once
        for h, head in enumerate(pattern):
            found[f"{_spoken(place)}, head {h}" if len(pattern) > 1 else _spoken(place)] = head
    return found


def _spoken(place: str) -> str:
    """A place as a reader knows it.

    >>> _spoken("decoder.layers.1.cross"), _spoken("layers.0"), _spoken("decoder")
    ('decoder layer 1', 'layer 0', 'decoder')
    """
    kept = [word for word in place.split(".") if word not in ("cross", "attention")]
    return " ".join(kept).replace("layers", "layer")
