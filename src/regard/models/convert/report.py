"""Measurements of a conversion: weight error, logits and perplexity before and after."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.language import Phrase
from regard.models.convert.attention_maps import ConversionStep
from regard.models.model import Model
from regard.units import plural

MIN_TOKENS = 2
"""The smallest number of tokens of a window, of which the last one is predicted."""


MIN_STABLE_TOKENS = 2000
"""With fewer predicted tokens, the figures are unstable: measured on 891 characters, an increase of
the loss by 0.6 nats appeared as 0.02.
"""


CALIBRATION_TOKENS = 2048
"""The number of tokens on which the inputs of the layers are measured."""


class EvalWindows(NamedTuple):
    """Token ids [N, T] on which models are evaluated; `text` is empty if they are random."""

    ids: Int[Tensor, "N T"]
    text: str


@dataclass(frozen=True)
class ModelComparison:
    """Two models compared on the same ids.

    Each window is read separately. A standard error over n windows is s / sqrt(n) (NaN for one),
    that of a difference from the differences per window.

    Args:
        tokens: the number of predicted tokens.
        rows, length: the number of windows, and the tokens of each.
        divergence, divergence_error: the mean KL(before | after) in nats per token, and its error.
        agreement, agreement_error: how often both models have the same most likely token.
        loss_before, loss_after: the mean loss in nats per token; NaN without a text.
        loss_change, loss_change_error: after - before.
        largest: the largest absolute difference of a logit.
        relative: the norm of the differences of the logits over the norm of the logits, each
            without its mean over the vocabulary.
        text: a description of the text; empty if the ids are random.
    """

    tokens: int
    rows: int
    length: int
    divergence: float
    divergence_error: float
    agreement: float
    agreement_error: float
    loss_before: float
    loss_after: float
    loss_change: float
    loss_change_error: float
    largest: float
    relative: float
    text: str = ""

    @property
    def short(self) -> bool:
        """Whether the text has too few tokens for stable figures."""
        return bool(self.text) and self.tokens < MIN_STABLE_TOKENS

    @property
    def perplexity_before(self) -> float:
        """The perplexity before the conversion: exp of the loss."""
        return _exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """The perplexity after the conversion: exp of the loss."""
        return _exp(self.loss_after)


def evaluation_windows(model: Model, text: str | None, length: int, limit: int) -> EvalWindows:
    """Return ids for an evaluation, random ones without a loss if tokenizer or text is missing; the
    built-in text is Python's language topics of `pydoc`, 465,000 characters, over which windows are
    spread.
    """
    for name, value in (("length", length), ("tokens", limit)):
        if value < MIN_TOKENS:
            raise ArgumentError(
                f"{name} is {value}; it must be at least {MIN_TOKENS}, to predict one token"
            )
    if not model.has_tokenizer and text is None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.config.vocab_size, (limit,), generator=generator, device="cpu")
        return EvalWindows(_rows(drawn, length), "")
    if text is None:
        whole = model.encode(pydoc_topics())[0]
        size = min(length, limit, len(whole))
        return EvalWindows(
            _spread(whole, size, limit // size),
            Phrase("the topics of pydoc, Python {version}", version=platform.python_version()),
        )
    ids = model.encode(text)[0][:limit]
    if len(ids) < MIN_TOKENS:
        raise ArgumentError(f"the text has {plural(len(ids), 'token')}; give at least {MIN_TOKENS}")
    return EvalWindows(_rows(ids, length), "the given text")


def calibration_windows(model: Model, text: str | None, ids: Tensor) -> Int[Tensor, "N T"]:
    """Return at most 2048 tokens of the text in windows as long as those of the evaluation, from
    other places of the text; from the same, if the text has no others.
    """
    length = ids.shape[1]
    rows = max(1, CALIBRATION_TOKENS // length)
    whole = model.encode(pydoc_topics() if text is None else text)[0]
    if text is None:  # between the windows of the evaluation
        whole = whole[length:]
    elif len(whole) >= ids.numel() + length:
        whole = whole[ids.numel() :]
    return _spread(whole, min(length, len(whole)), rows)


def pydoc_topics() -> str:
    """Return the text of the language topics of `pydoc`, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileError(
            "this Python has no pydoc_data, whose topics are the built-in text; give a text to "
            "measure on (--text FILE)"
        ) from error
    return "\n\n".join(text.strip() for _, text in sorted(topics.items()))


