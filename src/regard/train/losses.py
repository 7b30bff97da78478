"""Losses: next-token prediction on a stream, and made tasks with label smoothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.span import Positions
from regard.train.batches import Rows
from regard.train.tasks.task import IGNORED, PAD, Padded

Loss = Callable[[nn.Module, Any], Tensor]
"""`loss(model, rows)`: the mean loss of a batch, a scalar."""


def next_token_loss(model: nn.Module, rows: Int[Tensor, "B row"]) -> Float[Tensor, ""]:
    """Mean cross entropy in nats, -mean(log softmax(logits)[target]), of `rows`' next tokens.

    >>> import math
    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> round(next_token_loss(flat, torch.tensor([[0, 1, 2]])).item() / math.log(4), 5)
    1.0
    """
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: Rows, *, batch: int = 16, loss: Loss = next_token_loss
) -> float:
    """The mean loss over fixed rows, such as ids [N, T + 1], the model in evaluation mode for as
    long.

    >>> import math
    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> round(evaluate(flat, torch.zeros(3, 5, dtype=torch.long)) / math.log(4), 5)
    1.0
    """
    was_training = model.training
    model.eval()
    try:
        total = sum(loss(model, part).item() * len(part) for part in rows.split(batch))
    finally:
        model.train(was_training)
    return total / len(rows)


def smoothed_cross_entropy(
    logits: Float[Tensor, "*B V"],
    labels: Int[Tensor, " *B"],
    smoothing: float = 0.0,
    *,
    ignored: int = IGNORED,
) -> Float[Tensor, ""]:
    """Cross entropy with a target that leaves a little to every word.

    p = softmax(logits)
    loss = mean over labels y != ignored of  -(1 - eps) log p_y - (eps / V) sum_k log p_k

    Args:
        logits: [..., V].
        labels: [...], ids, or `ignored`; where all are, the loss is 0.
        smoothing: eps, at least 0 and less than 1; 0.1 in the paper.
        ignored: the label of slots that count for nothing; what their logits hold changes nothing.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> import math
    >>> loss = smoothed_cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]), 0.1)
    >>> round(loss.item() / math.log(4), 5)
    1.0

    Source: Szegedy et al. 2015 (arXiv 1512.00567), section 7; Vaswani et al. 2017 (arXiv
    1706.03762), section 5.4.
    """
    _check(smoothing)
    counted = labels != ignored
    # selected, not multiplied: a slot that does not count may hold NaN
    seen = logits[counted]
    log_p = (seen if seen.dtype == torch.float64 else seen.float()).log_softmax(-1)  # [n, V]
    right = log_p.gather(-1, labels[counted][:, None]).squeeze(-1)
    loss = -(1 - smoothing) * right - smoothing * log_p.mean(-1)
    return loss.sum() / max(1, len(loss))


@dataclass(frozen=True)
class PairLoss:
    """The loss of a model that reads a source and says a target, each token given the ones before
    (teacher forcing).

    Slots that hold `PAD` are empty: no other sees them, and they count for nothing. Smoothing is
    for training; in evaluation mode the loss is the plain cross entropy.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> from regard.models import recurrent
    >>> rows = Padded(torch.tensor([[3, 2]]), torch.tensor([[1, 3, 2]]))
    >>> bool(PairLoss(0.1)(recurrent(5, 4, 4), rows) > 0)
    True
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self.smoothing)

    def __call__(self, model: nn.Module, rows: Padded) -> Float[Tensor, ""]:
        """The mean over the target's tokens."""
        given, labels = rows.target[:, :-1], rows.target[:, 1:]
        # padding of a target stands behind its tokens, which do not look there: it needs no
        # positions of its own
        logits = model(rows.source, given, where(rows.source))
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(logits, labels, eps, ignored=PAD)


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of a model that continues a row, on the tokens that are asked for.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> model = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> rows = Padded(torch.tensor([[3, 2]]), torch.tensor([[-100, 1]]))
    >>> round(AnswerLoss()(model, rows).item(), 4)
    1.3863
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self.smoothing)

    def __call__(self, model: nn.Module, rows: Padded) -> Float[Tensor, ""]:
        """The mean over the answers."""
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(model(rows.source), rows.target, eps)


def where(ids: Int[Tensor, "B L"]) -> Positions:
    """Positions of ids padded on the right: 0, 1, ..., and -1 where there is `PAD`.

    >>> where(torch.tensor([[3, 4], [5, 0]])).tolist()
    [[0, 1], [0, -1]]
    """
    return torch.arange(ids.shape[1], device=ids.device).masked_fill(ids == PAD, -1)


def _check(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ArgumentError(f"smoothing is {smoothing}; it must be at least 0 and less than 1")
