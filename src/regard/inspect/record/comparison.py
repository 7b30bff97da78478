"""Two recordings beside each other: how far apart the patterns of each head are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.inspect.interventions.effect_table import EffectTable

if TYPE_CHECKING:
    from torch import Tensor

    from regard.inspect.record.recording import Recording


def compare_recordings(a: Recording, b: Recording, *, batch: int = 0) -> EffectTable:
    """Compare the patterns of two recordings; see `Recording.compare`."""
    shared = [name for name in a.places if name in b.places]
    if not shared:
        raise ArgumentError(
            f"the recordings have no place in common: {', '.join(a.places)} and "
            f"{', '.join(b.places)}"
        )
    heads = sorted({h for name in shared for h in a[name].heads if h in b[name].heads})
    values = np.full((len(shared), len(heads)), np.nan)
    for i, name in enumerate(shared):
        sizes = [(x[name].T, x[name].N) for x in (a, b)]
        if sizes[0] != sizes[1]:
            raise ArgumentError(
                f"{name} has the size {sizes[0]} (queries, keys) in one recording and {sizes[1]} "
                "in the other; compare runs with equally many tokens, or look at both on the page: "
                "regard.inspect.report(a, b=b)"
            )
        for j, head in enumerate(heads):
            if head in a[name].heads and head in b[name].heads:
                values[i, j] = _distance(a, b, name, head, batch)
    return EffectTable(
        "two recordings, head by head",
        "mean Jensen-Shannon divergence of rows, in bits",
        values,
        "layer",
        "head",
        tuple(shared),
        tuple(map(str, heads)),
    )


def _distance(a: Recording, b: Recording, name: str, head: int, batch: int) -> float:
    """Return the mean divergence of the rows that see a key in both recordings."""
    total, count = 0.0, 0
    for start in range(0, a[name].T, 256):
        rows = slice(start, start + 256)
        p, r = (x.weights(name, head, rows, batch=batch) for x in (a, b))
        visible = (p.sum(1) > 0) & (r.sum(1) > 0)
        if bool(visible.any()):
            divergences = _divergence(p[visible], r[visible])
            total, count = total + float(divergences.sum()), count + len(divergences)
    return total / count if count else float("nan")


def _divergence(p: Tensor, r: Tensor) -> Tensor:
    """Return JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2 of each row, in bits."""
    p, r = (x / x.sum(1, keepdim=True) for x in (p, r))
    entropies = [torch.special.entr(x).sum(1) for x in ((p + r) / 2, p, r)]
    nats: Tensor = (entropies[0] - (entropies[1] + entropies[2]) / 2).clamp(min=0)
    return nats / math.log(2)
