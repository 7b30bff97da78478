"""What the served page asks for: facts about its places, the numbers of a row, a column or a cell,
and weights as bytes.

Weights have one encoding, little-endian: a header of 24 bytes, the peaks, the visible keys of each
block row, and planes of fp32 numbers. Tiles, overviews, rows and columns have it.

    header   "RGT1", u8 kind (0 empty, 1 blocks, 2 a row or a column), u8 level, u16 rows,
             u16 columns, u8 number of peaks, u8 planes, u32 sampled rows of a block row,
             f32 computed share, u32 bytes that follow
    peaks    u32 row, u32 column, f32 weight, f32 keys that the row sees, of each
    keys     f32 for each block row
    planes   mass, max, visible share; at level 0, where a block is one cell, its weight alone

A number below 0 is a masked block, and NaN is a weight that is not a number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from regard.inspect.record.recorded_place import RecordedStep, own_or_shared, range_of
from regard.inspect.record.row_sums import row_sums
from regard.inspect.report.page_data import AUDITED_SCORES, place_facts, source_facts
from regard.inspect.tile_server.exact_tiles import HeadTiles, TileData
from regard.inspect.tile_server.head_overviews import METRICS, HeadOverview, measuring
from regard.inspect.tile_server.session import KeptResults, ViewSession
from regard.masks import Mask


def page_facts(session: ViewSession) -> dict[str, Any]:
    """Return the places and texts of a session as plain data."""
    texts: list[list[str]] = []
    sources = [source_facts(recording) for recording in session.recordings]
    opened = {
        (name, h) for name, place in session.recordings[0].places.items() for h in place.heads
    }
    reduced = [key for key in session.overviews.heads if key not in opened]
    return {
        "title": " | ".join(str(x["title"]) for x in sources if x["title"]) or "recording",
        "sources": sources,
        "texts": texts,
        "places": [_place(session, n, texts) for n in range(len(session.places))],
        "metrics": list(METRICS),
        "not_kept": len(reduced),
        "progress": progress_facts(session),
    }


def progress_facts(session: ViewSession) -> dict[str, Any]:
    """Return the version of the places, the work that goes on, and where the page may open."""
    return {
        "version": session.version,
        "expected": session.expected,
        "measuring": session.unmeasured is not None,
        "notable": session.notable(),
    }


def _place(session: ViewSession, number: int, texts: list[list[str]]) -> dict[str, Any]:
    """Return the facts about a place; equal texts are stored once."""
    place = session.places[number]
    return place_facts(place, session.recordings[session.sources[number]], texts) | {
        "q_positions": _positions(place.row_positions[session.batch].tolist()),
        "k_positions": _positions(place.column_positions[session.batch].tolist()),
        "source": session.sources[number],
        "top": HeadTiles(place, place.heads[0], session.batch).top_level,
        "rule": "; ".join(dict.fromkeys(str(step.mask) for step in place.steps)),
        "kernel": ", ".join(dict.fromkeys(step.kernel for step in place.steps)),
    }


def audit_facts(session: ViewSession, number: int) -> dict[str, Any]:
    """Return the audit of a place: how far its row sums differ from 1."""
    audit = row_sums(session.places[number], cells=AUDITED_SCORES)
    return {**asdict(audit), "sound": audit.sound}


def _positions(positions: list[int]) -> list[int] | None:
    """Return positions, or None if they are 0, 1, 2, ..."""
    return None if positions == list(range(len(positions))) else positions


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
    """Return a query's largest keys in fp64, the rest, and its mass by rank and distance."""
    p = row_weights(tiles, i)
    is_visible = ~(p < 0)
    weights, n = p.clamp(min=0).double(), int(is_visible.sum())
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
    return {
        "i": i,
        **_largest_of(p, "j", lambda best: _exact(tiles, torch.tensor([i]), best)),
        "sink": values["learned_sink"],
        "lse": _finite(float(step.lse[batch, tiles._index, own][0])),
        "entropy": math.log(values["effective_keys"]) if n else 0.0,
        "cumulative": [[c, float(ordered[min(c, len(ordered)) - 1])] for c in counts],
        "distance": by_distance.tolist(),
    }


def describe_column(tiles: HeadTiles, j: int) -> dict[str, Any]:
    """Return the queries that give a key the largest weights in fp64, and the mean."""
    p = column_weights(tiles, j)
    facts = _largest_of(p, "i", lambda best: _exact(tiles, best, torch.tensor([j])))
    return {"j": j, **facts, "mean": facts["sum"] / max(1, facts["seen"])}


def _largest_of(p: Tensor, letter: str, exactly: Callable[[Tensor], list[float]]) -> dict[str, Any]:
    """Return the number and the sum of visible weights, the largest in fp64, and the rest."""
    n, total = int((~(p < 0)).sum()), float(p.clamp(min=0).double().sum())
    best = p.topk(min(TOP, n)).indices
    exact = exactly(best)
    return {
        "seen": n,
        "sum": total,
        "top": [{letter: int(i), "weight": w} for i, w in zip(best, exact, strict=True)],
        "others": n - len(exact),
        "rest": max(0.0, total - sum(exact)),
    }


def describe_cell(tiles: HeadTiles, i: int, j: int) -> dict[str, Any]:
    """Return the numbers from products to weight of one cell in fp64, and its rank."""
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
    keys, _ = range_of(slots)

    def against(mask: Mask) -> list[dict[str, str]]:
        if bool(own_or_shared(step.allowed(mask, own, keys, tiles.batch), tiles.head)):
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


HEADER = struct.Struct("<4sBBHHBBIfI")
MAGIC = b"RGT1"
EMPTY, BLOCKS, LINE = range(3)
"""Kinds of answers."""


def encode_tile(tile: TileData | None, level: int) -> bytes:
    """Return a tile as bytes; None is a tile in which the mask allows no pair."""
    if tile is None:
        return HEADER.pack(MAGIC, EMPTY, level, 0, 0, 0, 0, 0, 1.0, 0)
    if level == 0:
        return _blocks(tile, level, [tile.max])
    return _blocks(tile, level, [tile.mass, tile.max, tile.visible])


def encode_overview(overview: HeadOverview) -> bytes:
    """Return an overview as bytes: its metrics as fp32, then its blocks."""
    metrics = _numbers(torch.tensor(overview.metrics))
    return metrics + _blocks(overview.blocks, 0, [overview.blocks.mass, overview.blocks.max])


def encode_weights(weights: Tensor) -> bytes:
    """Return the weights of a row or a column."""
    body = _numbers(weights)
    return HEADER.pack(MAGIC, LINE, 0, 1, min(len(weights), 65535), 0, 1, 0, 1.0, len(body)) + body


def _blocks(tile: TileData, level: int, planes: list[Tensor | None]) -> bytes:
    """Return the header, the peaks and the keys of blocks, and those planes that there are."""
    bodies = [_numbers(plane) for plane in planes if plane is not None]
    peaks = b"".join(struct.pack("<IIff", *peak) for peak in tile.peaks)
    body = b"".join([peaks, _numbers(tile.keys), *bodies])
    counts = *tile.max.shape, len(tile.peaks), len(bodies), tile.sampled
    return HEADER.pack(MAGIC, BLOCKS, level, *counts, tile.computed, len(body)) + body


def _numbers(x: Tensor) -> bytes:
    """Return the numbers of a tensor as bytes of little-endian fp32."""
    return x.numpy().astype("<f4").tobytes()
