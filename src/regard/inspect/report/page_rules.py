"""The masks and biases of a recording as page data: masks as trees of column ranges, biases as
tables.

The page has no code for particular masks or biases. For each term of a mask's `&` and `|`, the
ranges of columns that each row sees are stored, so that the page can say which term excludes a
key. A term with more ranges than `MAX_RANGES` is stored as bits. Equal arrays are stored once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard import masks
from regard.inspect.record.recorded_place import ALL, Place, RecordedStep, own_or_shared

Arrays = dict[str, NDArray[np.generic]]
BIAS_CELLS_PER_CHUNK = 1 << 22
"""Number of cells of a bias that are evaluated together."""
MASK_CELLS_PER_CHUNK = 1 << 24
"""Number of cells of a mask that are evaluated together where it has no closed form."""
MAX_RANGES = 8
"""The largest number of ranges of columns per row; a mask with more is stored as bits."""


@dataclass
class RuleGroup:
    """Rows of a place with the same mask, bias, scale, softcap and sink."""

    step: RecordedStep
    steps: list[tuple[RecordedStep, int]] = field(default_factory=list)


class PageRules:
    """The masks, biases and scales of a place as page data.

    Rows share a rule; equal arrays are stored once, under a name made from their content.
    """

    def __init__(self, place: Place, row: int, arrays: Arrays) -> None:
        self.place, self.row, self.arrays = place, row, arrays
        self.groups: list[RuleGroup] = []
        self.rule_of_row = np.zeros(place.T, np.int32)
        first = 0
        for step in place.steps:
            number = next((n for n, x in enumerate(self.groups) if _same_rule(x.step, step)), None)
            if number is None:
                number = len(self.groups)
                self.groups.append(RuleGroup(step))
            self.groups[number].steps.append((step, first))
            self.rule_of_row[first : first + step.T] = number
            first += step.T

    def rule_data(self, heads: list[int]) -> list[dict[str, object]]:
        """Return each rule as page data: scale, softcap, kernel, sink, mask (a tree) and bias."""
        return [
            {
                "scale": float(rows.step.scale),
                "softcap": None if rows.step.softcap is None else float(rows.step.softcap),
                "kernel": rows.step.kernel,
                "sink": self._sink(rows.step),
                "text": str(rows.step.mask),
                "mask": self._tree(rows, [step.mask for step, _ in rows.steps]),
                "bias": self._bias(rows, heads),
            }
            for rows in self.groups
        ]

    def _sink(self, step: RecordedStep) -> list[float | None] | None:
        """Return the sink logit of each query head; None for one that was not recorded."""
        if step.sink is None:
            return None
        known = dict(zip(self.place.heads, step.sink.double().flatten().tolist(), strict=True))
        return [known.get(h) for h in range(self.place.H)]

    def keys_present(self) -> dict[str, Any] | None:
        """Store which keys each row's call had: the array's name and form, or None for all."""
        parts = []
        for rows in self.groups:
            for step, first in rows.steps:
                present = torch.zeros(1, 1, self.place.N, dtype=torch.bool)
                present[:, :, step.columns] = step.key_positions(self.row) >= 0
                if bool(present.all()):
                    present = torch.tensor([[[0, self.place.N]]], dtype=torch.int32)
                parts.append((slice(first, first + step.T), present.expand(1, step.T, -1)))
        if all(part.dtype == torch.int32 for _, part in parts):  # every call had all keys
            return None
        return self._stored(parts, 1)

    def _tree(self, rows: RuleGroup, each: list[masks.Mask]) -> dict[str, object]:
        """Return masks of one structure as a tree of {"all": [...]}, {"any": [...]} and arrays."""
        members = list(zip(*(mask.operands() for mask in each), strict=True))
        if members:
            return {each[0].kind: [self._tree(rows, list(member)) for member in members]}
        parts: list[tuple[slice, Tensor]] = []
        for mask, (step, first) in zip(each, rows.steps, strict=True):
            closed = replace(step, mask=mask).column_ranges(self.row)
            if closed is not None and closed.starts.shape[2] <= MAX_RANGES:
                ranges = torch.stack(closed, -1).flatten(2).int()  # [h,t,2 n]
                parts.append((slice(first, first + step.T), ranges))
            else:
                parts.extend(self._evaluated(mask, step, first))
        refusal = each[0].refusal()
        count = max(part.shape[0] for _, part in parts)
        return {"text": refusal.mask, "why": refusal.key, **self._stored(parts, count)}

    def _evaluated(
        self, mask: masks.Mask, step: RecordedStep, first: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Generate a mask by rows: (rows of the place, ranges or bool `[h or 1, t, N]`)."""
        N, heads = self.place.N, self.place.H
        size = max(1, MASK_CELLS_PER_CHUNK // max(1, N * heads))
        for start in range(0, step.T, size):
            stop = min(start + size, step.T)
            one = step.allowed(mask, slice(start, stop), ALL, self.row)
            cells = torch.zeros(one.shape[0], stop - start, N, dtype=torch.bool)
            cells[:, :, step.columns] = one
            ranges = _ranges_of_rows(cells)
            yield slice(first + start, first + stop), cells if ranges is None else ranges

    def _stored(self, parts: list[tuple[slice, Tensor]], count: int) -> dict[str, Any]:
        """Store rows of a mask as ranges, or as bits if some of them have too many ranges."""
        T, N = self.place.T, self.place.N
        if all(part.dtype == torch.int32 for _, part in parts):
            width = max(part.shape[2] for _, part in parts)
            ranges = torch.zeros(count, T, width, dtype=torch.int32)
            for rows, part in parts:
                ranges[:, rows, : part.shape[2]] = part
            name = self.keep("ranges", ranges.numpy())
            return {"ranges": name, "width": width, "heads": count}
        bits = torch.zeros(count, T, N, dtype=torch.bool)
        columns = torch.arange(N)
        for rows, part in parts:
            if part.dtype == torch.bool:
                bits[:, rows] = part
                continue
            for n in range(0, part.shape[2], 2):
                start, stop = part[:, :, n, None], part[:, :, n + 1, None]
                bits[:, rows] |= (columns >= start) & (columns < stop)
        return {
            "bits": self.keep("bits", np.packbits(bits.numpy(), bitorder="little")),
            "heads": count,
        }

    def keep(self, kind: str, x: NDArray[np.generic]) -> str:
        """Store an array and return its name; equal arrays of a kind are stored once."""
        name = f"{kind}-{hashlib.sha256(x.tobytes()).hexdigest()[:12]}-{x.size}"
        self.arrays.setdefault(name, x)
        return name

    def _bias(self, rows: RuleGroup, heads: list[int]) -> dict[str, object] | None:
        """Return the bias as a table over position differences if possible, else by cell."""
        bias = rows.step.bias
        if bias is None:
            return None
        table = _bias_by_offset(rows, self.row)
        if table is not None:
            low, values = table
            name = self.keep("offsets", values)
            return {
                "kind": "offset",
                "text": str(bias),
                "array": name,
                "low": low,
                "heads": len(values),
                "count": values.shape[1],
            }
        T, N = self.place.T, self.place.N
        names = {}
        for h in heads:
            cells = torch.zeros(T, N, dtype=torch.float64)
            for step, first in rows.steps:
                for where, block in _bias_blocks(step, self.row):
                    part = block[h if len(block) > 1 else 0]
                    cells[first + where.start : first + where.stop, step.columns] = part
            exact = torch.equal(cells.float().double(), cells)
            names[str(h)] = self.keep("bias", (cells.float() if exact else cells).numpy())
        return {"kind": "dense", "text": str(bias), "arrays": names}


def split_by_pool(place: Place) -> list[Place]:
    """Split a place into several, each with exactly one key per column.

    MLA, for example, may read keys for a prompt, and latents for a decoded token.
    """
    if place.has_one_key_per_column:
        return [place]
    parts = []
    for number, pool in enumerate(place.pools):
        steps = [step for step in place.steps if step.pool == number]
        once = len(torch.unique(pool.columns)) == len(pool.columns)
        for each in [steps] if once else [[step] for step in steps]:
            keys = pool.columns if once else each[0].columns
            shape = (*pool.k.shape[:2], place.N)
            k = pool.k.new_zeros(*shape, pool.k.shape[3])
            k[:, :, keys] = pool.k if once else place.keys(each[0])
            v = None
            if pool.v is not None:
                v = pool.v.new_zeros(*shape, pool.v.shape[3])
                step_values = pool.v if once else place.values(each[0])
                v[:, :, keys] = step_values  # type: ignore[assignment]
            whole = replace(pool, k=k, v=v, columns=torch.arange(place.N))
            name = f"{place.name or 'attend'} · {pool.key_kind}"
            own_steps = tuple(replace(step, pool=0, pool_index=None) for step in each)
            parts.append(replace(place, name=name, steps=own_steps, pools=(whole,)))
    return parts


def _same_rule(a: RecordedStep, b: RecordedStep) -> bool:
    """Return whether two steps have equal rules, and masks of the same structure."""
    sink = a.sink is b.sink or (
        a.sink is not None and b.sink is not None and torch.equal(a.sink, b.sink)
    )
    same = (a.scale, a.softcap, a.kernel) == (b.scale, b.softcap, b.kernel) and sink
    return same and _mask_structure(a.mask) == _mask_structure(b.mask) and a.bias == b.bias


def _ranges_of_rows(cells: Tensor) -> Tensor | None:
    """Return the ranges of True in each row of `[h, t, N]`, int32 `[h, t, 2 n]`; None if a row has
    more than `MAX_RANGES`.

    >>> _ranges_of_rows(torch.tensor([[[True, False, True, True]]])).tolist()
    [[[0, 1, 2, 4]]]
    """
    edge = torch.zeros(*cells.shape[:2], 1, dtype=torch.bool)
    changes = torch.cat([edge, cells], 2) != torch.cat([cells, edge], 2)  # starts and stops
    width = int(changes.sum(2).max()) if changes.numel() else 0
    if width > 2 * MAX_RANGES:
        return None
    h, t, n = changes.nonzero().T
    rank = (changes.cumsum(2) - 1)[changes]
    ranges = torch.zeros(*cells.shape[:2], max(width, 2), dtype=torch.int32)
    ranges[h, t, rank] = n.int()
    return ranges


def _mask_structure(mask: masks.Mask) -> Any:
    """Return the tree of a mask, with the text of its terms."""
    operands = mask.operands()
    return (type(mask), *map(_mask_structure, operands)) if operands else str(mask)


def _bias_blocks(step: RecordedStep, row: int) -> Iterator[tuple[slice, Tensor]]:
    """Generate the bias of a step some rows at a time: (rows, `[H or 1, t, s]` in fp64)."""
    S = step.columns.numel()
    assert step.bias is not None
    heads = max(1, step.q.shape[1])
    size = max(1, BIAS_CELLS_PER_CHUNK // max(1, S * heads))
    for start in range(0, step.T, size):
        where = slice(start, min(start + size, step.T))
        rows = step.call_rows(where)
        block = step.bias.block(step.q_positions, step.k_positions, rows, dtype=torch.float64)
        yield where, own_or_shared(block, row).detach().cpu()


def _bias_by_offset(rows: RuleGroup, row: int) -> tuple[int, NDArray[np.float64]] | None:
    """Return (lowest q - k, values `[H or 1, offsets]`) if the bias is such; else None."""
    both = [(step.row_positions(row), step.key_positions(row)) for step, _ in rows.steps]
    offsets = [q[:, None] - k for q, k in both]
    low, high = min(int(x.min()) for x in offsets), max(int(x.max()) for x in offsets)
    table: Tensor | None = None
    for (step, _), offset, (_, k) in zip(rows.steps, offsets, both, strict=True):
        real = (k >= 0).expand(offset.shape)
        for where, block in _bias_blocks(step, row):
            if table is None:
                table = torch.full((len(block), high - low + 1), torch.nan, dtype=torch.float64)
            offset_index, is_real = offset[where] - low, real[where]
            values, index = block[:, is_real], offset_index[is_real]
            is_new = table[:, index].isnan()
            table[:, index] = torch.where(is_new, values, table[:, index])
            if not torch.equal(table[:, index], values):
                return None
    assert table is not None
    return low, torch.where(table.isnan(), 0.0, table).numpy()
