"""The number that an intervention changes: the probability of an answer, or a logit difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.interventions.model_run import ModelRun
from regard.language import Phrase
from regard.models.text_encoder import TextEncoder
from regard.models.text_model import TextModel
from regard.units import plural

Answer: TypeAlias = str | int
"""A token: its text, or its id."""

Metric: TypeAlias = Callable[[Tensor], Tensor | float] | Answer | tuple[Answer, Answer] | None
"""What is measured; see `metric_of`."""


class NamedMetric(NamedTuple):
    """A metric and its name.

    Args:
        name: what it measures, in words.
        measure: a function from the output of a run to a tensor without dimensions.
    """

    name: str
    measure: Callable[[Tensor], Tensor]


def token_id(run: ModelRun, answer: Answer) -> int:
    """Return the id of an answer, which must be one token.

    >>> import regard
    >>> from regard.inspect.interventions.model_run import prepare
    >>> token_id(prepare(regard.load("tiny"), "to"), 5)
    5
    """
    if isinstance(answer, int):
        return answer
    if not isinstance(run.model, TextModel):
        raise ArgumentError(
            f"the answer {answer!r} is a text, but a {type(run.model).__name__} has no tokenizer "
            "of this package; give the id of the token",
            argument="answer",
            value=answer,
        )
    before = () if run.ids is None else run.ids[0].tolist()
    ids = run.model.tokenizer.encode(answer, after=before)
    if len(ids) != 1:
        pieces = run.model.tokenizer.pieces(ids)
        raise ArgumentError(
            f"the answer {answer!r} is {plural(len(ids), 'token')} "
            f"({', '.join(map(repr, pieces))}); it must be one: give the first of "
            "them, mind a leading space, or write a metric function",
            argument="answer",
            value=answer,
        )
    return ids[0]


def answer_ids(run: ModelRun, answer: Any) -> tuple[int, ...]:
    """Return the ids of one answer, or of an answer and the one it is compared with."""
    both = answer if isinstance(answer, tuple) else (answer,)
    if len(both) > 2 or not all(isinstance(each, (str, int)) for each in both):
        raise ArgumentTypeError(
            f"the answer is {answer!r}; it must be a token (its text or id), or a pair of tokens",
            argument="answer",
            value=answer,
        )
    return tuple(token_id(run, each) for each in both)


def answer_names(run: ModelRun, ids: tuple[int, ...]) -> str:
    """Return the tokens in words, such as "' be' - ' not'"."""
    if isinstance(run.model, TextModel) and run.model.has_tokenizer:
        return " - ".join(repr(piece) for piece in run.model.tokenizer.pieces(list(ids)))
    return " - ".join(map(str, ids))


def last_logits(output: Tensor) -> Tensor:
    """Return the logits `[B, V]` of the last position."""
    return output[:, -1] if output.ndim == 3 else output


def metric_of(run: ModelRun, metric: Metric) -> NamedMetric:
    """Return a metric as a function of a model's output, with its name.

    >>> import regard
    >>> from regard.inspect.interventions.model_run import prepare
    >>> run = prepare(regard.load("tiny"), "to be or not to")
    >>> metric_of(run, (5, 6)).name.startswith("logit of")
    True
    """
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        function: Callable[[Tensor], Tensor | float] = metric
        return NamedMetric(name, lambda output: torch.as_tensor(function(output)))
    if isinstance(run.model, TextEncoder):
        return _similarity(run, run.model, metric)
    if metric is None:
        metric = int(last_logits(run.run().output)[0].argmax())
    ids = answer_ids(run, metric)
    names = answer_names(run, ids)
    if len(ids) == 2:
        return NamedMetric(
            Phrase("logit of {names}", names=names),
            lambda output: (last_logits(output)[:, ids[0]] - last_logits(output)[:, ids[1]]).mean(),
        )
    return NamedMetric(
        Phrase("log probability of {names}", names=names),
        lambda output: last_logits(output).float().log_softmax(-1)[:, ids[0]].mean(),
    )


def _similarity(run: ModelRun, model: TextEncoder, metric: Any) -> NamedMetric:
    """Return the cosine of the sentence vector with that of a text, or of the unchanged run."""
    if metric is not None and not isinstance(metric, str):
        raise ArgumentTypeError(
            f"metric is {metric!r}; for a TextEncoder it must be a text, a function or None",
            argument="metric",
        )
    with torch.no_grad():
        other = model.pool(run.run().output) if metric is None else model.embed(metric)
    name = (
        "cosine with the unchanged vector"
        if metric is None
        else Phrase("cosine with {metric!r}", metric=metric)
    )
    return NamedMetric(
        name,
        lambda output: torch.cosine_similarity(model.pool(output), other.to(output)).mean(),
    )
