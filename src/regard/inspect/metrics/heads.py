"""Scores of every head of a model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.metrics.measure import measure
from regard.inspect.record import record
from regard.models.model import Model

SCORES = ("previous_token", "induction", "duplicate", "entropy", "sink")


def head_scores(model: Model, ids: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "layers H"]]:
    """Every score of every head, as means over the rows of a batch.

    Keys: previous_token, induction, duplicate, entropy (of a row, over ln of the keys that it may
        see: 0 to 1), sink (the share of the first key). The model runs on its own kernels; patterns
        are computed from what they were given.

    Args:
        model: a model.
        ids: token ids; random ids repeated (`repeated_ids`) show what a head does whatever the
            words mean.

    Raises:
        ArgumentError: ids are shorter than 2, or a row repeats no token.

    >>> import regard
    >>> from regard.inspect import repeated_ids
    >>> model = regard.load("tiny")
    >>> scores = head_scores(model, repeated_ids(model.config.vocab_size, 16, batch=2))
    >>> sorted(scores)
    ['duplicate', 'entropy', 'induction', 'previous_token', 'sink']
    """
    found: dict[str, list[Tensor]] = {name: [] for name in SCORES}
    for place in record(model, ids, keep=()).places.values():
        rows = [measure(place, row, batch=b, sinks=1).values for b, row in enumerate(ids)]
        for name in SCORES:
            if any(name not in values for values in rows):
                raise ArgumentError(
                    f"{name}: no token occurs twice, far enough apart, in ids, or there is one "
                    "token; "
                    "give a text that repeats itself, such as repeated_ids(...)"
                )
            found[name].append(torch.stack([values[name] for values in rows]).mean(0).float())
    return {name: torch.stack(values) for name, values in found.items()}
