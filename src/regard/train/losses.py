"""Losses: next-token prediction on a stream of tokens, and the losses of tasks, with label
smoothing.
"""

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
from regard.train.batches import ExampleBatch
from regard.train.tasks.task import IGNORE_INDEX, PAD, PaddedBatch

Loss = Callable[[nn.Module, Any], Tensor]
"""A function `loss(model, rows)` that returns the mean loss of a batch, a scalar."""


def next_token_loss(model: nn.Module, rows: Int[Tensor, "B row"]) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the next token, in nats.

    loss = -mean(log softmax(logits)[target])

    Args:
        model: maps ids `[B, T]` to logits `[B, T, V]`.
        rows: ids `[B, T + 1]`: the inputs are all but the last, the targets all but the first.

    Returns:
        The loss, a scalar.

    >>> import math
    >>> flat = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> round(next_token_loss(flat, torch.tensor([[0, 1, 2]])).item() / math.log(4), 5)
    1.0
    """
    logits = at_least_float32(model(rows[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor of a narrower dtype to fp32; fp64 stays.

    >>> at_least_float32(torch.ones(2).double()).dtype
    torch.float64
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: ExampleBatch, *, batch: int = 16, loss: Loss = next_token_loss
) -> float:
    """Return the mean loss over fixed examples, with the model in evaluation mode.

    Args:
        model: the model; its mode is restored afterwards.
        rows: the examples, such as ids `[N, T + 1]`.
        batch: examples per forward pass.
        loss: the loss of a batch.

    Returns:
        The mean over all examples.

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
    ignored: int = IGNORE_INDEX,
) -> Float[Tensor, ""]:
    """Return the cross entropy with label smoothing.

    p = softmax(logits)
    loss = mean over labels y != ignored of  -(1 - eps) log p_y - (eps / V) sum_k log p_k

    Args:
        logits: `[..., V]`.
        labels: `[...]`, ids or `ignored`. If all labels are `ignored`, the loss is 0.
        smoothing: eps, at least 0 and less than 1; the paper uses 0.1.
        ignored: the label of positions that do not count; their logits may be NaN.

    Returns:
        The loss, a scalar.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> import math
    >>> loss = smoothed_cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]), 0.1)
    >>> round(loss.item() / math.log(4), 5)
    1.0

    Source: Szegedy et al. 2015 (arXiv 1512.00567), section 7; Vaswani et al. 2017 (arXiv
    1706.03762), section 5.4.
    """
    _check_smoothing(smoothing)
    counted = labels != ignored
    # ignored positions are removed, not multiplied by 0, since their logits may be NaN
    counted_logits = logits[counted]
    log_p = (
        counted_logits if counted_logits.dtype == torch.float64 else counted_logits.float()
    ).log_softmax(-1)  # [n, V]
    label_log_p = log_p.gather(-1, labels[counted][:, None]).squeeze(-1)
    loss = -(1 - smoothing) * label_log_p - smoothing * log_p.mean(-1)
    return loss.sum() / max(1, len(loss))


@dataclass(frozen=True)
class Seq2SeqLoss:
    """The loss of a model that maps a source to a target, with teacher forcing.

    Positions that hold `PAD` are never attended to and do not count. Label smoothing is used in
    training mode only; in evaluation mode the loss is the plain cross entropy.

    Args:
        smoothing: eps of the label smoothing, at least 0 and less than 1.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> from regard.models import recurrent
    >>> rows = PaddedBatch(torch.tensor([[3, 2]]), torch.tensor([[1, 3, 2]]))
    >>> bool(Seq2SeqLoss(0.1)(recurrent(5, 4, 4), rows) > 0)
    True
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> Float[Tensor, ""]:
        """Return the mean loss over the tokens of the target."""
        inputs, labels = rows.target[:, :-1], rows.target[:, 1:]
        # the target needs no positions: its padding is at the end, where causal attention of the
        # tokens does not reach
        logits = model(rows.source, inputs, padded_positions(rows.source))
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(logits, labels, eps, ignored=PAD)


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of a causal model on the tokens that a task asks for.

    Args:
        smoothing: eps of the label smoothing, at least 0 and less than 1.

    Raises:
        ArgumentError: smoothing is out of range.

    >>> model = nn.Embedding.from_pretrained(torch.zeros(4, 4))
    >>> rows = PaddedBatch(torch.tensor([[3, 2]]), torch.tensor([[-100, 1]]))
    >>> round(AnswerLoss()(model, rows).item(), 4)
    1.3863
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.smoothing)

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> Float[Tensor, ""]:
        """Return the mean loss over the answers."""
        eps = self.smoothing if model.training else 0.0
        return smoothed_cross_entropy(model(rows.source), rows.target, eps)


def padded_positions(ids: Int[Tensor, "B L"]) -> Positions:
    """Return the positions of ids that are padded on the right: 0, 1, ..., and -1 where the id is
    `PAD`.

    Args:
        ids: `[B, L]`.

    Returns:
        The positions, `[B, L]`.

    >>> padded_positions(torch.tensor([[3, 4], [5, 0]])).tolist()
    [[0, 1], [0, -1]]
    """
    return torch.arange(ids.shape[1], device=ids.device).masked_fill(ids == PAD, -1)


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ArgumentError(f"smoothing is {smoothing}; it must be at least 0 and less than 1")
