"""What the ranks of the tests of training do: functions that processes import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.train import Batches, ContextParallel, Settings, fit
from regard.train.pretraining import make_config, make_model

STEPS, CONTEXT = 4, 24
SIZES = {"dim": 32, "layers": 1, "heads": 4, "hidden": None, "context": CONTEXT, "tie": False}


def decoder() -> nn.Module:
    """A small decoder in fp64, with the same weights on every rank."""
    return make_model(make_config({**SIZES, "kv_heads": 2}, 300), 0).double()


def batches() -> Batches:
    """The same batches on every rank."""
    tokens = torch.randint(300, (4000,), generator=torch.Generator().manual_seed(2))
    return Batches(tokens, batch=2, context=CONTEXT, seed=3)


def settings(**changes: object) -> Settings:
    """Settings that save a checkpoint at every step."""
    return Settings(**{"steps": STEPS, "warmup": 1, "save_every": 1, "accumulate": 2, **changes})


def train(
    rank: int, folder: Path | None, dies: tuple[int, int] | None = None
) -> tuple[list[Tensor], float]:
    """The weights and the last loss; `dies` is a rank and the step in which it is killed."""
    model, calls = decoder(), 0
    parallel = ContextParallel()

    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if dies is not None and rank == dies[0] and calls > 2 * (dies[1] - 1):  # two batches a step
            os.kill(os.getpid(), signal.SIGKILL)
        return parallel.next_token_loss(module, rows)

    result = fit(model, batches(), settings(), loss=loss, folder=folder, parallel=parallel)
    return [p.detach() for p in model.parameters()], result.loss


def other_settings(rank: int) -> str:
    """What a rank says when another one has another learning rate."""
    try:
        fit(decoder(), batches(), settings(lr=1e-3 * (1 + rank)), parallel=ContextParallel())
    except ArgumentError as error:
        return str(error)
    return "nothing"
