"""Small trained models for claims: decoders, tasks, and bytes of Python's documentation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.compare.mechanisms import build_decoder
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.timing import torch_threads
from regard.train.batches import Batches, BatchSource
from regard.train.loop import fit
from regard.train.losses import AnswerLoss, Loss, evaluate, next_token_loss
from regard.train.settings import Settings
from regard.train.tasks.task import IGNORE_INDEX, Task, TaskBatches, pad

BYTES = 256
"""The vocabulary of a model that reads bytes."""


def small_decoder(
    vocabulary: int,
    *,
    dim: int = 64,
    layers: int = 2,
    heads: int = 4,
    attention: str = "gqa",
    options: Mapping[str, int] | None = None,
    position: str = "catalogue",
    seed: int = 0,
    window: int | None = None,
) -> tuple[Config, Decoder]:
    """Return a decoder with random weights and one attention mechanism, and its config.

    The dim of the feed-forward layers is 8/3 of `dim`.

    Args:
        attention, options: a mechanism of the catalogue and its options; "gqa" without options has
            one key/value head per query head.
        position, window: see `regard.models.families.regard.Config`.
    """
    mechanism_options = dict(options or {})
    if attention == "gqa":
        mechanism_options.setdefault("groups", heads)
    config = Config(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=-(-dim * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attention=attention,
        attention_options=mechanism_options,
        position=position,
        window=window,
    )
    return config, build_decoder(config, seed)


def train_on_task(
    model: nn.Module,
    task: Task,
    count: int,
    *,
    lr: float = 3e-3,
    batch: int = 32,
    seed: int = 0,
    loss: Loss | None = None,
) -> float:
    """Train on the examples of a task, and return the loss of the last step."""
    return _fit(model, TaskBatches(task, batch=batch, seed=seed), count, lr, loss or AnswerLoss())


def train_on_bytes(
    model: nn.Module, count: int, *, context: int, lr: float = 3e-3, batch: int = 16, seed: int = 0
) -> float:
    """Train on the bytes of Python's documentation, and return the loss of the last step.

    >>> train_on_bytes(small_decoder(BYTES, dim=16, heads=2)[1], 2, context=16, batch=2) > 3
    True
    """
    return _fit(
        model,
        Batches(_documentation_bytes()[0], batch=batch, context=context, seed=seed),
        count,
        lr,
        next_token_loss,
    )


def gradient_norms(
    model: nn.Module, count: int, *, context: int, lr: float = 3e-3, batch: int = 16, seed: int = 0
) -> list[float]:
    """Train on the bytes at a constant learning rate without clipping, and return the gradient norm
    of each step.

    >>> _, model = small_decoder(BYTES, dim=16, heads=2)
    >>> [norm > 0 for norm in gradient_norms(model, 2, context=16, batch=2)]
    [True, True]
    """
    norms = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data = Batches(_documentation_bytes()[0], batch=batch, context=context, seed=seed)
    with torch_threads(1), torch.enable_grad():
        for _ in range(count):
            optimizer.zero_grad()
            torch.autograd.backward(next_token_loss(model, next(data)))
            norms.append(
                float(
                    nn.utils.get_total_norm(
                        [p.grad for p in model.parameters() if p.grad is not None]
                    )
                )
            )
            optimizer.step()
    model.eval()
    return norms


def byte_loss(model: nn.Module, context: int, rows: int = 64) -> float:
    """Return the loss on the validation part of the text, in nats per byte."""
    validation = _documentation_bytes()[1]
    width = context + 1
    return evaluate(model, validation[: rows * width].view(-1, width), batch=16)


def validation_bytes(count: int) -> Int[Tensor, " n"]:
    """Return the first bytes of the validation part of the text, `[n]`."""
    return _documentation_bytes()[1][:count]


@torch.no_grad()
def answer_accuracy(
    model: nn.Module, task: Task, split: str, examples: int = 256, seed: int | str = 0
) -> float:
    """Return the share of answers that the model predicts after the right tokens before them."""
    model.eval()
    correct = total = 0
    for rows in pad(task, task.examples(split, examples, seed)).split(32):
        counted = rows.target != IGNORE_INDEX
        correct += int((model(rows.source).argmax(-1) == rows.target)[counted].sum())
        total += int(counted.sum())
    return correct / max(1, total)


def _fit(model: nn.Module, data: BatchSource, count: int, lr: float, loss: Loss) -> float:
    """Train silently with a warm-up of a tenth, on one thread, which is faster at this size."""
    settings = Settings(steps=count, lr=lr, warmup=max(1, count // 10), weight_decay=0.01)
    with torch_threads(1):
        result = fit(model, data, settings, loss=loss)
    if result.stopped_by is not None:  # a part of the training has no meaningful result
        raise KeyboardInterrupt
    model.eval()
    return result.loss


@cache
def _documentation_bytes() -> tuple[Tensor, Tensor]:
    """Return the training and the validation bytes of the topics of `pydoc`."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]
