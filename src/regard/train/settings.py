"""The settings of a training run: its numbers, the learning-rate schedule, and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from regard.errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Args:
        lr: the peak learning rate.
        warmup: steps of linear warm-up to the peak.
        weight_decay: AdamW's weight decay of matrices; norms and biases are not decayed.
        clip: the largest 2-norm of the gradient.
        accumulate: batches per step.
        bf16: whether the forward pass runs under bf16 autocast.
        log_every, validate_every, save_every: steps between two rows of the log, two validations
            and two checkpoints.

    Raises:
        ArgumentError: a number is out of range; the message names it.

    >>> Settings(steps=100, lr=1e-3, warmup=10).lr_at(10)
    0.001
    """

    steps: int
    lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    bf16: bool = False
    log_every: int = 50
    validate_every: int = 250
    save_every: int = 500

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ArgumentError(
                    f"{name} is {value}; it must be positive and finite", argument=name
                )
        for name in ("warmup", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ArgumentError(
                    f"{name} is {value}; it must be 0 or more and finite", argument=name
                )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine decay to a tenth of the
        peak.

        lr * step / warmup                                        up to warmup
        lr * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)           then, with progress from 0 to 1

        Args:
            step: 1 for the first step.

        Returns:
            The learning rate.
        """
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return an AdamW optimizer that applies weight decay to matrices, not to norms and biases.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.

    >>> groups = make_optimizer(nn.Linear(2, 3), Settings(steps=1)).param_groups
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ArgumentError("model has no parameter with requires_grad; there is nothing to train")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
