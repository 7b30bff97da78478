"""How to train: the numbers, the learning rate of every step, and the optimiser made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from regard.errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """How to train: `lr` is the peak, `accumulate` batches make a step, `clip` bounds its 2-norm.

    Raises:
        ArgumentError: a number is out of range, by name.

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
                raise ArgumentError(f"{name} is {value}; it must be positive and finite")
        for name in ("warmup", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ArgumentError(f"{name} is {value}; it must be 0 or more, and finite")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 1, 2, ..., steps.

        lr * step / warmup, then lr * (0.1 + 0.9 * (1 + cos(pi * done)) / 2) with done from 0 to 1:
        a tenth is left at the end.
        """
        if step <= self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def optimiser(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, none on norms, gains and biases.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.

    Raises:
        ArgumentError: the model has nothing to train.

    >>> groups = optimiser(nn.Linear(2, 3), Settings(steps=1)).param_groups
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 1)]
    """
    used = [p for p in model.parameters() if p.requires_grad]
    if not used:
        raise ArgumentError("model has no parameter with requires_grad; there is nothing to train")
    groups = [
        {"params": [p for p in used if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in used if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
