"""The models that a task may be given to, by name, and the sizes at which each learns it in
minutes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import recurrent, transformer
from regard.models.families import family, type_of
from regard.models.rnn import CELLS
from regard.nn.blocks import PreNorm
from regard.suggest import suggest
from regard.train.pretraining import config_of
from regard.train.tasks.task import Task

ATTENTIONS = ("bahdanau", "luong")
PAIRS = (
    *CELLS,
    *(f"{cell}+{attention}" for cell in CELLS for attention in ATTENTIONS),
    "transformer",
)
"""Models that read a source and say a target."""

ROWS = ("decoder", *CELLS)
"""Models that continue a row."""

MECHANISM = ("attention", "kv_heads", "position", "window", "set")
"""Options of a recipe that choose the attention of a decoder."""


@dataclass(frozen=True)
class Recipe:
    """Sizes of a model, and how it is trained.

    dim: of embeddings, and of a Transformer's layers. hidden: of a recurrent state, or of
        feed-forward layers.
    attention, kv_heads, position, window, set: of a decoder, as `regard train` has them; None and
        () are a Llama's.

    >>> Recipe().layers
    2
    """

    dim: int = 128
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0
    steps: int = 1000
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 100
    smoothing: float = 0.0
    attention: str | None = None
    kv_heads: int | None = None
    position: str | None = None
    window: int | None = None
    set: tuple[str, ...] = ()

    def with_(self, given: dict[str, Any]) -> Recipe:
        """The same with what a person has given in place of it; None is nothing given."""
        known = {f.name for f in fields(self)}
        found = {k: v for k, v in given.items() if k in known and v is not None}
        return replace(self, **found | ({"set": tuple(found["set"])} if "set" in found else {}))


def names(task: Task) -> tuple[str, ...]:
    """The models that a task may be given to.

    >>> from regard.train.tasks import TASKS
    >>> names(TASKS["mqar"])
    ('decoder', 'rnn', 'gru', 'lstm')
    """
    return PAIRS if task.kind == "pairs" else ROWS


def check_model(task: Task, name: str) -> None:
    """Refuse a model that cannot do a task.

    Raises:
        ArgumentError: names what it lacks, or the near ones.
    """
    allowed = names(task)
    if name in allowed:
        return
    if name in (*PAIRS, *ROWS):
        why = (
            "is one row to be continued, and has no source for an encoder or for attention to it"
            if task.kind == "rows"
            else "has a source and a target, which a model of one row does not tell apart"
        )
        raise ArgumentError(
            f"task {task.name!r} {why}: model {name!r} cannot do it; choose {', '.join(allowed)}"
        )
    hint = suggest(name, allowed, most=2, otherwise=f"; choose {', '.join(allowed)}")
    raise ArgumentError(f"there is no model {name!r}{hint}")


def recipe(task: Task, name: str) -> Recipe:
    """Sizes and steps with which a model learns a task in minutes on two cores."""
    check_model(task, name)
    if name == "transformer":
        return Recipe(hidden=256, lr=1.5e-3, warmup=200, steps=2000)
    if name == "decoder":
        return Recipe(hidden=352, lr=3e-3, steps=1000)
    steps = 1000 if name.endswith("bahdanau") else 2000 if name.endswith("luong") else 4000
    return Recipe(dim=64, hidden=128, layers=1, lr=3e-3, steps=steps)


def build(task: Task, name: str, sizes: Recipe) -> nn.Module:
    """A fresh model for a task, its weights from torch's random state.

    Raises:
        ArgumentError: the model cannot do the task, or a size does not fit.

    >>> from regard.train.tasks import TASKS
    >>> copy = TASKS["copy"]
    >>> type(build(copy, "lstm+bahdanau", recipe(copy, "lstm+bahdanau"))).__name__
    'RecurrentEncoderDecoder'
    """
    check_model(task, name)
    for option in MECHANISM:
        if name != "decoder" and getattr(sizes, option):
            raise ArgumentError(
                f"--{option.replace('_', '-')} is for the mechanism of a decoder, and model "
                f"{name!r} is none; leave it out"
            )
    V = len(task.vocabulary)
    if name == "transformer":
        return transformer(
            V,
            sizes.dim,
            sizes.heads,
            sizes.layers,
            hidden=sizes.hidden,
            residual=PreNorm,
            dropout=sizes.dropout,
        )
    if name == "decoder":
        return _decoder(task, V, sizes)
    cell, _, attention = name.partition("+")
    if task.kind == "rows":
        return RecurrentDecoder(cell, V, sizes.dim, sizes.hidden, sizes.layers)
    return recurrent(
        V, sizes.dim, sizes.hidden, cell=cell, layers=sizes.layers, attention=attention or None
    )


def _decoder(task: Task, vocabulary: int, sizes: Recipe) -> nn.Module:
    """A Llama with a key/value head per head, or what `regard train --attention` makes of a
    mechanism.
    """
    options = asdict(sizes) | {"context": task.lengths[1], "tie": False}
    if sizes.attention is None:
        if sizes.dim % (2 * sizes.heads):
            raise ArgumentError(
                f"dim {sizes.dim} / heads {sizes.heads} must be even: it is a head's width"
            )
        options["kv_heads"] = sizes.kv_heads or sizes.heads
    config = config_of(options, vocabulary)
    found = family(type_of(config))
    assert found is not None
    return found.build(config)


class RecurrentDecoder(nn.Module):
    """A recurrent network that continues a row: ids -> embedding -> network -> logits; without any
    attention.

    >>> import torch
    >>> RecurrentDecoder("gru", 11, 8, 16, 1)(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 11])
    """

    def __init__(self, cell: str, vocabulary: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.network = CELLS[cell](dim, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits [B,T,V] for the token after each of ids [B,T]."""
        logits: Tensor = self.head(self.network(self.embedding(ids))[0])
        return logits
