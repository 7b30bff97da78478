"""Evaluation of a model on a task: its answers, its accuracy by length, and its alignments."""

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
from regard.nn.blocks.rnn import DecoderState
from regard.tracing import Trace
from regard.train.losses import padded_positions
from regard.train.tasks.task import BOS, EOS, IGNORE_INDEX, Example, PaddedBatch, Task, pad
from regard.units import plural

Seq2SeqModel = EncoderDecoder | RecurrentEncoderDecoder
"""A model that maps a source to a target."""


class IncrementalDecoder:
    """A model with the state between two tokens of its output, for `greedy` and `beam_search`."""

    def __init__(self, model: Seq2SeqModel, source: Int[Tensor, "B S"]) -> None:
        self.model, positions = model, padded_positions(source)
        if isinstance(model, RecurrentEncoderDecoder):
            self.state = model.begin(model.run_encoder(source, positions))
        else:
            self.caches = model.new_caches()
            self.memory: dict[str, Any] = {
                "memory": model.run_encoder(source, positions),
                "memory_positions": positions,
            }

    def step(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 V"]:
        """Append ids `[B, 1]` to the output; return the logits `[B, 1, V]` of the next token."""
        if isinstance(self.model, RecurrentEncoderDecoder):
            logits, self.state = self.model.step(ids, self.state)
            return logits
        memory, self.memory = self.memory, {}  # the first call stores it in the caches
        return self.model.run_decoder(ids, self.caches, **memory)

    def select(self, rows: Int[Tensor, " N"]) -> None:
        """Replace the state of row i by the state of row rows[i], for a beam search."""
        if isinstance(self.model, RecurrentEncoderDecoder):
            hidden, cross = self.state
            if cross is not None:
                cross.select(rows)
            self.state = DecoderState(tuple(part.index_select(1, rows) for part in hidden), cross)
            return
        for cache in (cache for pair in self.caches for cache in pair):
            cache.select(rows)


@torch.no_grad()
def generate_ids(
    model: Seq2SeqModel, source: Int[Tensor, "B S"], *, limit: int, beams: int = 1
) -> list[list[int]]:
    """Return the output of a model for each source: greedy, or the best of a beam search."""
    decoder = IncrementalDecoder(model, source)
    first = torch.full((len(source),), BOS, device=source.device)
    if beams == 1:
        rows = greedy(decoder.step, first, end=EOS, limit=limit).tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]
    hypotheses = beam_search(
        decoder.step, first, end=EOS, limit=limit, reorder=decoder.select, beams=beams
    )
    return [list(best[0].ids) if best else [] for best in hypotheses]


@dataclass(frozen=True)
class TaskAnswer:
    """The output of a model for an example; for a "causal" task, the predicted tokens only."""

    example: Example
    predicted: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def correct(self) -> bool:
        """Whether every word is right."""
        return self.predicted == self.expected


@torch.no_grad()
def answer_examples(
    model: nn.Module, task: Task, examples: Sequence[Example], *, batch: int = 64, beams: int = 1
) -> list[TaskAnswer]:
    """Return the model's answers in evaluation mode, in the order of the examples.

    A "causal" task predicts each token after the right ones, so that mistakes cause no others.
    """
    if batch < 1:
        raise ArgumentError(f"batch is {batch}; it must be 1 or more", argument="batch")
    if beams != 1 and task.kind == "causal":
        raise ArgumentError(
            f"beams is {beams}; task {task.name!r} predicts single tokens, so beams must be 1",
            argument="beams",
        )
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda i: examples[i].length)
    answers: dict[int, TaskAnswer] = {}
    was_training = model.training
    model.eval()
    try:
        for i in range(0, len(order), batch):
            batch_examples = [examples[j] for j in order[i : i + batch]]
            rows = pad(task, batch_examples).to(device)
            outputs = (
                _generated_words(model, task, rows, beams)
                if task.kind == "seq2seq"
                else _predicted_words(model, task, rows)
            )
            for j, example, predicted in zip(
                order[i : i + batch], batch_examples, outputs, strict=True
            ):
                expected = tuple(word for word in example.target if word)
                answers[j] = TaskAnswer(example, tuple(predicted), expected)
    finally:
        model.train(was_training)
    return [answers[i] for i in range(len(examples))]


def _generated_words(
    model: nn.Module, task: Task, rows: PaddedBatch, beams: int
) -> list[list[str]]:
    """Return the output words of a "seq2seq" model for each source."""
    assert isinstance(model, Seq2SeqModel), f"{type(model).__name__} has no encoder"
    limit = 2 * task.lengths[2] + 8  # longer than any target, and the same for every batch
    return [
        task.vocabulary.decode(ids)
        for ids in generate_ids(model, rows.source, limit=limit, beams=beams)
    ]


