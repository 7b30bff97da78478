"""What a conversion costs: weight error, logits and perplexity before and after."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError
from regard.models.convert.attention_maps import ConversionStep
from regard.models.model import Model

MIN_TOKENS = 2


MIN_STABLE_TOKENS = 2000
"""Predicted tokens below which a text is short: on one of 891 characters a loss of 0.6 nats looked
like one of 0.02.
"""


class EvalWindows(NamedTuple):
    """Ids to measure on [N,T], N windows of T tokens; `text` says of what, and is empty where the
    ids were drawn.
    """

    ids: Int[Tensor, "N T"]
    text: str


@dataclass(frozen=True)
class ModelComparison:
    """Two models on the same ids.

    Each window is read on its own, and the standard error of a mean over n windows is s / sqrt(n),
    s their standard deviation (with n - 1): NaN for one window. That of a difference is taken
    window by window: what makes a window hard for both models is not in it.

    Attributes:
        tokens: that were predicted.
        rows, length: how the ids were read: so many windows of so many tokens.
        divergence, divergence_error: mean KL(before | after), nats per token, and its standard
            error.
        agreement, agreement_error: how often both think the same token likeliest.
        loss_before, loss_after: mean nats per token; NaN where there is no text.
        loss_change, loss_change_error: after - before.
        largest: the largest absolute difference of a logit.
        relative: the norm of the differences over that of the logits, both without the mean of each
            row, which softmax does not see.
        text: what the ids are, in words; empty where they were drawn.
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
        """The text has too few tokens for stable figures."""
        return bool(self.text) and self.tokens < MIN_STABLE_TOKENS

    @property
    def perplexity_before(self) -> float:
        """exp of the loss before."""
        return _exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """exp of the loss after."""
        return _exp(self.loss_after)


def evaluation_windows(model: Model, text: str | None, length: int, limit: int) -> EvalWindows:
    """Ids to measure on. Without a tokenizer they are drawn, and a loss has no meaning.

    The built-in text is what `pydoc` prints of the language's topics, which every Python has on its
    disk: about 465,000 characters of English and examples. Of it the windows are spread evenly over
    the whole; of a given text the beginning is read.

    Args:
        model: whose tokenizer reads the text.
        text: None is the built-in one.
        length: the most tokens of a window.
        limit: at most so many tokens.

    Raises:
        ArgumentError: the text has fewer than two tokens, or length or limit is less than 2.
        FileError: this Python was installed without the topics of `pydoc`.

    >>> import regard
    >>> ids, text = evaluation_windows(regard.load("tiny"), None, 64, 128)
    >>> ids.shape, text.startswith("the pydoc_topics of pydoc")
    (torch.Size([2, 64]), True)
    """
    for name, value in (("length", length), ("tokens", limit)):
        if value < MIN_TOKENS:
            raise ArgumentError(
                f"{name} is {value}; it must be at least {MIN_TOKENS}, to predict one token"
            )
    if not model.has_tokenizer and text is None:
        make = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.config.vocab_size, (limit,), generator=make)
        return EvalWindows(_rows(drawn, length), "")
    if text is None:
        whole = model.encode(pydoc_topics())[0]
        size = min(length, limit, len(whole))
        return EvalWindows(
            _spread(whole, size, limit // size),
            f"the topics of pydoc, Python {platform.python_version()}",
        )
    ids = model.encode(text)[0][:limit]
    if len(ids) < MIN_TOKENS:
        raise ArgumentError(f"the text has {len(ids)} tokens; give at least {MIN_TOKENS}")
    return EvalWindows(_rows(ids, length), "the given text")


def pydoc_topics() -> str:
    """What `pydoc` prints of the language's topics, in the order of their names.

    Raises:
        FileError: this Python was installed without them.

    >>> len(pydoc_topics()) > 100_000
    True
    """
    try:
        from pydoc_data.topics import topics as found
    except ImportError as error:
        raise FileError(
            "this Python has no pydoc_data, whose topics are the built-in text; give a text to "
            "measure on (--text FILE)"
        ) from error
    return "\n\n".join(text.strip() for _, text in sorted(found.items()))


@torch.inference_mode()
def compare_models(
    before: nn.Module, after: nn.Module, ids: Int[Tensor, "N T"], *, text: str = "text"
) -> ModelComparison:
    """Both models on the same windows, each window on its own; sums are in fp64.

    Args:
        before, after: ids [1,T] -> logits [1,T,V].
        ids: the windows.
        text: what they are, in words; empty where they were drawn: then there is no loss.

    >>> import regard
    >>> decoder = regard.load("tiny").decoder
    >>> found = compare_models(decoder, decoder, torch.arange(64)[None])
    >>> found.tokens, found.divergence, found.agreement, found.loss_change
    (63, 0.0, 1.0, 0.0)
    """
    means: list[Tensor] = []  # of each window: KL, agreement, loss before, loss after
    moved, whole, largest = 0.0, 0.0, 0.0
    for row in ids:
        old, new = (model(row[None])[0, :-1].double() for model in (before, after))
        largest = max(largest, float((new - old).abs().max()))
        old, new = (x.log_softmax(-1) for x in (old, new))
        centred = [x - x.mean(-1, keepdim=True) for x in (old, new)]
        moved += float((centred[1] - centred[0]).square().sum())
        whole += float(centred[0].square().sum())
        means.append(
            torch.stack(
                [
                    (old.exp() * (old - new)).sum(-1).mean(),
                    (old.argmax(-1) == new.argmax(-1)).double().mean(),
                    *(-x.gather(-1, row[1:, None]).mean() for x in (old, new)),
                ]
            )
        )
    found = torch.stack(means)
    if not text:
        found[:, 2:] = math.nan
    (kl, same, loss, lost), (kl_error, same_error, *_) = found.mean(0).tolist(), _errors(found)
    change = found[:, 3:] - found[:, 2:3]
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
        (moved / whole) ** 0.5 if whole else 0.0,
        text,
    )


