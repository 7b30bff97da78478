"""What training makes small, and how it is measured on texts that were not trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.train.feed import Rows

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
    """The mean loss over fixed rows, such as ids [N, T + 1], the model in evaluation mode for as long.

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
