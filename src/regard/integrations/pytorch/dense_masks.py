"""Dense masks read as rules: a tensor [T, S] that is really causal, a window or padding is
recognised.

Most models build a tensor of booleans, or of 0 and -inf, and hand it to every layer. A kernel that
knows the rule behind it skips what is hidden; of the tensor it would have to read every element.
A recognised mask equals the tensor element by element: the candidate rule is written out and
compared, never assumed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.masks import Causal, Dense, Mask, Padding, Window
from regard.span import Span

MASKS_KEPT = 32
"""How many recognised tensors are remembered; a model has one or two kinds of mask a step."""


@dataclass(frozen=True)
class Recognised:
    """What a dense mask says of a call with T queries and S keys.

    Attributes:
        mask: the rule, `Dense` where no rule fits, or None where every query sees every key.
        q_positions: where the queries stand; the keys stand at 0..S-1.
        bias: what a float mask adds to the scores, or None.
        uniform_rows: some row hides every key by a finite number. torch then gives the mean of all
            values, which no mask says: such a call is left to torch.
    """

    mask: Mask | None
    q_positions: Span
    bias: Tensor | None = None
    uniform_rows: bool = False


def recognise(mask: Tensor, B: int, T: int, S: int) -> Recognised:
    """Read a mask as torch means it: bool, True = may attend; or floats that are added to scores.

    Args:
        mask: any shape that broadcasts to [B, H, T, S].
        B, T, S: the number of rows of the batch, of queries and of keys.

    >>> found = recognise(torch.ones(3, 5, dtype=torch.bool).tril(2), 1, 3, 5)
    >>> print(found.mask, found.q_positions)
    causal Span(start=2, length=3)
    """
    mask = mask.detach()
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask.expand(*mask.shape[:2], T, S)
    if mask.dtype == torch.bool:
        return _rule(mask, B, T, S)
    lowest = mask <= torch.finfo(mask.dtype).min / 2
    found = _rule(~lowest, B, T, S)
    bias = None if bool((lowest | (mask == 0)).all()) else mask.masked_fill(lowest, 0)
    finite = (lowest & (mask > -torch.inf)).any(-1)
    return replace(found, bias=bias, uniform_rows=bool((lowest.all(-1) & finite).any()))


class Memory:
    """Masks that were recognised, by their storage and its version: layers share one tensor."""

    def __init__(self, size: int = MASKS_KEPT) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[object, ...], tuple[StorageWeakRef, Recognised]] = (
            OrderedDict()
        )
        self.looked = 0
        """How many masks were looked through."""

    def recognise(self, mask: Tensor, B: int, T: int, S: int) -> Recognised:
        """As `recognise`, once for a tensor that does not change."""
        if mask.is_inference():  # it counts no versions
            self.looked += 1
            return recognise(mask, B, T, S)
        storage = mask.untyped_storage()
        key = (
            storage._cdata,
            mask.storage_offset(),
            mask._version,
            mask.dtype,
            tuple(mask.shape),
            mask.stride(),
            B,
            T,
            S,
        )
        with self._lock:
            entry = self._found.get(key)
        if entry is not None and not entry[0].expired():
            return entry[1]
        found = recognise(mask, B, T, S)
        self.looked += 1
        with self._lock:
            self._found[key] = (StorageWeakRef(storage), found)
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        return found


def _rule(visible: Tensor, B: int, T: int, S: int) -> Recognised:
    """The rule of a bool mask [B or 1, H or 1, T, S]: the first candidate that equals it."""
    here = Span(S - T, T, tokens=S < T)
    if T and S and _same_for_heads(visible):
        if bool(visible.all()):
            return Recognised(None, here)
        visible = visible[:, :1]
        for rule, start in _candidates(visible[:, 0], B, T, S):
            positions = Span(start, T, tokens=start < 0)
            if torch.equal(
                rule.block(positions, Span(0, S), device=visible.device).expand(B, 1, T, S),
                visible.expand(B, 1, T, S),
            ):
                return Recognised(rule, positions)
    return Recognised(Dense(visible), here)


def _same_for_heads(visible: Tensor) -> bool:
    if visible.shape[1] == 1 or visible.stride(1) == 0:
        return True
    return torch.equal(visible, visible[:, :1].expand_as(visible))


def _candidates(visible: Tensor, B: int, T: int, S: int) -> Iterator[tuple[Mask, int]]:
    """Rules that a mask [B or 1, T, S] may be, with the first query's position."""
    keys = visible.any(1)  # [B or 1, S]: which keys some query sees
    seen = keys[0].nonzero()
    if not len(seen):
        return
    padding = None if bool(keys.all()) else Padding.from_keep(keys.expand(B, S))
    if padding is not None:
        yield padding, S - T
    last = visible[0, -1].nonzero()
    own = int(last[-1]) - (T - 1) if len(last) else S - T
    for start in dict.fromkeys((S - T, 0, own)):
        rules: list[Mask] = [Causal()]
        q = torch.arange(start, start + T, device=visible.device)[:, None]
        distance = q - torch.arange(S, device=visible.device)
        size = int(distance.masked_fill(~visible.any(0), -1).max()) + 1
        if 1 <= size < S:
            rules.append(Causal() & Window(size))
        for rule in rules:
            yield rule, start
            if padding is not None:
                yield rule & padding, start