def _errors(x: Float[Tensor, "N n"]) -> list[float]:
    """The standard error of the mean of each column; NaN for one row."""
    if len(x) < 2:
        return [math.nan] * x.shape[1]
    found: list[float] = (x.std(0, correction=1) / len(x) ** 0.5).tolist()
    return found


def _rows(ids: Tensor, length: int) -> Tensor:
    """As few windows as hold all ids, of one length that is at most the given one."""
    rows = -(-len(ids) // length)
    each = len(ids) // rows
    return ids[: rows * each].view(rows, each)


def _spread(ids: Tensor, length: int, rows: int) -> Tensor:
    """Windows spread evenly over all ids, none over another: as many as asked for, or as there
    are.
    """
    rows = max(1, min(rows, len(ids) // length))
    starts = [i * len(ids) // rows for i in range(rows)]
    return torch.stack([ids[a : a + length] for a in starts])


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


@dataclass(frozen=True)
class FinetuneResult:
    """A few training steps after a conversion.

    Attributes:
        steps, lr, batch, length, seed: how: the peak learning rate, rows of so many tokens, and
            their order.
        tokens: of the text that was trained on.
        loss_before, loss_after: mean nats per token of that text.
        held_tokens: of its last part, which was not trained on; 0 where the text is too short for
            one.
        held_before, held_after: mean nats per token of that part, NaN where there is none.
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
    """A model's family, dtype, parameters, and the numbers that one token takes in its caches, over
    all layers.
    """

    model_type: str
    dtype: str
    parameters: int
    kept: int


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, out: the folders.
        steps: the conversions, in their order.
        before, after: the two models.
        measured: both on a text; the second as it was loaded from the folder that was written.
        healing: None where nothing was trained.
        ignored: what the source's folder holds and was passed over; the result is without it.
    """

    source: str
    out: str
    steps: tuple[ConversionStep, ...]
    before: ModelSummary
    after: ModelSummary
    measured: ModelComparison
    healing: FinetuneResult | None
    ignored: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Plain values for JSON; null where there is no number."""
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
        found = {
            "source": self.source,
            "out": self.out,
            "steps": steps,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "measured": measured,
            "healing": None if self.healing is None else asdict(self.healing),
            "ignored": list(self.ignored),
        }
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
