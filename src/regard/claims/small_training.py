"""What the trained claims share: small decoders, made tasks, bytes of the language's documentation,
a few hundred steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.bench.runner import torch_threads
from regard.compare.mechanisms import decoder as fresh
from regard.models.decoder import Decoder
from regard.models.families.regard import Config
from regard.train.batches import Batches
from regard.train.loop import fit
from regard.train.losses import AnswerLoss, Loss, evaluate, next_token_loss
from regard.train.settings import Settings
from regard.train.tasks.task import IGNORE_INDEX, Task, TaskBatches, pad

BYTES = 256


def small_decoder(
    vocabulary: int,
    *,
    dim: int = 64,
    layers: int = 2,
    heads: int = 4,
    attention: str = "gqa",
    options: Mapping[str, Any] | None = None,
    position: str = "catalogue",
    seed: int = 0,
    window: int | None = None,
) -> tuple[Config, Decoder]:
    """A fresh decoder with one mechanism, and its config; the feed-forward width is 8/3 of dim.

    Args:
        vocabulary: ids.
        dim, layers, heads: sizes.
        attention, options: of the catalogue; gqa without options has a key/value head for each
            query head.
        position, window: as `regard.models.families.regard.Config`.
        seed: of the weights.

    >>> sum(p.numel() for p in small_decoder(256, layers=1)[1].parameters())
    86208
    """
    own = dict(options or {})
    if attention == "gqa":
        own.setdefault("groups", heads)
    config = Config(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=-(-dim * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attention=attention,
        attention_options=own,
        position=position,
        window=window,
    )
    return config, fresh(config, seed)


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
    """Train on the examples of a task; gives the loss of the last step.

    >>> from regard.train.tasks import TASKS
    >>> task = TASKS["mqar"]
    >>> train_on_task(small_decoder(len(task.vocabulary), dim=16, heads=2)[1], task, 2, batch=2) > 0
    True
    """
    return _fit(model, TaskBatches(task, batch=batch, seed=seed), count, lr, loss or AnswerLoss())


def train_on_bytes(
    model: nn.Module, count: int, *, context: int, lr: float = 3e-3, batch: int = 16, seed: int = 0
) -> float:
    """Train on the bytes of a text that every Python has, its documentation; gives the loss of the
    last step.

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
    """Train on the same text at one rate, without clipping; gives the norm of all gradients of each
    step.

    >>> [x > 0 for x in gradient_norms(small_decoder(BYTES, dim=16, heads=2)[1], 2, context=16, batch=2)]
    [True, True]
    """
    found = []
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr)
    data = Batches(_documentation_bytes()[0], batch=batch, context=context, seed=seed)
    with torch_threads(1), torch.enable_grad():
        for _ in range(count):
            optimiser.zero_grad()
            torch.autograd.backward(next_token_loss(model, next(data)))
            found.append(
                float(
                    nn.utils.get_total_norm(
                        [p.grad for p in model.parameters() if p.grad is not None]
                    )
                )
            )
            optimiser.step()
    model.eval()
    return found


def byte_loss(model: nn.Module, context: int, rows: int = 64) -> float:
    """Nats per byte on rows of the text that training does not see.

    >>> byte_loss(small_decoder(BYTES, dim=16, heads=2)[1], 16, rows=2) > 3
    True
    """
    held = _documentation_bytes()[1]
    width = context + 1
    return evaluate(model, held[: rows * width].view(-1, width), batch=16)


def validation_bytes(count: int) -> Int[Tensor, " n"]:
    """The first bytes of the part that is never trained on.

    >>> validation_bytes(3).shape
    torch.Size([3])
    """
    return _documentation_bytes()[1][:count]


@torch.no_grad()
def answer_accuracy(
    model: nn.Module, task: Task, split: str, examples: int = 256, seed: int | str = 0
) -> float:
    """The share of asked tokens that the model thinks likeliest, each given what is before it.

    >>> from regard.train.tasks import TASKS
    >>> task = TASKS["mqar"]
    >>> 0 <= answer_accuracy(small_decoder(len(task.vocabulary), dim=16, heads=2)[1], task, "validation", 4) <= 1
    True
    """
    model.eval()
    hits = asked = 0
    for part in pad(task, task.examples(split, examples, seed)).split(32):
        counted = part.target != IGNORE_INDEX
        hits += int((model(part.source).argmax(-1) == part.target)[counted].sum())
        asked += int(counted.sum())
    return hits / max(1, asked)


def _fit(model: nn.Module, data: Any, count: int, lr: float, loss: Loss) -> float:
    """Train, quietly: warm up for a tenth of the steps, on one thread: a second one costs such
    small products more than it gives.
    """
    settings = Settings(steps=count, lr=lr, warmup=max(1, count // 10), weight_decay=0.01)
    with torch_threads(1):
        found = fit(model, data, settings, loss=loss)
    if (
        found.stopped_by is not None
    ):  # the loop ends its step and returns: half a training is no result
        raise KeyboardInterrupt
    model.eval()
    return found.loss


@cache
def _documentation_bytes() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes of the topics of `pydoc`."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]
