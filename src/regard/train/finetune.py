"""A few training steps on a converted model: all weights, or only those that were converted."""

from __future__ import annotations

import math

from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.convert.report import FinetuneResult
from regard.train.batches import Batches
from regard.train.loop import fit
from regard.train.losses import evaluate
from regard.train.progress import Progress
from regard.train.settings import Settings

HELD = 10
"""One part in so many is not trained on."""


def heal(
    network: nn.Module,
    ids: Int[Tensor, "N T"],
    *,
    steps: int,
    lr: float = 3e-4,
    batch: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train a network in place on rows of ids, and say what it brought on them and on a last tenth
    that was held back.

    AdamW on every weight, no LoRA; a tenth of the steps, at most 50, to warm up; then a cosine to a
    tenth of the rate.

    Args:
        network: ids [B,T] -> logits; its weights must ask for gradients, in float32 or float64.
        ids: windows of a text, in its order; with 10 rows or more, the last tenth is held back.
        steps: at least 1.
        lr: the peak learning rate.
        batch: rows of a step.
        seed: of their order.
        progress: shows where it stands.

    Raises:
        ArgumentError: a number is out of range, or the weights are too narrow to be trained.
        NonFiniteLoss: the loss is NaN or infinite.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> done = heal(model, torch.arange(180).view(20, 9) % 9, steps=20, lr=0.1)
    >>> done.held_tokens, done.held_after < done.held_before
    (16, True)
    """
    narrow = {str(p.dtype) for p in network.parameters() if p.dtype.itemsize < 4}
    if narrow:
        raise ArgumentError(
            f"the weights are {', '.join(sorted(narrow))}, in which a small step is lost; heal in "
            "float32 "
            "(--dtype float32) and convert the dtype afterwards"
        )
    held = len(ids) // HELD
    trained, rest = ids[: len(ids) - held], ids[len(ids) - held :]
    settings = Settings(steps=steps, lr=lr, warmup=min(50, math.ceil(steps / 10)))
    batches = Batches(trained.flatten(), batch=batch, context=ids.shape[1] - 1, seed=seed)
    before = _losses(network, trained, rest)
    fit(network, batches, settings, progress=progress)
    after = _losses(network, trained, rest)
    return FinetuneResult(
        steps,
        lr,
        batch,
        ids.shape[1] - 1,
        seed,
        trained.numel(),
        before[0],
        after[0],
        len(rest) * (ids.shape[1] - 1),
        before[1],
        after[1],
    )


def _losses(network: nn.Module, trained: Tensor, held: Tensor) -> tuple[float, float]:
    """The mean loss on either part; NaN where there is nothing."""
    return evaluate(network, trained), evaluate(network, held) if len(held) else math.nan