@torch.inference_mode()
def compare_models(
    before: nn.Module, after: nn.Module, ids: Int[Tensor, "N T"], *, text: str = "text"
) -> ModelComparison:
    """Compare two models on the same windows, each window separately; sums are in fp64.

    Args:
        before, after: functions from ids [1, T] to logits [1, T, V].
        ids: the windows [N, T].
        text: a description of the text; empty if the ids are random, without a loss.

    Returns:
        The comparison.

    >>> import regard
    >>> decoder = regard.load("tiny").decoder
    >>> same = compare_models(decoder, decoder, torch.arange(64)[None])
    >>> same.tokens, same.divergence, same.agreement, same.loss_change
    (63, 0.0, 1.0, 0.0)
    """
    means: list[Tensor] = []  # of each window: KL, agreement, loss before, loss after
    squared_change, squared_logits, largest = 0.0, 0.0, 0.0
    for row in ids:
        old, new = (model(row[None])[0, :-1].double() for model in (before, after))
        largest = max(largest, float((new - old).abs().max()))
        old, new = (x.log_softmax(-1) for x in (old, new))
        centred = [x - x.mean(-1, keepdim=True) for x in (old, new)]
        squared_change += float((centred[1] - centred[0]).square().sum())
        squared_logits += float(centred[0].square().sum())
        means.append(
            torch.stack(
                [
                    (old.exp() * (old - new)).sum(-1).mean(),
                    (old.argmax(-1) == new.argmax(-1)).double().mean(),
                    *(-x.gather(-1, row[1:, None]).mean() for x in (old, new)),
                ]
            )
        )
    per_window = torch.stack(means)
    if not text:
        per_window[:, 2:] = math.nan
    (kl, same, loss, lost), (kl_error, same_error, *_) = (
        per_window.mean(0).tolist(),
        _errors(per_window),
    )
    change = per_window[:, 3:] - per_window[:, 2:3]
    return ModelComparison(
        ids.shape[0] * (ids.shape[1] - 1),
        ids.shape[0],
        ids.shape[1],
        max(0.0, kl),
        kl_error,
        same,
        same_error,
        loss,
        lost,
        change.mean().item(),
        _errors(change)[0],
        largest,
        (squared_change / squared_logits) ** 0.5 if squared_logits else 0.0,
        text,
    )


def _errors(x: Float[Tensor, "N n"]) -> list[float]:
    """Return the standard error of the mean of each column; NaN for one row."""
    if len(x) < 2:
        return [math.nan] * x.shape[1]
    errors: list[float] = (x.std(0, correction=1) / len(x) ** 0.5).tolist()
    return errors


def _rows(ids: Tensor, length: int) -> Tensor:
    """Split ids into as few windows as possible, all of one length of at most `length`."""
    rows = -(-len(ids) // length)
    each = len(ids) // rows
    return ids[: rows * each].view(rows, each)


def _spread(ids: Tensor, length: int, rows: int) -> Tensor:
    """Return `rows` windows spread evenly over the ids, or as many as there are."""
    rows = max(1, min(rows, len(ids) // length))
    starts = [i * len(ids) // rows for i in range(rows)]
    return torch.stack([ids[a : a + length] for a in starts])


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a few training steps after a conversion.

    Args:
        steps, lr, batch, length, seed: the settings: steps, peak learning rate, rows per step,
            tokens per row, and the random seed of their order.
        tokens: the number of tokens of the training text.
        loss_before, loss_after: the mean loss on it in nats per token.
        held_tokens: the number of tokens of its last part, which is held out, or 0.
        held_before, held_after: the mean loss on that part in nats per token, NaN without one.
    """

    steps: int
    lr: float
    batch: int
    length: int
    seed: int
    tokens: int
    loss_before: float
    loss_after: float
    held_tokens: int
    held_before: float
    held_after: float


@dataclass(frozen=True)
class ModelSummary:
    """A model's family, dtype and sizes; `cached_values` are those per token over all layers."""

    model_type: str
    dtype: str
    parameters: int
    cached_values: int


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion.

    Args:
        source, out: the folders.
        steps: the conversions, in their order.
        before, after: the two models.
        measured: both models compared on a text; the second one as loaded from the folder written.
        finetuning: the training steps after the conversion, or None.
        ignored: parts of the source's folder that were ignored; the result does not have them.
        hidden_errors: the relative change of hidden states by layer, for stored weights; or empty.
    """

    source: str
    out: str
    steps: tuple[ConversionStep, ...]
    before: ModelSummary
    after: ModelSummary
    measured: ModelComparison
    finetuning: FinetuneResult | None
    ignored: tuple[str, ...] = ()
    hidden_errors: tuple[float, ...] = ()

    def figures(self) -> dict[str, object]:
        """Return the report as plain values for JSON, with null for NaN and infinity.

        Returns:
            A dictionary of plain values.
        """
        steps = [
            {
                "what": step.what,
                "weight_error": [error._asdict() for error in step.layers],
                "error_by_rank": {str(rank): error for rank, error in step.curve.items()},
                "notes": list(step.notes),
            }
            for step in self.steps
        ]
        measured = asdict(self.measured) | {
            "perplexity_before": self.measured.perplexity_before,
            "perplexity_after": self.measured.perplexity_after,
        }
        fields = dict(vars(self)) | {"steps": steps, "measured": measured}
        return {name: _plain(value) for name, value in fields.items()}


def _plain(value: object) -> object:
    """Return a value in JSON's types, with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, (FinetuneResult, ModelSummary)):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
