"""Where a model looks in its source while it says each token: the alignment that nobody taught it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.tap import Trace
from regard.train.seq2seq import where
from regard.train.tasks.answers import Outcome
from regard.train.tasks.base import Task
from regard.train.tasks.made import IGNORED, pad
from regard.train.tasks.vocabulary import BOS, EOS


@dataclass(frozen=True)
class Alignment:
    """Weights of one head: a row for each token said, a column for each token of the source.

    head: which it is. place: the same, with how it was chosen.
    weights: [said, source], each row a distribution.
    """

    outcome: Outcome
    head: str
    place: str
    source: tuple[str, ...]
    said: tuple[str, ...]
    weights: Float[Tensor, "T S"]


@torch.no_grad()
def alignment(
    model: nn.Module, task: Task, outcome: Outcome, *, head: str | None = None
) -> Alignment | None:
    """The alignment of what a model said; None for a model without attention.

    A model with one head has one. Of several heads in several layers the sharpest is taken: the one whose largest weights,
    averaged over the rows, are largest; or the `head` of another alignment. The taps hold what the kernel computed: nothing is computed again by other means.
    """
    device = next(model.parameters()).device
    if task.kind == "pairs":
        encode = task.vocabulary.encode
        source = torch.tensor([[*encode(outcome.example.source), EOS]], device=device)
        target = torch.tensor([[BOS, *encode(outcome.said)]], device=device)
        found = _patterns(model, (source, target, where(source)), cross=True)
        columns, rows = (*outcome.example.source, "⏎"), (*outcome.said, "⏎")
        asked = torch.ones(len(rows), dtype=torch.bool)
    else:
        batch = pad(task, [outcome.example]).to(device)
        found = _patterns(model, (batch.source,), cross=False)
        columns, rows = outcome.example.source, outcome.said
        asked = (batch.target[0] != IGNORED).cpu()
    if not found:
        return None
    heads = {place: x[asked] for place, x in found.items()}
    best = (
        max(heads, key=lambda place: float(heads[place].amax(-1).mean())) if head is None else head
    )
    how = f", the sharpest of {len(heads)} heads" if len(heads) > 1 and head is None else ""
    return Alignment(outcome, best, best + how, columns, rows, heads[best])


def _patterns(
    model: nn.Module, inputs: tuple[Any, ...], *, cross: bool
) -> dict[str, Float[Tensor, "T S"]]:
    """Every head's pattern of one example, by the name of its place."""
    was_training = model.training
    model.eval()
    try:
        with Trace("pattern", missing="ignore") as trace:  # a model without attention has none
            model(*inputs)
    finally:
        model.train(was_training)
    found: dict[str, Tensor] = {}
    for name in trace:
        place = name.removesuffix(".pattern")
        if place.startswith("encoder") or (cross and place.endswith("attention")):
            continue  # the source to itself, the target to itself
        pattern = (
            torch.cat(trace.every(name), 2)[0].float().cpu()
        )  # [H,T,S]; a step each, or all at once
        for h, head in enumerate(pattern):
            found[f"{_spoken(place)}, head {h}" if len(pattern) > 1 else _spoken(place)] = head
    return found


def _spoken(place: str) -> str:
    """A place as a reader knows it.

    >>> _spoken("decoder.layers.1.cross"), _spoken("layers.0"), _spoken("decoder")
    ('decoder layer 1', 'layer 0', 'decoder')
    """
    kept = [word for word in place.split(".") if word not in ("cross", "attention")]
    return " ".join(kept).replace("layers", "layer")
