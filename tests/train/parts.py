"""A small model with tied weights, dropout and a norm, and what a test needs around it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.train import Batches, Settings, TrainResult, fit

TOKENS = torch.randint(0, 11, (400,), generator=torch.Generator().manual_seed(7))


class Small(nn.Module):
    """ids [B,T] -> logits [B,T,11]; dropout makes the global random state matter."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.norm(self.embed(ids)))
        return self.head(x + torch.tanh(self.mix(x)))


def batches(seed: int = 3) -> Batches:
    return Batches(TOKENS, batch=4, context=6, seed=seed, repeat=0.3)


def settings(**change: Any) -> Settings:
    plain = {"steps": 20, "warmup": 3, "log_every": 4, "validate_every": 6, "save_every": 100}
    return Settings(**plain | change)


def run(model: nn.Module, folder: Path | None = None, **change: Any) -> TrainResult:
    """`fit` with everything on."""
    keys = ("validation", "loss", "progress", "keep")
    options = {k: change.pop(k) for k in keys if k in change}
    log = folder / "train.csv" if folder else None
    where = folder / "checkpoints" if folder else None
    options.setdefault("validation", TOKENS[:63].view(9, 7))
    return fit(model, batches(), settings(**change), folder=where, log=log, **options)


def digest(tensors: dict[str, Tensor]) -> str:
    """The bits of named tensors as one hash."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()