def _predicted_words(model: nn.Module, task: Task, rows: PaddedBatch) -> list[list[str]]:
    """Return the most likely words at the positions that a "causal" task asks for."""
    best = model(rows.source).argmax(-1)
    words = task.vocabulary.words
    special = len(task.vocabulary) - len(words)
    return [
        [words[i - special] if i >= special else "" for i in row[asked].tolist()]
        for row, asked in zip(best, rows.target != IGNORE_INDEX, strict=True)
    ]


@dataclass(frozen=True)
class AccuracyBin:
    """How many of the sources of `low` to `high` tokens were answered correctly."""

    split: str
    low: int
    high: int
    examples: int
    correct: int

    @property
    def share(self) -> float:
        """The share of correct answers."""
        return self.correct / self.examples

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the share (Wilson score interval).

        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  z = 1.96

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        n, p, z = self.examples, self.share, 1.96
        middle, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - reach) / (1 + z * z / n)), min(
            1.0, (middle + reach) / (1 + z * z / n)
        )


def accuracy_by_length(
    task: Task, split: str, answers: Sequence[TaskAnswer], count: int = 8
) -> list[AccuracyBin]:
    """Count the correct answers of a split in bins of the source length."""
    if count < 1:
        raise ArgumentError(f"count is {count}; it must be 1 or more", argument="count")
    shortest, trained, longest = task.lengths
    low, high = (trained + 1, longest) if split == "longer" else (shortest, trained)
    width = -(-(high + 1 - low) // count)
    bins = []
    for start in range(low, high + 1, width):
        stop = min(start + width - 1, high)
        inside = [answer for answer in answers if start <= answer.example.length <= stop]
        if inside:
            bins.append(
                AccuracyBin(split, start, stop, len(inside), sum(o.correct for o in inside))
            )
    return bins


@dataclass(frozen=True, eq=False)
class Alignment:
    """The weights of one head: a row for each output token, a column for each source token."""

    outcome: TaskAnswer
    head: str
    label: str
    source: tuple[str, ...]
    predicted: tuple[str, ...]
    weights: Float[Tensor, "T S"]


@torch.no_grad()
def alignment(
    model: nn.Module, task: Task, outcome: TaskAnswer, *, head: str | None = None
) -> Alignment | None:
    """Return the alignment of output and source from the forward pass; None without one.

    The head is the sharpest: the mean of its rows' largest weights is the largest.
    """
    device = next(model.parameters()).device
    if task.kind == "seq2seq":
        encode = task.vocabulary.encode
        source = torch.tensor([[*encode(outcome.example.source), EOS]], device=device)
        target = torch.tensor([[BOS, *encode(outcome.predicted)]], device=device)
        patterns = _attention_patterns(
            model, (source, target, padded_positions(source)), cross=True
        )
        columns, rows = (*outcome.example.source, "⏎"), (*outcome.predicted, "⏎")
        asked = torch.ones(len(rows), dtype=torch.bool)
    else:
        batch = pad(task, [outcome.example]).to(device)
        patterns = _attention_patterns(model, (batch.source,), cross=False)
        columns, rows = outcome.example.source, outcome.predicted
        asked = (batch.target[0] != IGNORE_INDEX).cpu()
    if not patterns:
        return None
    heads = {place: x[asked] for place, x in patterns.items()}
    best = (
        max(heads, key=lambda place: float(heads[place].amax(-1).mean())) if head is None else head
    )
    choice = (
        f", the sharpest of {plural(len(heads), 'head')}" if len(heads) > 1 and head is None else ""
    )
    return Alignment(outcome, best, best + choice, columns, rows, heads[best])


def _attention_patterns(
    model: nn.Module, inputs: tuple[object, ...], *, cross: bool
) -> dict[str, Float[Tensor, "T S"]]:
    """Return the pattern `[T, S]` of every head for one example, by the name of the head."""
    was_training = model.training
    model.eval()
    try:
        with Trace("pattern", missing="ignore") as trace:  # a model without attention has none
            model(*inputs)
    finally:
        model.train(was_training)
    patterns: dict[str, Tensor] = {}
    for name in trace:
        module_name = name.removesuffix(".pattern")
        if module_name.startswith("encoder") or (cross and module_name.endswith("attention")):
            continue  # self-attention of the source or of the target
        # the calls are one per step, or one for all steps
        pattern = torch.cat(trace.every(name), 2)[0].float().cpu()  # [H, T, S]
        label = _module_label(module_name)
        for h, head in enumerate(pattern):
            patterns[f"{label}, head {h}" if len(pattern) > 1 else label] = head
    return patterns


def _module_label(module_name: str) -> str:
    """Return the name of a module as reports show it.

    >>> _module_label("decoder.layers.1.cross"), _module_label("layers.0"), _module_label("decoder")
    ('decoder layer 1', 'layer 0', 'decoder')
    """
    words = [word for word in module_name.split(".") if word not in ("cross", "attention")]
    return " ".join(words).replace("layers", "layer")
