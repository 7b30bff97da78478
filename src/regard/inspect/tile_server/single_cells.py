"""One row, one column or one cell of a pattern as numbers, for the inspectors of the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from regard.inspect.record.recorded_place import RecordedStep
from regard.inspect.tile_server.exact_tiles import HeadTiles
from regard.inspect.tile_server.head_overviews import measuring
from regard.inspect.tile_server.kept_results import KeptResults
from regard.masks import Mask

TOP = 20
"""Number of keys or queries that an inspector lists."""
KEPT_LINES = 8
"""Number of rows and columns of a head that are kept, because one selection asks for a row twice:
for the list of tokens and for the inspector.
"""

_lines: WeakKeyDictionary[HeadTiles, KeptResults[Tensor]] = WeakKeyDictionary()


def _line(tiles: HeadTiles, which: tuple[str, int], make: Callable[[], Tensor]) -> Tensor:
    """Return a row or a column of a head, which is computed if it is not kept."""
    return _lines.setdefault(tiles, KeptResults(KEPT_LINES)).get(which, make)


def row_weights(tiles: HeadTiles, i: int) -> Tensor:
    """Compute the weights of one query over all keys, `[N]`; -1 where masked."""

    def make() -> Tensor:
        number, own = _step_of(tiles, i)
        p = tiles.weights(own, number, 0, tiles.N)
        return torch.full((tiles.N,), -1.0) if p is None else p[0]

    return _line(tiles, ("row", i), make)


def column_weights(tiles: HeadTiles, j: int) -> Tensor:
    """Compute the weights that all queries give to one key, `[T]`; -1 where masked."""

    def make() -> Tensor:
        parts = []
        for number, step in enumerate(tiles.place.steps):
            p = tiles.weights(slice(0, step.T), number, j, j + 1)
            parts.append(torch.full((step.T,), -1.0) if p is None else p[:, 0].float())
        return torch.cat(parts)

    return _line(tiles, ("column", j), make)


def describe_row(tiles: HeadTiles, i: int) -> dict[str, Any]:
    """Return the largest keys of a query in fp64, the rest, the cumulative mass of its n largest
    keys, and its mass by distance.
    """
    p = row_weights(tiles, i)
    is_visible = ~(p < 0)
    weights, n = p.clamp(min=0).double(), int(is_visible.sum())
    best = p.topk(min(TOP, n)).indices
    exact = _exact(tiles, torch.tensor([i]), best)
    # numpy sorts 20 times faster than torch on processors with vectors of 512 bits
    ordered = np.sort(weights.numpy())[::-1].cumsum()
    counts = [1 << x for x in range(max(1, n.bit_length()))] if n else []
    place, batch = tiles.place, tiles.batch
    away = (place.row_positions[batch][i] - place.column_positions[batch]).abs()
    distance = (away + 1).double().log2().floor().long().clamp(min=0)
    by_distance = torch.bincount(distance[is_visible], weights[is_visible]) if n else weights[:0]
    number, own = _step_of(tiles, i)
    step = place.steps[number]
    observe, metrics = measuring(tiles, torch.tensor([i]))
    observe(torch.tensor([0]), 0, p[None])
    values = metrics()
    total = float(weights.sum())
    return {
        "i": i,
        "seen": n,
        "sum": total,
        "sink": values["learned_sink"],
        "lse": _finite(float(step.lse[batch, tiles._index, own][0])),
        "entropy": math.log(values["effective_keys"]) if n else 0.0,
        "top": [{"j": int(j), "weight": w} for j, w in zip(best, exact, strict=True)],
        "others": n - len(exact),
        "rest": max(0.0, total - sum(exact)),
        "cumulative": [[c, float(ordered[min(c, len(ordered)) - 1])] for c in counts],
        "distance": by_distance.tolist(),
    }


def describe_column(tiles: HeadTiles, j: int) -> dict[str, Any]:
    """Return the queries that give a key the largest weights in fp64, and the mean that it
    receives.
    """
    p = column_weights(tiles, j)
    is_visible = ~(p < 0)
    n, total = int(is_visible.sum()), float(p.clamp(min=0).double().sum())
    best = p.topk(min(TOP, n)).indices
    exact = _exact(tiles, best, torch.tensor([j]))
    return {
        "j": j,
        "seen": n,
        "sum": total,
        "mean": total / max(1, n),
        "top": [{"i": int(i), "weight": w} for i, w in zip(best, exact, strict=True)],
        "others": n - len(exact),
        "rest": max(0.0, total - sum(exact)),
    }


def describe_cell(tiles: HeadTiles, i: int, j: int) -> dict[str, Any]:
    """Return the chain of numbers of one cell in fp64: products, dot, scale, softcap, bias, mask,
    score, lse and weight, and the rank of the weight in its row.
    """
    place, batch = tiles.place, tiles.batch
    number, own = _step_of(tiles, i)
    step = place.steps[number]
    heads, rows = slice(tiles.head, tiles.head + 1), slice(batch, batch + 1)
    block = place.block(slice(i, i + 1), slice(j, j + 1), heads, batch=rows)
    q = step.q[batch, tiles._index, own].double()[0]
    slots = step.slots(slice(j, j + 1))
    present = (slots.stop > slots.start) if isinstance(slots, slice) else len(slots) > 0
    products = q * place.pools[0].k[batch, tiles._group, j].double()
    scaled = float(products.sum()) * step.scale
    capped = scaled if step.softcap is None else step.softcap * math.tanh(scaled / step.softcap)
    score, weight = float(block.scores), float(block.weights)
    values = row_weights(tiles, i)
    return {
        "i": i,
        "j": j,
        "products": products.tolist(),
        "dot": float(products.sum()),
        "scale": step.scale,
        "scaled": scaled,
        "softcap": step.softcap,
        "capped": capped,
        "bias": score - capped if math.isfinite(score) and step.bias is not None else 0.0,
        "score": _finite(score),
        "lse": _finite(float(step.lse[batch, tiles._index, own][0])),
        "denominator": _finite(float(tiles.denominators[i])),
        "weight": weight,
        # compared in the dtype of the row: its own rounded weight is not above it
        "rank": 1 + int((values > values[j]).sum()),
        "seen": int((~(values < 0)).sum()),
        "kernel": step.kernel,
        "reasons": _reasons(tiles, step, own, j) if present else [{"why": "absent", "mask": ""}],
    }


def _reasons(tiles: HeadTiles, step: RecordedStep, own: slice, j: int) -> list[dict[str, str]]:
    """Return which terms of the mask forbid a cell, and why; none if it is visible."""
    slots = step.slots(slice(j, j + 1))
    low = slots.start if isinstance(slots, slice) else int(slots[0])
    rows = slice(own.start + step.first, own.stop + step.first)

    def allows(mask: Mask) -> bool:
        block = mask.block(step.q_positions, step.k_positions, rows, slice(low, low + 1))
        block = block[tiles.batch if block.shape[0] > 1 else 0]
        return bool(block[tiles.head if block.shape[0] > 1 else 0])

    def against(mask: Mask) -> list[dict[str, str]]:
        if allows(mask):
            return []
        if inner := mask.operands():
            return [reason for each in inner for reason in against(each)]
        refusal = mask.refusal()
        return [{"why": refusal.key, "mask": refusal.mask}]

    return against(step.mask)


def _exact(tiles: HeadTiles, rows: Tensor, columns: Tensor) -> list[float]:
    """Compute visible weights in fp64: of one row at some columns, or of some rows at one."""
    place, step = tiles.place, tiles.place.steps[0]
    if len(place.steps) == 1 and step.bias is None and not step.edited and step.first_column == 0:
        # the products of all of them at once; the mask is known to allow them
        q = step.q[tiles.batch, tiles._index, rows].double()
        scores = (q * place.pools[0].k[tiles.batch, tiles._group, columns].double()).sum(1)
        scores = scores * step.scale
        if step.softcap is not None:
            scores = step.softcap * torch.tanh(scores / step.softcap)
        return [float(x) for x in torch.exp(scores - tiles.denominators[rows])]
    heads, batch = slice(tiles.head, tiles.head + 1), slice(tiles.batch, tiles.batch + 1)
    cells = [(int(i), int(j)) for i in rows for j in columns]
    return [
        float(place.block(slice(i, i + 1), slice(j, j + 1), heads, batch=batch).weights)
        for i, j in cells
    ]


def _step_of(tiles: HeadTiles, i: int) -> tuple[int, slice]:
    """Return the number of the step of a row, and the row within it."""
    number, own, _ = next(tiles._parts(slice(i, i + 1)))
    return number, own


def _finite(x: float) -> float | None:
    """Return a number for JSON, which has no infinity and no NaN."""
    return x if math.isfinite(x) else None
