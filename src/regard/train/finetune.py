"""Fine-tuning of a converted model: a few training steps of all that has a gradient."""

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

HOLDOUT = 10
"""One row in this many is held out from training."""


def finetune(
    network: nn.Module,
    ids: Int[Tensor, "N T"],
    *,
    steps: int,
    lr: float = 3e-4,
    batch: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train a network in place on rows of token ids; measure its loss before and after.

    AdamW trains all parameters that require a gradient. The learning rate warms up over a tenth of
    the steps, at most 50, then falls to a tenth along a cosine.
    """
    half_dtypes = {str(p.dtype) for p in network.parameters() if p.dtype.itemsize < 4}
    if half_dtypes:
        raise ArgumentError(
            f"the weights are {', '.join(sorted(half_dtypes))}, which rounds small steps away; "
            "train in float32 (--dtype float32) and convert the dtype afterwards"
        )
    holdout = len(ids) // HOLDOUT
    train_rows, holdout_rows = ids[: len(ids) - holdout], ids[len(ids) - holdout :]
    settings = Settings(steps=steps, lr=lr, warmup=min(50, math.ceil(steps / 10)))
    batches = Batches(train_rows.flatten(), batch=batch, context=ids.shape[1] - 1, seed=seed)
    before = _mean_losses(network, train_rows, holdout_rows)
    fit(network, batches, settings, progress=progress)
    after = _mean_losses(network, train_rows, holdout_rows)
    return FinetuneResult(
        steps=steps,
        lr=lr,
        batch=batch,
        length=ids.shape[1] - 1,
        seed=seed,
        tokens=train_rows.numel(),
        loss_before=before[0],
        loss_after=after[0],
        held_tokens=len(holdout_rows) * (ids.shape[1] - 1),
        held_before=before[1],
        held_after=after[1],
    )


def _mean_losses(
    network: nn.Module, train_rows: Tensor, holdout_rows: Tensor
) -> tuple[float, float]:
    """Return the mean loss on the training rows and on the held-out rows; NaN if there are none."""
    return evaluate(network, train_rows), evaluate(network, holdout_rows) if len(
        holdout_rows
    ) else math.nan
