"""The models that can learn a task, by name, and sizes with which each learns it in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.models import recurrent, transformer
from regard.models.families import family, model_type_of
from regard.models.rnn import CELLS
from regard.nn.blocks import PreNorm
from regard.train.pretraining import make_config
from regard.train.tasks.task import Task

ATTENTIONS = ("bahdanau", "luong")
SEQ2SEQ_MODELS = (
    *CELLS,
    *(f"{cell}+{attention}" for cell in CELLS for attention in ATTENTIONS),
    "transformer",
)
"""Models for "seq2seq" tasks, which map a source to a target."""

CAUSAL_MODELS = ("decoder", *CELLS)
"""Models for "causal" tasks, which predict the next token."""

ATTENTION_OPTIONS = ("attention", "kv_heads", "position", "window", "set")
"""Attributes of a recipe that choose the attention of model "decoder"."""


@dataclass(frozen=True)
class Recipe:
    """The sizes of a model, and how it is trained.

    Attributes:
        dim: the dim of the embedding; in a Transformer also the model dim.
        hidden: the dim of a recurrent network's state, or the inner dim of feed-forward layers.
        layers, heads, dropout: the numbers of layers and of heads, and the dropout rate.
        steps, batch, lr, warmup: the training settings, see `regard.train.Settings`.
        smoothing: eps of the label smoothing.
        attention, kv_heads, position, window, set: options of model "decoder", see `regard train
            --help`. With None and () the model is a Llama.

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

    def with_overrides(self, overrides: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values, for those that are not None."""
        known = {f.name for f in fields(self)}
        values = {k: v for k, v in overrides.items() if k in known and v is not None}
        return replace(self, **values | ({"set": tuple(values["set"])} if "set" in values else {}))


def models_for(task: Task) -> tuple[str, ...]:
    """Return the names of the models that can learn a task.

    >>> from regard.train.tasks import TASKS
    >>> models_for(TASKS["mqar"])
    ('decoder', 'rnn', 'gru', 'lstm')
    """
    return SEQ2SEQ_MODELS if task.kind == "seq2seq" else CAUSAL_MODELS


def check_model(task: Task, name: str) -> None:
    """Check that a model can learn a task."""
    allowed = models_for(task)
    if name in allowed:
        return
    if name in (*SEQ2SEQ_MODELS, *CAUSAL_MODELS):
        reason = (
            "predicts the next token of one sequence and has no source for an encoder"
            if task.kind == "causal"
            else "maps a source to a target, and a model of one sequence does not separate them"
        )
        raise ArgumentError(
            f"task {task.name!r} {reason}: model {name!r} cannot learn it; choose "
            f"{', '.join(allowed)}"
        )
    hint = suggest(name, allowed, most=2, otherwise=f"; choose {', '.join(allowed)}")
    raise ArgumentError(f"there is no model {name!r}{hint}")


def recipe(task: Task, name: str) -> Recipe:
    """Return sizes and steps with which a model learns a task in minutes on two cores."""
    check_model(task, name)
    if name == "transformer":
        return Recipe(hidden=256, lr=1.5e-3, warmup=200, steps=2000)
    if name == "decoder":
        return Recipe(hidden=352, lr=3e-3, steps=1000)
    steps = 1000 if name.endswith("bahdanau") else 2000 if name.endswith("luong") else 4000
    return Recipe(dim=64, hidden=128, layers=1, lr=3e-3, steps=steps)


def build(task: Task, name: str, sizes: Recipe) -> nn.Module:
    """Return a model for a task with random weights, from torch's global random state.

    >>> from regard.train.tasks import TASKS
    >>> copy = TASKS["copy"]
    >>> type(build(copy, "lstm+bahdanau", recipe(copy, "lstm+bahdanau"))).__name__
    'RecurrentEncoderDecoder'
    """
    check_model(task, name)
    for option in ATTENTION_OPTIONS:
        if name != "decoder" and getattr(sizes, option):
            raise ArgumentError(
                f"--{option.replace('_', '-')} is an option of model 'decoder', and the model is "
                f"{name!r}; leave it out"
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
    if task.kind == "causal":
        return RecurrentLanguageModel(cell, V, sizes.dim, sizes.hidden, sizes.layers)
    return recurrent(
        V, sizes.dim, sizes.hidden, cell=cell, layers=sizes.layers, attention=attention or None
    )


def _decoder(task: Task, vocabulary: int, sizes: Recipe) -> nn.Module:
    """Return a Llama with as many key/value heads as heads, or a decoder with `sizes.attention`."""
    options = asdict(sizes) | {"context": task.lengths[1], "tie": False}
    if sizes.attention is None:
        if sizes.dim % (2 * sizes.heads):
            raise ArgumentError(
                f"dim {sizes.dim} / heads {sizes.heads} is the dim of a head and must be even"
            )
        options["kv_heads"] = sizes.kv_heads or sizes.heads
    config = make_config(options, vocabulary)
    model_family = family(model_type_of(config))
    return model_family.build(config)


class RecurrentLanguageModel(nn.Module):
    """A recurrent language model without attention: ids -> embedding -> recurrent network ->
    logits.

    Args:
        cell: a key of `regard.models.rnn.CELLS`: "rnn", "gru" or "lstm".
        vocabulary: the number of tokens.
        dim: the embedding dim.
        hidden: the dim of the state.
        layers: recurrent layers.

    >>> import torch
    >>> RecurrentLanguageModel("gru", 11, 8, 16, 1)(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 11])
    """

    def __init__(self, cell: str, vocabulary: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.network = CELLS[cell](dim, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Return the logits `[B, T, V]` of the token after each of `ids`, `[B, T]`."""
        logits: Tensor = self.head(self.network(self.embedding(ids))[0])
        return logits
