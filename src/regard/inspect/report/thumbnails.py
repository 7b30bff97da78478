"""Every head of a place at a glance: thumbnails, and the metrics that a page sorts by."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from regard.inspect.metrics import measure
from regard.inspect.record.place import Place
from regard.inspect.record.tiles import Pooled, pooled

SIDE = 64
"""The most blocks of a thumbnail a side."""
OCTAVES = 24
"""What a thumbnail's byte spans: 1..255 is 2^-24..1 in equal steps of the logarithm, 0 is
nothing.
"""

METRICS = {
    "entropy": "share",
    "effective_keys": "count",
    "sink": "share",
    "learned_sink": "share",
    "previous_token": "share",
    "induction": "share",
    "duplicate": "share",
    "distance": "count",
    "local": "share",
    "max_logit": "score",
    "missing": "error",
    "future": "error",
    "empty": "error",
}
"""What `measure` gives and a page shows: name -> unit."""

LEADERS = (
    "induction",
    "previous_token",
    "duplicate",
    "-entropy",
    "sink",
    "distance",
    "-sink",
    "-distance",
)
"""The heads that lead in these deserve room on a page, in turns; with a minus: those that have
least.
"""


class Glance(NamedTuple):
    """All recorded heads of a place: thumbnails, and a number for each by metric (None: not
    finite).
    """

    blocks: Pooled
    metrics: dict[str, list[float | None]]


def glance(place: Place, ids: Tensor | None = None, row: int = 0) -> Glance:
    """Thumbnails of at most 64 x 64 blocks, and the metrics, of one row of the batch.

    Args:
        place: from a recording.
        ids: tokens [N] of the columns, where the rows are the same tokens.
        row: of the batch.

    >>> import regard
    >>> found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    >>> glance(found[0]).metrics["future"][:2]
    [0.0, 0.0]
    """
    size = tuple(max(1, -(-length // SIDE)) for length in (place.T, place.N))
    measured = measure(place, ids, batch=row).values
    metrics = {
        name: [x if math.isfinite(x) else None for x in measured[name].tolist()]
        for name in METRICS
        if name in measured
    }
    return Glance(pooled(place, (size[0], size[1]), batch=row), metrics)


def as_bytes(x: Float[Tensor, "*n"]) -> NDArray[np.uint8]:
    """Weights as bytes: 1 + 254 (1 + log2(x) / 24) rounded, at least 1 for anything above 0; NaN is
    255.

    >>> as_bytes(torch.tensor([0.0, 1e-30, 0.5, 1.0])).tolist()
    [0, 1, 244, 255]
    """
    level = (1 + 254 * (1 + x.double().clamp(min=2.0**-OCTAVES).log2() / OCTAVES)).round()
    level = torch.where(x.isnan(), 255.0, level.clamp(1, 255))
    return torch.where(x == 0, 0.0, level).to(torch.uint8).numpy()
